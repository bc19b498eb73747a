"""The function ``next_id()`` on connections to SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, Table, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateTable, DefaultClause
from sqlalchemy.sql.compiler import InsertmanyvaluesSentinelOpts

from shardids.errors import BadArgument
from shardids.models.columns import next_id

_REGISTERED: Final = "shardids.fake_ids"


def register(ids: Callable[[], int], database: object) -> None:
    """Make ``next_id()`` return ``ids()``; see :meth:`shardids.testing.FakeIds.register`."""
    if isinstance(database, sqlite3.Connection):
        database.create_function("next_id", 0, ids)
        return
    engine = database.sync_engine if isinstance(database, AsyncEngine) else database
    if not isinstance(engine, Engine):
        raise BadArgument(
            f"next_id() can't be registered on {type(database).__name__}",
            hint="Give the engine, or a connection of the module sqlite3.",
        )
    if engine.dialect.name != "sqlite":
        raise BadArgument(
            f"next_id() can be registered on SQLite, and this engine is for {engine.dialect.name}",
            hint="On PostgreSQL, each shard has its own next_id().",
        )
    # The function is called row by row, in the order of VALUES, so the keys rise as those of real shards do.
    # Without this, SQLAlchemy refuses to insert such rows into SQLite.
    dialect = engine.dialect
    dialect.insertmanyvalues_implicit_sentinel |= InsertmanyvaluesSentinelOpts.SEQUENCE
    event.listen(engine, "before_execute", _refuse_rowids)

    # Not on connect: the pool may have connections already.
    @event.listens_for(engine, "checkout")
    def _create_function(connection: Any, record: Any, _proxy: object) -> None:
        there = record.info.get(_REGISTERED)
        if there is ids:
            return
        if there is not None:
            raise BadArgument(
                "two generators of fake IDs are registered on this engine",
                hint="Begin the first one again instead: ids.restart()",
            )
        connection.create_function("next_id", 0, ids)
        record.info[_REGISTERED] = ids


def _refuse_rowids(connection: Any, statement: object, *_: object) -> None:
    """Refuse tables whose key SQLite would make itself: of an INTEGER PRIMARY KEY it ignores the default."""
    if not isinstance(statement, CreateTable):
        return
    table = statement.element
    keys = list(table.primary_key) if isinstance(table, Table) else []
    for key in keys if len(keys) == 1 else []:
        made_here = isinstance(key.server_default, DefaultClause) and isinstance(
            key.server_default.arg, next_id
        )
        if made_here and key.type.compile(connection.dialect).upper() == "INTEGER":
            raise BadArgument(
                f"SQLite would number the rows of {table} itself and never call next_id():"
                f" {key} is an INTEGER",
                hint="Make it a BigInteger without a variant for SQLite, as shardids.primary_key() does.",
            )
