"""Rows of keys in one shard: the tables with a path to a key column, the number and the size of the rows.

It reads only. A table has a path if it has the key column itself, or a foreign key of one column to a table
that has a path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.keys.known import Key, kind_of
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import BadArgument
from shardids.pg.queries import prepare
from shardids.pg.reader import Reader, reading_as_reader

_FOREIGN_KEYS: Final = text("""
    select c.relname::text as "table", a.attname::text as "column",
           r.relname::text as parent, b.attname::text as referred
    from pg_constraint k
    join pg_class c on c.oid = k.conrelid
    join pg_class r on r.oid = k.confrelid and r.relnamespace = c.relnamespace
    join pg_attribute a on a.attrelid = c.oid and a.attnum = k.conkey[1]
    join pg_attribute b on b.attrelid = r.oid and b.attnum = k.confkey[1]
    where k.contype = 'f' and cardinality(k.conkey) = 1 and k.conparentid = 0 and c.oid <> r.oid
      and c.relnamespace = to_regnamespace(quote_ident(:schema))
    order by 1, 2""")
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
_OWN_IDS: Final = text("""
    select c.relname::text as "table", a.attname::text as "column"
    from pg_index i
    join pg_class c on c.oid = i.indrelid
    join pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[0]
    join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
    where i.indisprimary and i.indnkeyatts = 1 and c.relnamespace = to_regnamespace(quote_ident(:schema))
      and pg_get_expr(d.adbin, d.adrelid) like '%next_id()'""")
_MOST_ROWS: Final = 100_000
"""How many of the newest rows of a table are read to find busy keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPath:
    """The way from a table to the column with the key of its rows.

    Attributes:
        table: the table.
        hops: the column that refers to a parent, the parent, and the parent's column; empty if the table
            has the key itself.
        key: the key column, of the last table.
        kind: the kind of its keys.
    """

    table: str
    hops: tuple[tuple[str, str, str], ...]
    key: str
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
    found: dict[str, KeyPath] = {}
    for row in connection.execute(_KEY_COLUMNS, {"schema": schema, "columns": list(columns)}):
        if row.kind is None:
            raise BadArgument(
                f"{row.table}.{row.column} can't be a sharding key",
                hint="A sharding key is an integer, text, bytea or uuid.",
            )
        found[row.table] = KeyPath(table=row.table, hops=(), key=row.column, kind=row.kind)
    if missing := [one for one in columns if one.partition(".")[0] not in found]:
        raise BadArgument(
            f"no table of {schema} has the column {missing[0]}", hint="For example: --key users.name"
        )
    keys = connection.execute(_FOREIGN_KEYS, {"schema": schema}).all()
    grew = True
    while grew:
        reached = dict(found)
        for row in keys:
            if row.parent in reached and row.table not in found:
                parent = reached[row.parent]
                hop = (row.column, row.parent, row.referred)
                found[row.table] = KeyPath(
                    table=row.table, hops=(hop, *parent.hops), key=parent.key, kind=parent.kind
                )
        grew = len(found) > len(reached)
    return [found[table] for table in sorted(found)]


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
            ids = {row.table: row.column for row in connection.execute(_OWN_IDS, {"schema": schema})}
            paths = [path for path in paths_in(connection, schema, columns) if path.table in ids]
        since = max(now_ms - last_ms - description.layout.epoch_ms, 0)
        lowest = description.layout.encode(ms=since, shard=shard)
        for path in paths:
            for row in _rows(reader, _newest(schema, path, ids[path.table], lowest)):
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


def _joined(schema: str, path: KeyPath) -> tuple[sql.Composed, sql.Composed]:
    """Return the FROM clause of a path, whose tables are ``t0``, ``t1`` …, and its key column."""
    parts = [sql.SQL("{} t0").format(sql.Identifier(schema, path.table))]
    for number, (column, parent, referred) in enumerate(path.hops):
        here, there = sql.Identifier(f"t{number}"), sql.Identifier(f"t{number + 1}")
        parts.append(
            sql.SQL("join {} {} on {}.{} = {}.{}").format(
                sql.Identifier(schema, parent),
                there,
                there,
                sql.Identifier(referred),
                here,
                sql.Identifier(column),
            )
        )
    key = sql.SQL("{}.{}").format(sql.Identifier(f"t{len(path.hops)}"), sql.Identifier(path.key))
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
