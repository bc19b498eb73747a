"""Sessions whose rows answer others: the IDs that shards issue for them, or they bring, sort after those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Column, Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstanceState, Mapper

from shardids.client.routing.models import is_filled
from shardids.errors import BadArgument

After = int | Iterable[int]
"""The IDs, one or several, that the IDs of a session sort after."""

_READ_ONLY: Final = "25006"
_ADVANCE_PAST: Final = text("select shardids.advance_past(:shard, :id)")


def advance_past(connection: Connection, shard: int, id_: int) -> None:
    """Raises a shard of the connection's node past an ID, if it is not past it.

    Raises:
        BadArgument: the shard is not past it, and the transaction is read-only.
        TooFarAhead: the ID leads by more than ``max_past``.
        UnknownShard, ShardFenced, ShardMoved, CopyNotActivated: the shard issues no IDs here.
    """
    try:
        connection.execute(_ADVANCE_PAST, {"shard": shard, "id": id_})
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _READ_ONLY:
            raise
        raise BadArgument(
            f"shard {shard} is not past ID {id_} yet, and neither a read-only transaction nor a standby can"
            " raise it",
            hint="What is only read needs no after=. To raise the shard first, in a transaction that writes:"
            f" cluster.reserve({shard}, 1, after={id_})",
        ) from error


def refuse_earlier_object(state: InstanceState[Any], latest: int) -> None:
    """Refuses a new object whose own ID, set by the application, does not sort after ``latest``.

    Raises:
        BadArgument: it does not.
    """
    _refuse(state.mapper, state.dict, latest)


def refuse_earlier_rows(mapper: Mapper[Any], rows: Iterable[Mapping[str, Any]], latest: int) -> None:
    """Refuses rows of a bulk INSERT as :func:`refuse_earlier_object` does."""
    for row in rows:
        _refuse(mapper, row, latest)


def refuse_earlier_statement(statement: Any, rows: Iterable[Mapping[str, Any]], latest: int) -> None:
    """Refuses rows of an INSERT, of a mapped class or a table, as :func:`refuse_earlier_object` does."""
    mapper: Mapper[Any] | None = getattr(statement._propagate_attrs.get("plugin_subject"), "mapper", None)
    table = statement.table
    for row in rows:
        if mapper is not None:
            _refuse(mapper, row, latest)
        for column in table.primary_key if mapper is None else ():
            if is_filled(column):
                refuse_earlier_value(table.name, column.key, row.get(column.key), latest)


def _refuse(mapper: Mapper[Any], values: Mapping[str, Any], latest: int) -> None:
    for column in mapper.primary_key:
        if isinstance(column, Column) and is_filled(column):
            key = mapper.get_property_by_column(column).key
            refuse_earlier_value(mapper.class_.__name__, key, values.get(key), latest)


def refuse_earlier_value(name: str, key: str, value: Any, latest: int) -> None:
    """Refuses the key of a new row if it is an ID that does not sort after ``latest``.

    Raises:
        BadArgument: it is one.
    """
    is_id = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
    if is_id and int(value) <= latest:
        raise BadArgument(
            f"{key} {value} of a new row of {name} does not sort after {latest}, as this session's are to",
            hint="If it was set aside before, leave it to the shard, or reserve others:"
            " cluster.reserve(shard, count, after=…). Nothing was written.",
        )
