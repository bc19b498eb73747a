"""The contents of a source: tables with columns, keys and foreign keys, and losses of a copy of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Connection

from shardids.adopt.plan.belongings import Belonging, read_belongings
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

    ``is_checked``: all rows are known to obey it. ``is_of_partitions``: each partition that has it has one of
    its own; of these, the first. ``is_to_partition``: it refers to one. ``is_builtin``: it compares by
    PostgreSQL's own equality. ``sets_null``: when the row is deleted that it refers to.
    """

    name: str
    table: str
    columns: tuple[str, ...]
    referenced_table: str
    referenced: tuple[str, ...]
    is_of_partitions: bool = False
    is_to_partition: bool = False
    sets_null: bool = False
    is_checked: bool = True
    is_builtin: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the source, with its partitions; ``sql`` is its name with the schema, as SQL writes it.

    Attributes:
        relkind: ``r``, ``p`` for a partitioned one, ``f`` for a foreign one.
        parts: how many tables hold its rows: 1, or the number of its partitions.
        heap_bytes: size of the rows; ``size_bytes``: with indexes and large values.
        rows: estimated number of rows.
        inserted: how many rows were inserted, as the server counts; ``written``: or updated or deleted.
        is_readable: the role may read all rows; ``is_usable``: it may use the schema.
    """

    schema: str
    name: str
    sql: str
    relkind: str = "r"
    parts: int = 1
    heap_bytes: int = 0
    size_bytes: int = 0
    rows: int = 0
    inserted: int = 0
    written: int = 0
    is_readable: bool = True
    is_usable: bool = True
    columns: Mapping[str, Column]
    keys: Sequence[Key] = ()

    @cached_property
    def primary_key(self) -> tuple[str, ...]:
        """Returns the columns of the primary key, none if it has none."""
        return next((key.columns for key in self.keys if key.is_primary), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """What never comes along: a rule, a materialized view. ``table``: that which it belongs to."""

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
    has_barrier: bool
    counted_s: float | None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The contents of a source; tables by their names in SQL."""

    server: Server
    tables: Mapping[str, Table]
    foreign_keys: Sequence[ForeignKey]
    things: Sequence[Thing]
    belongings: Sequence[Belonging] = ()


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
    tables = {}
    for row in found:
        name = names[row.pop("oid")]
        tables[name] = Table(
            **row,
            columns={column.name: column for column in columns[name]},
            keys=keys[name],
        )
    return Inventory(
        server=read_server(connection),
        tables=tables,
        foreign_keys=_foreign_keys(_fields(connection, "foreign_keys"), names, tables),
        things=[
            Thing(kind=row["kind"], table=names.get(row["table_oid"]), name=row["name"])
            for row in _fields(connection, "objects")
            if row["table_oid"] is None or row["table_oid"] in names
        ],
        belongings=read_belongings(connection),
    )


def read_server(connection: Connection) -> Server:
    """Read the server's properties in the open transaction."""
    (found,) = _fields(connection, "server")
    return Server(**found)


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


def _foreign_keys(
    found: Iterable[dict[str, Any]], names: Mapping[int, str], tables: Mapping[str, Table]
) -> list[ForeignKey]:
    """Return the foreign keys; those of a table's partitions that are alike count as one of the table."""
    keys: list[ForeignKey] = []
    alike: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        if row["table_oid"] not in names or row["referenced_oid"] not in names:
            continue
        if row["is_of_partition"]:
            which = (row["table_oid"], *row["columns"], row["referenced_oid"], *row["referenced"])
            alike[which].append(row)
        else:
            keys.append(_foreign_key(row, names))
    for rows_ in alike.values():
        one = _foreign_key(rows_[0], names)
        # In a partition without it a row may refer to nothing.
        has_all = sum(row["leaves"] for row in rows_) >= tables[one.table].parts
        is_checked = has_all and all(row["is_checked"] for row in rows_)
        keys.append(replace(one, is_of_partitions=True, is_checked=is_checked))
    return keys


def _foreign_key(row: dict[str, Any], names: Mapping[int, str]) -> ForeignKey:
    return ForeignKey(
        name=row["name"],
        table=names[row["table_oid"]],
        columns=tuple(row["columns"]),
        referenced_table=names[row["referenced_oid"]],
        referenced=tuple(row["referenced"]),
        is_to_partition=row["is_to_partition"],
        sets_null=row["on_delete"] == "n",
        is_checked=row["is_checked"],
        is_builtin=row["is_builtin"],
    )
