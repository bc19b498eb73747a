"""``manage.py migrate``, also of a shard."""

from __future__ import annotations

from typing import Any, Final

from django.core.management import call_command
from django.core.management.base import CommandError, no_translations
from django.core.management.commands import migrate

from shardids.django.aliases import shard_of_alias

_OF_TABLES: Final = ("fake_initial", "run_syncdb", "prune")


class Command(migrate.Command):
    """Django's own; for a shard, ``migrate_shards --database``."""

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        alias = options["database"]
        if shard_of_alias(alias) is None:
            super().handle(*args, **options)
            return
        for name in _OF_TABLES:
            if options[name]:
                raise CommandError(
                    f"--{name.replace('_', '-')} is not for shards: manage.py migrate_shards --help"
                )
        words = [word for word in (options["app_label"], options["migration_name"]) if word]
        call_command(
            "migrate_shards",
            *words,
            database=[alias],
            plan=options["plan"],
            check=options["check_unapplied"],
            fake=options["fake"],
            verbosity=options["verbosity"],
            stdout=self.stdout,
            stderr=self.stderr,
        )
