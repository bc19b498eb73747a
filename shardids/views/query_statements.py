"""The SQL of a query node: on each node a view over its shards, on the query node one foreign table for it.

On a node, schema ``shardids_local`` has for each table a view over a function whose body is text. The planner
inlines the function, and nothing depends on the shards' tables: they can be altered and dropped as if it were
not there. Its name has a hash of the body, so another set of shards or columns is another view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from psycopg import sql

from shardids.views.query_tables import NODE_COLUMN, SHARD_COLUMN, QueryColumn, QueryTable

LOCAL: Final = "shardids_local"
"""The schema, on each node, of the views over its shards."""
FOREIGN: Final = "shardids_foreign"
"""The schema, on the query node, of the tables whose partitions are the nodes."""
NODES: Final = "shardids_nodes"
"""The schema, on the query node, of the tables with the node and the shard of each row before its columns."""
QUERY: Final = "shardids_query"
"""The schema, on the query node, of the tables as they are in a shard."""
PLACEMENT: Final = "shardids_placement"
"""The function, in schema ``shardids_query``, that says by which placement the query node reads."""
_LONGEST_NAME: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """A node's view over its shards of one table."""

    node: str
    table: QueryTable
    schemas: Mapping[int, str]

    @property
    def _row(self) -> sql.Composable:
        columns = [
            sql.SQL("{} text, {} integer").format(sql.Identifier(NODE_COLUMN), sql.Identifier(SHARD_COLUMN)),
            *(_defined(column, column.type) for column in self.table.columns),
        ]
        return sql.SQL(", ").join(columns)

    @property
    def _body(self) -> sql.Composable:
        columns = sql.SQL(", ").join(
            sql.SQL("t.{}::{}" if column.is_cast else "t.{}").format(
                sql.Identifier(column.name), sql.SQL(column.type)
            )
            for column in self.table.columns
        )
        return sql.SQL("\nunion all ").join(
            sql.SQL("select {}::text, {}, {} from {} t").format(
                sql.Literal(self.node), sql.Literal(shard), columns, sql.Identifier(schema, self.table.name)
            )
            for shard, schema in sorted(self.schemas.items())
        )

    @property
    def name(self) -> str:
        """Returns its name, which tells it from every other."""
        text = f"{self._row.as_string()}\n{self._body.as_string()}"
        return f"v_{sha256(text.encode()).hexdigest()[:20]}"

    def creation(self) -> Iterator[sql.Composable]:
        """Creates it."""
        name = self.name
        row, function = sql.Identifier(LOCAL, f"r{name[1:]}"), sql.Identifier(LOCAL, f"f{name[1:]}")
        yield sql.SQL("create type {} as ({})").format(row, self._row)
        # Text, not a parsed body, which would depend on the tables. Not strict, not volatile: it is inlined.
        yield sql.SQL("create function {}() returns setof {} language sql stable parallel safe as {}").format(
            function, row, sql.Literal(self._body.as_string())
        )
        yield sql.SQL("create view {} as select * from {}()").format(sql.Identifier(LOCAL, name), function)
        yield sql.SQL("comment on view {} is {}").format(
            sql.Identifier(LOCAL, name),
            sql.Literal(f'table "{self.table.name}" of {len(self.schemas)} shards'),
        )


def local_removal(name: str) -> Iterator[sql.Composable]:
    """Drops a node's view over its shards."""
    yield sql.SQL("drop view if exists {}").format(sql.Identifier(LOCAL, name))
    yield sql.SQL("drop function if exists {}()").format(sql.Identifier(LOCAL, f"f{name[1:]}"))
    yield sql.SQL("drop type if exists {}").format(sql.Identifier(LOCAL, f"r{name[1:]}"))


def signature(table: QueryTable) -> str:
    """Returns what tells whether a table of the query node has to be created again."""
    return sha256(repr(table).encode()).hexdigest()[:20]


def enum_types(wanted: Mapping[str, Iterable[str]]) -> Iterator[sql.Composable]:
    """Creates the enum types of all tables."""
    for name, labels in wanted.items():
        yield sql.SQL("create type {} as enum ({})").format(
            sql.Identifier(QUERY, name), sql.SQL(", ").join(map(sql.Literal, labels))
        )


