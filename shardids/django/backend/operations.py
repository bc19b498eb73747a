"""How a shard's alias writes names: tables of sharded models have the shard's schema before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.backends.postgresql import operations

from shardids.django.sharded import tables

if TYPE_CHECKING:
    from shardids.django.backend.base import DatabaseWrapper


class DatabaseOperations(operations.DatabaseOperations):
    """Django's own for PostgreSQL, but for the names of sharded models' tables."""

    connection: DatabaseWrapper
    compiler_module = "shardids.django.backend.compiler"

    def quote_name(self, name: str) -> str:
        """Returns a quoted name. That of a sharded model's table has the schema before it.

        Columns are named by table and column, so theirs has it, too. Django asks in the same way for
        tables, columns and aliases: a check refuses a table that is called as a column is.
        """
        quoted: str = super().quote_name(name)
        return self._in_schema + quoted if name in tables().sharded else quoted

    def for_update_sql(
        self, nowait: bool = False, skip_locked: bool = False, of: Any = (), no_key: bool = False
    ) -> str:
        """Returns the clause that locks rows: PostgreSQL takes bare names of tables in it."""
        bare = tuple(name.removeprefix(self._in_schema) for name in of)
        clause: str = super().for_update_sql(nowait=nowait, skip_locked=skip_locked, of=bare, no_key=no_key)
        return clause

    @property
    def _in_schema(self) -> str:
        return f'"{self.connection.schema}".'
