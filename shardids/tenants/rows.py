"""Rows of keys in one shard: the tables with a path to a key column, the number and the size of the rows.

It reads only. Tables find a key column by the walk over foreign keys that an adoption takes:
:mod:`shardids.adopt.plan.paths`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.plan.paths import Way, Wishes, sort_tables
from shardids.catalog.keys.known import Key, kind_of
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import BadArgument
from shardids.pg.queries import prepare
from shardids.pg.reader import Reader, reading_as_reader
from shardids.tenants.family import bare, id_column, read_shard

_KEY_COLUMNS: Final = text("""
    select c.relname::text as "table", a.attname::text as "column",
           case when t.typname in ('int2', 'int4', 'int8') then 'bigint'
                when t.typname in ('text', 'varchar') or t.typtype = 'e' then 'text'
                when t.typname in ('uuid', 'bytea') then t.typname::text end as kind
    from pg_class c
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where c.relnamespace = to_regnamespace(quote_ident(:schema))
      and c.relkind in ('r', 'p') and not c.relispartition
      and (c.relname || '.' || a.attname) = any (:columns)""")
_MOST_ROWS: Final = 100_000
"""How many of the newest rows of a table are read to find busy keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPath:
    """The way from a table to the column with the key of its rows.

    Attributes:
        table: the table.
        id_column: the column of its primary key that holds IDs of the cluster, if it does.
        way: the foreign keys, and the key column of the last table.
        kind: the kind of its keys.
    """

    table: str
    id_column: str | None
    way: Way
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfKey:
    """The rows of a key in one table: their number, and their size in bytes without indexes."""

    table: str
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyKey:
    """A key with new rows in a shard.

    Attributes:
        kind: its kind.
        key: the key as text.
        rows: how many new rows it has.
        share: which part of the shard's new rows these are, 0 to 1.
        table: the table with most of them.
    """

    kind: str
    key: str
    rows: int
    share: float
    table: str


def paths_in(connection: Connection, schema: str, columns: Sequence[str]) -> list[KeyPath]:
    """Return the shortest path of each table of a shard that has one, by the table's name.

    Args:
        connection: to the shard's node.
        schema: the shard's schema.
        columns: the key columns: ``users.name``.

    Raises:
        BadArgument: no table has such a column, or its type has no stable hash.
    """
    kinds: dict[str, tuple[str, str]] = {}
    for row in connection.execute(_KEY_COLUMNS, {"schema": schema, "columns": list(columns)}):
        if row.kind is None:
            raise BadArgument(
                f"{row.table}.{row.column} can't be a sharding key",
                hint="A sharding key is an integer, text, bytea or uuid.",
            )
        kinds[row.table] = (row.column, row.kind)
    if missing := [one for one in columns if one.partition(".")[0] not in kinds]:
        raise BadArgument(
            f"no table of {schema} has the column {missing[0]}", hint="For example: --key users.name"
        )
    _, inventory = read_shard(connection, schema)
    tables = inventory.tables
    of_table = {name: kinds[table.name] for name, table in tables.items() if table.name in kinds}
    root, *others = of_table
    ways = sort_tables(
        inventory,
        Wishes(root=root, root_key=of_table[root][0], keys={name: of_table[name][0] for name in others}),
    ).ways
    return [
        KeyPath(
            table=tables[name].name,
            id_column=id_column(tables[name].primary_key, tables[name].columns.values()),
            way=ways[name],
            kind=of_table[_holder(ways, name, of_table)][1],
        )
        for name in sorted(ways)
    ]


def _holder(ways: Mapping[str, Way], name: str, named: Collection[str]) -> str:
    """Return the table with the named key column that a table's way leads to."""
    while name not in named:
        path, first = ways[name].path, ways[name].first
        last = path[-1] if path else first
        if last is None:
            raise AssertionError(name)
        name = last.referenced_table
    return name


def rows_of_key(catalog: Catalog, shard: int, key: Key, columns: Sequence[str]) -> list[RowsOfKey]:
    """Return the rows that a key has in a shard, by table; it reads all of them.

    Raises:
        BadArgument: as :func:`paths_in` does.
        UnknownShard: no node has the shard.
    """
    schema = schema_name(catalog.describe().schema_prefix, shard)
    kind = kind_of(key)

    with _node_of(catalog, shard) as (connection, reader):
        with connection.begin():
            prepare(connection)
            paths = [path for path in paths_in(connection, schema, columns) if path.kind == kind]
        return [
            RowsOfKey(table=path.table, **row)
            for path in paths
            for row in _rows(reader, _counted(schema, path, key))
        ]