def table_creation(table: QueryTable, readers: Mapping[str, Iterable[str]]) -> Iterator[sql.Composable]:
    """Creates a table of the query node, without partitions, and the views that show it.

    ``readers`` has, for the schema of each view, the roles that may read it, as SQL.
    """
    parent = sql.Identifier(FOREIGN, table.name)
    columns = sql.SQL(", ").join(_defined(column, _shown_type(column)) for column in table.columns)
    yield sql.SQL("create table {} ({} text, {} integer, {}) partition by list ({})").format(
        parent,
        sql.Identifier(NODE_COLUMN),
        sql.Identifier(SHARD_COLUMN),
        columns,
        sql.Identifier(NODE_COLUMN),
    )
    yield sql.SQL("comment on table {} is {}").format(parent, sql.Literal(signature(table)))
    names = [one.name for one in table.columns]
    for schema, shown in ((QUERY, names), (NODES, [NODE_COLUMN, SHARD_COLUMN, *names])):
        view = sql.Identifier(schema, table.name)
        selected = sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(name)) for name in shown)
        yield sql.SQL("create view {} as select {} from {} t").format(view, selected, parent)
        for reader in readers.get(schema, ()):
            yield sql.SQL("grant select on {} to {}").format(view, sql.SQL(reader))


def table_removal(name: str) -> Iterator[sql.Composable]:
    """Drops a table of the query node. Fails where other objects use it."""
    for schema in (QUERY, NODES):
        yield sql.SQL("drop view if exists {}").format(sql.Identifier(schema, name))
    yield sql.SQL("drop table if exists {}").format(sql.Identifier(FOREIGN, name))


def foundation() -> Iterator[sql.Composable]:
    """Creates the schemas of the query node."""
    for schema in (QUERY, NODES, FOREIGN):
        yield sql.SQL("create schema if not exists {}").format(sql.Identifier(schema))


def query_removal(enums: Iterable[str]) -> Iterator[sql.Composable]:
    """Drops the rest of a query node. Fails where other objects are in its schemas."""
    for name in enums:
        yield sql.SQL("drop type {}").format(sql.Identifier(QUERY, name))
    yield sql.SQL("drop function if exists {}()").format(sql.Identifier(QUERY, PLACEMENT))
    for schema in (QUERY, NODES, FOREIGN):
        yield sql.SQL("drop schema if exists {}").format(sql.Identifier(schema))


def parts(
    table: QueryTable, wanted: Mapping[str, LocalView], present: Mapping[str, str]
) -> Iterator[sql.Composable]:
    """Makes a table read each node's view over its shards.

    ``wanted`` has the views by the name of their server; ``present`` has the names of those it reads now.
    """
    for server in present.keys() - wanted.keys():
        yield sql.SQL("drop foreign table {}").format(_part(table.name, server))
    for server, view in wanted.items():
        if server not in present:
            yield sql.SQL(
                "create foreign table {} partition of {} for values in ({}) server {}"
                " options (schema_name {}, table_name {})"
            ).format(
                _part(table.name, server),
                sql.Identifier(FOREIGN, table.name),
                sql.Literal(view.node),
                sql.Identifier(server),
                sql.Literal(LOCAL),
                sql.Literal(view.name),
            )
        elif present[server] != view.name:
            yield sql.SQL("alter foreign table {} options (set table_name {})").format(
                _part(table.name, server), sql.Literal(view.name)
            )


def trial(table: str, server: str) -> sql.Composable:
    """Reads a row of one node."""
    return sql.SQL("select count(*) from (select from {} limit 1) one").format(_part(table, server))


def placement_function(digest: str) -> sql.Composable:
    """Says by which placement the query node reads, to be compared with an application's."""
    return sql.SQL(
        "create or replace function {}() returns text language sql stable parallel safe as {}"
    ).format(sql.Identifier(QUERY, PLACEMENT), sql.Literal(f"select '{digest}'::text"))


def _part(table: str, server: str) -> sql.Identifier:
    name = f"{table}@{server}"
    if len(name.encode()) > _LONGEST_NAME:
        name = f"@{sha256(name.encode()).hexdigest()[:20]}"
    return sql.Identifier(FOREIGN, name)


def _shown_type(column: QueryColumn) -> str:
    if column.enum is None:
        return column.type
    return sql.Identifier(QUERY, column.enum).as_string() + ("[]" if column.is_array else "")


def _defined(column: QueryColumn, type_: str) -> sql.Composable:
    # The server wrote type and collation (format_type, %I), so they are SQL already.
    collation = f" collate {column.collation}" if column.collation is not None else ""
    return sql.SQL("{} {}{}").format(sql.Identifier(column.name), sql.SQL(type_), sql.SQL(collation))
