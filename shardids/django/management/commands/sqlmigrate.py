"""``manage.py sqlmigrate``, also of a shard."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import sqlmigrate

from shardids.catalog.rows import Catalog
from shardids.django.aliases import configuration, refuse_tests, shard_of_alias
from shardids.django.management.elsewhere import named_models, say_elsewhere
from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.run import ShardMigrations
from shardids.errors import ShardidsError


class Command(sqlmigrate.Command):
    """Django's own; for a shard, the SQL that ``migrate_shards`` sends."""

    def handle(self, *_: Any, **options: Any) -> str | None:
        """Run the command."""
        shard = shard_of_alias(options["database"])
        label = options["app_label"]
        if shard is None:
            say_elsewhere(self, named_models([label]), options, must_be_there=True)
            return super().handle(**options)
        if options["backwards"]:
            raise CommandError("migrations of shards are not undone: write one that goes forward")
        try:
            refuse_tests()
            history = ShardHistory()
            name = history.named(label, options["migration_name"])
            with (
                closing(Catalog(configuration()["CATALOG"])) as catalog,
                ShardMigrations(catalog, history) as migrations,
            ):
                rehearsed = migrations.rehearsed(shard, name)
        except ShardidsError as error:
            raise CommandError(str(error)) from error
        self.output_transaction = history.of_shards[name].atomic
        if rehearsed.reason:
            return f"-- {name}: {rehearsed.reason}, on each shard"
        return "\n".join(rehearsed.statements)
