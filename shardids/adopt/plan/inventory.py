"""The contents of a source: tables with columns, keys and foreign keys, and losses of a copy of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Connection

from shardids.pg.definitions import Column
from shardids.pg.queries import rows
from shardids.pg.sqlfiles import read_sql

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A primary key, unique index or exclusion constraint.

    ``columns``: two rows in conflict are equal in them.
    """

    name: str
    is_primary: bool
    is_exclusion: bool
    is_partial: bool
    has_expression: bool
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """A foreign key; tables by their names in SQL.

    ``is_checked``: all rows are known to obey it. ``is_of_partition``: it is of a partition alone, or refers
    to one. ``is_builtin``: it compares by PostgreSQL's own equality.
    """

    name: str
    table: str
    columns: tuple[str, ...]
    referenced_table: str
    referenced: tuple[str, ...]
    is_of_partition: bool = False
    is_checked: bool = True
    is_builtin: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the source, with its partitions; ``sql`` is its name with the schema, as SQL writes it.

    Attributes:
        relkind: ``r``, ``p`` for a partitioned one, ``f`` for a foreign one.
        persistence: ``p``, or ``u`` if it is unlogged, or one of its parts.
        is_foreign: it is a foreign table, or one of its parts.
        parts: how many tables hold its rows: 1, or the number of its partitions.
        heap_bytes: size of the rows; ``size_bytes``: with indexes and large values.
        rows: estimated number of rows.
        inserted: how many rows were inserted, as the server's counters say.
        is_readable: the role may read all rows.
        is_inherited: it inherits, or is inherited by another table.
        identities: the columns that identify a row in logical replication, of each part; None: the whole row.
    """

    schema: str
    name: str
    sql: str
    relkind: str = "r"
    persistence: str = "p"
    is_foreign: bool = False
    parts: int = 1
    heap_bytes: int = 0
    size_bytes: int = 0
    rows: int = 0
    inserted: int = 0
    is_readable: bool = True
    is_inherited: bool = False
    columns: Mapping[str, Column]
    keys: Sequence[Key] = ()
    identities: Sequence[Sequence[str] | None] = ()

    @cached_property
    def primary_key(self) -> tuple[str, ...]:
        """Returns the columns of the primary key, none if it has none."""
        return next((key.columns for key in self.keys if key.is_primary), ())

    def is_identity(self, column: str) -> bool:
        """Return whether logical replication sends the column of rows that are updated or deleted."""
        return all(columns is None or column in columns for columns in self.identities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """What copying rows does not bring along: a trigger, a view. ``table``: that which it belongs to."""

    kind: str
    table: str | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What logical replication needs of the source's server; ``counted_s``: age of its counters, if known."""

    version: int
    is_standby: bool
    wal_level: str
    encoding: str
    slots: int
    used_slots: int
    senders: int
    used_senders: int
    large_objects: int
    prepared_transactions: int
    is_of_cluster: bool
    counted_s: float | None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The contents of a source; tables by their names in SQL."""

    server: Server
    tables: Mapping[str, Table]
    foreign_keys: Sequence[ForeignKey]
    things: Sequence[Thing]


def read_inventory(connection: Connection) -> Inventory:
    """Read the inventory in the open transaction: some queries, however many tables there are."""
    # Where the catalogs have no statistics yet, the planner takes thousands of tables for a few.
    connection.exec_driver_sql("set local enable_nestloop = off")
    found = _fields(connection, "tables")
    names = {row["oid"]: row["sql"] for row in found}
    columns = _by_table(
        _fields(connection, "columns"),
        names,
        lambda row: Column(**row | {"sequences": tuple(row["sequences"])}),
    )
    keys = _by_table(_fields(connection, "keys"), names, _key)
    identities = _by_table(_fields(connection, "identities"), names, lambda row: row["columns"])
    tables = {}
    for row in found:
        name = names[row.pop("oid")]
        tables[name] = Table(
            **row,
            columns={column.name: column for column in columns[name]},
            keys=keys[name],
            identities=identities[name],
        )
    (server,) = _fields(connection, "server")
    return Inventory(
        server=Server(**server),
        tables=tables,
        foreign_keys=[
            _foreign_key(row, names)
            for row in _fields(connection, "foreign_keys")
            if row["table_oid"] in names and row["referenced_oid"] in names
        ],
        things=[
            Thing(kind=row["kind"], table=names.get(row["table_oid"]), name=row["name"])
            for row in _fields(connection, "objects")
            if row["table_oid"] is None or row["table_oid"] in names
        ],
    )


def _fields(connection: Connection, name: str) -> list[dict[str, Any]]:
    """Return the rows of a query, each as what its columns hold."""
    return rows(connection, read_sql(f"adopt/{name}.v1"), dict[str, Any])


def _by_table(
    found: Iterable[dict[str, Any]], names: Mapping[int, str], make: Callable[[dict[str, Any]], _Row]
) -> Mapping[str, list[_Row]]:
    """Group rows by the name of their table, and leave out those of others."""
    grouped: dict[str, list[_Row]] = defaultdict(list)
    for row in found:
        if (name := names.get(row.pop("table_oid"))) is not None:
            grouped[name].append(make(row))
    return grouped


def _key(row: dict[str, Any]) -> Key:
    return Key(**row | {"columns": tuple(row["columns"])})


def _foreign_key(row: dict[str, Any], names: Mapping[int, str]) -> ForeignKey:
    return ForeignKey(
        name=row["name"],
        table=names[row["table_oid"]],
        columns=tuple(row["columns"]),
        referenced_table=names[row["referenced_oid"]],
        referenced=tuple(row["referenced"]),
        is_of_partition=row["is_of_partition"],
        is_checked=row["is_checked"],
        is_builtin=row["is_builtin"],
    )