def busy_keys(
    catalog: Catalog, shard: int, columns: Sequence[str], *, last_ms: int, limit: int = 10
) -> list[BusyKey]:
    """Return the keys with most new rows in a shard, by the IDs of the last ``last_ms`` milliseconds.

    It reads the newest rows of each table whose key the shard fills, at most 100,000 per table.

    Raises:
        BadArgument: as :func:`paths_in` does.
        UnknownShard: no node has the shard.
    """
    description = catalog.describe()
    schema = schema_name(description.schema_prefix, shard)

    counted: dict[tuple[str, str], dict[str, int]] = {}
    with _node_of(catalog, shard) as (connection, reader):
        with connection.begin():
            prepare(connection)
            now_ms = connection.scalar(text("select (extract(epoch from clock_timestamp()) * 1000)::bigint"))
            paths = paths_in(connection, schema, columns)
        since = max(now_ms - last_ms - description.layout.epoch_ms, 0)
        lowest = description.layout.encode(ms=since, shard=shard)
        for path in paths:
            if path.id_column is None:
                continue
            for row in _rows(reader, _newest(schema, path, path.id_column, lowest)):
                counted.setdefault((path.kind, row["key"]), {})[path.table] = row["rows"]
    return _busiest(counted, limit)


def _busiest(counted: Mapping[tuple[str, str], Mapping[str, int]], limit: int) -> list[BusyKey]:
    total = sum(sum(tables.values()) for tables in counted.values())
    found = [
        BusyKey(
            kind=kind,
            key=key,
            rows=sum(tables.values()),
            share=sum(tables.values()) / total,
            table=max(tables, key=tables.__getitem__),
        )
        for (kind, key), tables in counted.items()
    ]
    return sorted(found, key=lambda one: (-one.rows, one.kind, one.key))[:limit]


@contextmanager
def _node_of(catalog: Catalog, shard: int) -> Iterator[tuple[Connection, Reader]]:
    """Yield a connection to a shard's node, and a reader of its rows that runs no code of others."""
    node = catalog.node_of(shard)
    with (
        Nodes({node.name: node}, catalog.url, read_only=True) as nodes,
        nodes[node.name].connect() as connection,
        reading_as_reader(nodes[node.name], f'node "{node.name}"') as reader,
    ):
        yield connection, reader


def _rows(reader: Reader, query: sql.Composed) -> list[dict[str, Any]]:
    def row(**values: Any) -> dict[str, Any]:
        return values

    return reader.rows(query.as_string(), row)


def _joined(schema: str, path: KeyPath) -> tuple[sql.Composed, sql.Composable]:
    """Return the FROM clause of a path, whose tables are ``t0``, ``t1`` …, and its key column."""
    parts = [sql.SQL("{} t0").format(sql.Identifier(schema, path.table))]
    for number, hop in enumerate(path.way.path):
        here, there = f"t{number}", f"t{number + 1}"
        joined = sql.SQL(" and ").join(
            sql.SQL("{} = {}").format(sql.Identifier(there, theirs), sql.Identifier(here, mine))
            for mine, theirs in zip(hop.columns, hop.referenced, strict=True)
        )
        parts.append(
            sql.SQL("join {} {} on {}").format(
                sql.Identifier(schema, bare(hop.referenced_table)), sql.Identifier(there), joined
            )
        )
    key = sql.Identifier(f"t{len(path.way.path)}", path.way.key)
    return sql.SQL(" ").join(parts), key


def _counted(schema: str, path: KeyPath, key: Key) -> sql.Composed:
    tables, column = _joined(schema, path)
    return sql.SQL(
        "select count(*) as rows, coalesce(sum(pg_column_size(t0.*)), 0)::bigint as size_bytes"
        " from {} where {} = {}"
    ).format(tables, column, sql.Literal(key))


def _newest(schema: str, path: KeyPath, id_column: str, lowest: int) -> sql.Composed:
    tables, column = _joined(schema, path)
    value = sql.SQL("encode({}, 'hex')" if path.kind == "bytea" else "{}::text").format(column)
    id_ = sql.SQL("t0.{}").format(sql.Identifier(id_column))
    return sql.SQL(
        "select key, count(*) as rows"
        " from (select {} as key from {} where {} >= {} order by {} desc limit {}) newest"
        " where key is not null group by key"
    ).format(value, tables, id_, sql.Literal(lowest), id_, sql.Literal(_MOST_ROWS))
