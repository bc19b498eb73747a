"""``manage.py showmigrations``, also of a shard."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import showmigrations

from shardids.catalog.rows import Catalog
from shardids.django.aliases import configuration, refuse_tests, shard_of_alias
from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.run import ShardMigrations
from shardids.errors import ShardidsError


class Command(showmigrations.Command):
    """Django's own; of a shard, the migrations that ``migrate_shards`` runs."""

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the command."""
        shard = shard_of_alias(options["database"])
        if shard is None:
            super().handle(**options)
            return
        try:
            refuse_tests()
            history = ShardHistory()
            with (
                closing(Catalog(configuration()["CATALOG"])) as catalog,
                ShardMigrations(catalog, history) as migrations,
            ):
                there = history.having_run(migrations.position(shard).heads or ())
        except ShardidsError as error:
            raise CommandError(str(error)) from error
        label = None
        wanted = options["app_label"]
        names = [name for name in history.of_shards if not wanted or name.split(".")[0] in wanted]
        is_plan = options["format"] == "plan"
        for name in names if is_plan else sorted(names, key=lambda name: name.split(".")[0]):
            mark = "[X]" if name in there else "[ ]"
            if is_plan:
                self.stdout.write(f"{mark}  {name}")
                continue
            if name.split(".")[0] != label:
                label = name.split(".")[0]
                self.stdout.write(label, self.style.MIGRATE_LABEL)
            self.stdout.write(f" {mark} {name.partition('.')[2]}")
        if not names:
            self.stdout.write("(no migrations)", self.style.ERROR)
