"""Refuses statements on a shard that name tables which are not in shards."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import compiler

from shardids.django.sharded import tables
from shardids.errors import BadArgument


class _OnOneShard:
    """Looks at a statement once it is written, when all its joins are known, and before it is sent."""

    query: Any
    connection: Any

    def as_sql(self, *args: Any, **options: Any) -> Any:
        """Returns the statement and its parameters. Raises BadArgument if it names an unsharded table."""
        written = super().as_sql(*args, **options)  # type: ignore[misc] # of Django's class beside this one
        named: set[Any] = {getattr(one, "table_name", None) for one in self.query.alias_map.values()}
        if self.query.model is not None:
            named.add(self.query.model._meta.db_table)
        strangers = sorted(named & tables().others)
        if strangers:
            raise BadArgument(
                f"shard {self.connection.shard} has no table {', '.join(strangers)}: its model is elsewhere",
                hint="A statement is for one database: query the model by itself, not by a join.",
            )
        return written


class SQLCompiler(_OnOneShard, compiler.SQLCompiler):
    """SELECT."""


class SQLInsertCompiler(_OnOneShard, compiler.SQLInsertCompiler):
    """INSERT."""


class SQLDeleteCompiler(_OnOneShard, compiler.SQLDeleteCompiler):
    """DELETE."""


class SQLUpdateCompiler(_OnOneShard, compiler.SQLUpdateCompiler):
    """UPDATE."""


class SQLAggregateCompiler(_OnOneShard, compiler.SQLAggregateCompiler):
    """Aggregates over a SELECT."""
