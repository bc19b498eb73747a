"""``manage.py inspectdb``, which writes the keys of shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.commands import inspectdb

from shardids.django.aliases import shard_of_alias


class Command(inspectdb.Command):
    """Django's own, with the import of ``ShardIdField`` for a shard."""

    def handle_inspection(self, options: Any) -> Iterator[str]:
        """Yield the lines of the models."""
        for line in super().handle_inspection(options):
            yield line
            if line.startswith("from ") and shard_of_alias(options["database"]) is not None:
                yield "import shardids.django"
