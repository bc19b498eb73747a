"""The SQL of a query node: on each node a view over its shards, on the query node one foreign table for it.

On a node, schema ``shardids_local`` has for each table a view over a function whose body is text. The planner
inlines the function, and nothing depends on the shards' tables: they can be altered and dropped as if it were
not there. Its name has a hash of the body, so another set of shards or columns is another view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from shardids.catalog.counters import COUNTER_TABLES
from shardids.catalog.lookups import PREFIX
from shardids.catalog.nodes import Nodes
from shardids.catalog.references import References
from shardids.catalog.regions import Region
from shardids.catalog.topology import Placement
from shardids.errors import BadArgument, ClusterConflict
from shardids.pg.queries import read

NODE_COLUMN: Final = "shardids_node"
"""The column with the node that a row was read from, in schema ``shardids_nodes``."""
SHARD_COLUMN: Final = "shardids_shard"
"""The column with the shard of a row."""
_OURS: Final = frozenset({"alembic_version", "shardids_version", "shardids_load", *COUNTER_TABLES})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryColumn:
    """A column as the query node shows it.

    Attributes:
        name: its name.
        type: its type on the nodes, as SQL.
        is_cast: whether it has to be cast to that, since its own type is another in each shard.
        collation: its collation as SQL, if it is not the type's.
        enum: the name of its enum type, which the query node also has.
        labels: the labels of that, in order.
        is_array: whether it is an array of that.
    """

    name: str
    type: str
    is_cast: bool
    collation: str | None
    enum: str | None
    labels: tuple[str, ...]
    is_array: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTable:
    """A table that the query node shows.

    Attributes:
        name: its name.
        columns: its columns.
        is_reference: whether all shards have the same rows, so that one is read.
        writer: of a table of the cluster's reference tables, the node that they are written to on.
    """

    name: str
    columns: tuple[QueryColumn, ...]
    is_reference: bool
    writer: str | None = None

    @property
    def enums(self) -> dict[str, tuple[str, ...]]:
        """Returns the enum types of its columns, and their labels."""
        return {column.enum: column.labels for column in self.columns if column.enum is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A table as some shards of a node define it: a row of ``views/tables.v1.sql``.

    ``shards`` is ``[None]`` for a reference table.
    """

    name: str
    columns: list[dict[str, Any]]
    has_ids: bool
    refers: list[str]
    shards: list[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tables to show, and a line about each that is left out."""

    tables: tuple[QueryTable, ...]
    left_out: tuple[str, ...]


def _is_ours(table: str) -> bool:
    """Return whether a table of the shards is shardids' own, or Alembic's."""
    return table in _OURS or table.startswith(PREFIX)


def choose_tables(
    nodes: Nodes,
    placement: Placement,
    references: References,
    *,
    sharded: Collection[str],
    reference: Collection[str],
    shown: Collection[str],
    named: Collection[str] = (),
) -> Choice:
    """Return the tables whose rows can be distinguished by shard, with the columns that all shards have.

    Args:
        nodes: the nodes.
        placement: of the shards.
        references: the cluster's reference tables.
        sharded: tables whose rows are each in one shard, though no ID in them says so.
        reference: tables that have the same rows in every shard.
        shown: tables that the query node shows now.
        named: tables that some shard must have.

    Raises:
        BadArgument: no shard has a table of that name.
        ClusterConflict: a shard lacks a table that is shown.
    """
    by_name, of_writer = _found(nodes, placement, references.writer)
    for name in named:
        if name not in by_name:
            there = ", ".join(name for name in by_name if not _is_ours(name))
            raise BadArgument(f'no shard has a table "{name}"', hint=f"Tables: {there or 'none'}.")
    located = _located(by_name, sharded) - set(reference)
    tables, left_out = [], []
    for name, definitions in by_name.items():
        missing = placement.node_of.keys() - {shard for one in definitions for shard in one.shards}
        reason = _reason(definitions, name in located or name in reference)
        if missing and name in shown:
            shard = min(missing)
            raise ClusterConflict(
                f'{len(missing)} shards have no table "{name}", for example shard {shard} on node'
                f' "{placement.node_of[shard]}"',
                hint="Bring all shards to one revision, then: shardids query-node refresh",
            )
        if _is_ours(name):
            continue
        if missing:
            reason = f"{len(missing)} shards don't have it, for example shard {min(missing)}"
        if reason:
            left_out.append(f'table "{name}" is left out: {reason}')
        else:
            columns = _common_columns(definitions)
            shown_names = {column.name for column in columns}
            left_out += [
                f'column "{column}" of table "{name}" is left out: not all shards have it alike'
                for column in dict.fromkeys(c["name"] for one in definitions for c in one.columns)
                if column not in shown_names
            ]
            tables.append(QueryTable(name=name, columns=columns, is_reference=name in reference))
    for one in of_writer:
        if one.name in by_name:
            left_out.append(f'reference table "{one.name}" is left out: shards have a table of that name')
        elif references.states.get(one.name) == "active":
            columns = _common_columns([one])
            tables.append(
                QueryTable(name=one.name, columns=columns, is_reference=True, writer=references.writer)
            )
    return Choice(tables=tuple(tables), left_out=tuple(left_out))


def _found(
    nodes: Nodes, placement: Placement, writer: str | None
) -> tuple[dict[str, list[FoundTable]], list[FoundTable]]:
    """Return the tables of the shards, of each from its owner, and the reference tables of their writer."""

    def ask(_name: str, engine: Engine) -> list[FoundTable]:
        with engine.connect() as connection:
            return read(connection, "views/tables.v1", FoundTable)

    asked = {*placement.node_of.values(), *([writer] if writer is not None else ())}
    of_writer: list[FoundTable] = []
    found: dict[str, list[FoundTable]] = {}
    for node, tables in sorted(nodes.each(ask, asked).all().items()):
        for one in tables:
            if None in one.shards:
                of_writer += [one] if node == writer else []
                continue
            shards = [s for s in one.shards if s is not None and placement.node_of.get(s) == node]
            if shards:
                found.setdefault(one.name, []).append(replace(one, shards=list(shards)))
    return dict(sorted(found.items())), of_writer


def _located(by_name: Mapping[str, Sequence[FoundTable]], sharded: Iterable[str]) -> set[str]:
    """Return the tables with each row in one shard: it has an ID, or must refer to one that has."""
    located = {name for name, there in by_name.items() if all(one.has_ids for one in there)} | set(sharded)
    while True:
        new = {
            name
            for name, there in by_name.items()
            if name not in located and all(not located.isdisjoint(one.refers) for one in there)
        }
        if not new:
            return located
        located |= new


def _reason(definitions: Sequence[FoundTable], is_known: bool) -> str:
    names = {column["name"] for one in definitions for column in one.columns}
    if not is_known:
        return (
            "it is unknown whether each shard has other rows (--sharded) or all have the same (--reference)"
        )
    if names & {NODE_COLUMN, SHARD_COLUMN}:
        return f"it has a column {NODE_COLUMN} or {SHARD_COLUMN}, as the query node's own are called"
    return "" if _common_columns(definitions) else "its shards have no column in common"


def _common_columns(definitions: Sequence[FoundTable]) -> tuple[QueryColumn, ...]:
    """Return the columns that all shards define alike, but those of types that only a shard has."""
    first, *others = definitions
    return tuple(
        QueryColumn(
            name=column["name"],
            type=column["type"] or ("text[]" if column["is_array"] else "text"),
            is_cast=column["is_cast"],
            collation=column["collation"],
            enum=column["enum"],
            labels=tuple(column["labels"] or ()),
            is_array=column["is_array"],
        )
        for column in first.columns
        if (column["type"] or column["enum"])
        and not column["is_own"]
        and all(column in other.columns for other in others)
    )


LOCAL: Final = "shardids_local"
"""The schema, on each node, of the views over its shards."""
_HIDDEN: Final = "rows of a key are being moved: again in a moment"
"""The name of the view that a foreign table reads in vain meanwhile."""
FOREIGN: Final = "shardids_foreign"
"""The schema, on the query node, of the tables whose partitions are the nodes."""
NODES: Final = "shardids_nodes"
"""The schema, on the query node, of the tables with the node and the shard of each row before its columns."""
QUERY: Final = "shardids_query"
"""The schema, on the query node, of the tables as they are in a shard."""
ON_QUERY_NODE: Final = (QUERY, NODES, FOREIGN)
"""The schemas of the query node."""
PLACEMENT: Final = "shardids_placement"
"""The function, in schema ``shardids_query``, that returns a digest of the placement it reads from."""
_LONGEST_NAME: Final = 63


_PASSED_ON: Final = (
    *("hostaddr", "sslmode", "sslrootcert", "sslcrl"),
    *("channel_binding", "gssencmode", "krbsrvname"),
)
"""Parameters copied from a node's URL. A passfile, for example, is not copied: it is on this machine."""
_SERVER_OPTIONS: Final = {
    "async_capable": "true",
    "fetch_size": "1000",
    "updatable": "false",
    "truncatable": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignServer:
    """Another node as a server of ``postgres_fdw``."""

    name: str
    options: Mapping[str, str]
    user: str
    password: str | None


@dataclass(frozen=True, kw_only=True)
class LocalView:
    """A node's view over its shards of one table.

    ``schemas`` has those of the shards; for a reference table that of such tables, under ``None``.
    """

    node: str
    table: QueryTable
    schemas: Mapping[int | None, str]

    @property
    def _row(self) -> sql.Composable:
        columns = [
            sql.SQL("{} text, {} integer").format(sql.Identifier(NODE_COLUMN), sql.Identifier(SHARD_COLUMN)),
            *(_defined(column, column.type) for column in self.table.columns),
        ]
        return sql.SQL(", ").join(columns)

    @cached_property
    def _body(self) -> str:
        columns = (
            sql.SQL(", ")
            .join(
                sql.SQL("t.{}::{}" if column.is_cast else "t.{}").format(
                    sql.Identifier(column.name), sql.SQL(column.type)
                )
                for column in self.table.columns
            )
            .as_string()
        )
        node, name = sql.Literal(self.node).as_string(), sql.Identifier(self.table.name).as_string()
        return "\nunion all ".join(
            f"select {node}::text, {'null' if shard is None else shard}::integer, {columns}"  # noqa: S608 -- quoted
            f" from {sql.Identifier(schema).as_string()}.{name} t"
            for shard, schema in self.schemas.items()
        )

    @cached_property
    def name(self) -> str:
        """Returns its name, which tells it from every other."""
        text = f"{self._row.as_string()}\n{self._body}"
        return f"v_{sha256(text.encode()).hexdigest()[:20]}"

    def creation(self) -> Iterator[sql.Composable]:
        """Create it."""
        name = self.name
        row, function = sql.Identifier(LOCAL, f"r{name[1:]}"), sql.Identifier(LOCAL, f"f{name[1:]}")
        yield sql.SQL("create type {} as ({})").format(row, self._row)
        # Text, not a parsed body, which would depend on the tables. Not strict, not volatile: it is inlined.
        yield sql.SQL("create function {}() returns setof {} language sql stable parallel safe as {}").format(
            function, row, sql.Literal(self._body)
        )
        yield sql.SQL("create view {} as select * from {}()").format(sql.Identifier(LOCAL, name), function)
        yield sql.SQL("comment on view {} is {}").format(
            sql.Identifier(LOCAL, name),
            sql.Literal(f'table "{self.table.name}" of {len(self.schemas)} shards'),
        )


def local_removal(name: str) -> Iterator[sql.Composable]:
    """Drop a node's view over its shards."""
    yield sql.SQL("drop view if exists {}").format(sql.Identifier(LOCAL, name))
    yield sql.SQL("drop function if exists {}()").format(sql.Identifier(LOCAL, f"f{name[1:]}"))
    yield sql.SQL("drop type if exists {}").format(sql.Identifier(LOCAL, f"r{name[1:]}"))


def local_schema_removal() -> sql.Composable:
    """Drop all of a node's views over its shards."""
    return sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(LOCAL))


def signature(table: QueryTable) -> str:
    """Return a hash that differs when a table of the query node has to be created again."""
    return sha256(repr(table).encode()).hexdigest()[:20]


def enum_types(wanted: Mapping[str, Iterable[str]]) -> Iterator[sql.Composable]:
    """Create the enum types of all tables."""
    for name, labels in wanted.items():
        yield sql.SQL("create type {} as enum ({})").format(
            sql.Identifier(QUERY, name), sql.SQL(", ").join(map(sql.Literal, labels))
        )


def table_creation(table: QueryTable, readers: Mapping[str, Iterable[str]]) -> Iterator[sql.Composable]:
    """Create a table of the query node, without partitions, and the views that show it.

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


def reading(role: str) -> Iterator[sql.Composable]:
    """Let a role read the views that there are, and those that come."""
    schemas, reader = sql.SQL(", ").join(map(sql.Identifier, (QUERY, NODES))), sql.Identifier(role)
    yield sql.SQL("grant usage on schema {} to {}").format(schemas, reader)
    yield sql.SQL("grant select on all tables in schema {} to {}").format(schemas, reader)
    yield sql.SQL("alter default privileges in schema {} grant select on tables to {}").format(
        schemas, reader
    )


def table_removal(name: str) -> Iterator[sql.Composable]:
    """Drop a table of the query node. Fails where other objects use it."""
    for schema in (QUERY, NODES):
        yield sql.SQL("drop view if exists {}").format(sql.Identifier(schema, name))
    yield sql.SQL("drop table if exists {}").format(sql.Identifier(FOREIGN, name))


def foundation() -> Iterator[sql.Composable]:
    """Create the foreign data wrapper in the schema of :func:`~shardids.tables.views.database.own`."""
    yield sql.SQL("create extension if not exists postgres_fdw schema {}").format(sql.Identifier(FOREIGN))


def query_removal(enums: Iterable[str]) -> Iterator[sql.Composable]:
    """Drop the rest of a query node. Fails where other objects are in its schemas."""
    for name in enums:
        yield sql.SQL("drop type {}").format(sql.Identifier(QUERY, name))
    yield sql.SQL("drop function if exists {}()").format(sql.Identifier(QUERY, PLACEMENT))
    yield sql.SQL("drop function if exists {}(integer)").format(sql.Identifier(NODES, "region_of"))
    for schema in ON_QUERY_NODE:
        yield sql.SQL("drop schema if exists {}").format(sql.Identifier(schema))


def parts(
    table: QueryTable, wanted: Mapping[str, LocalView], present: Mapping[str, str]
) -> Iterator[sql.Composable]:
    """Make a table read each node's view over its shards.

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


def hidden(table: str, server: str) -> sql.Composable:
    """Let a table read no rows of a node, and fail by a name that says why."""
    return sql.SQL("alter foreign table {} options (set table_name {})").format(
        _part(table, server), sql.Literal(_HIDDEN)
    )


def probe(server: str) -> Iterator[sql.Composable]:
    """Create the table that asks a node for its name, to see whether it can be read at all."""
    yield sql.SQL(
        "create foreign table {} (name text) server {} options (schema_name 'shardids', table_name 'node')"
    ).format(_probe(server), sql.Identifier(server))


def probe_removal(server: str) -> sql.Composable:
    """Drop that table."""
    return sql.SQL("drop foreign table if exists {}").format(_probe(server))


def probing(server: str) -> sql.Composable:
    """Ask a node for its name."""
    return sql.SQL("select name from {}").format(_probe(server))


def _probe(server: str) -> sql.Identifier:
    return _part("", server)


def placement_function(digest: str, cluster: UUID) -> Iterator[sql.Composable]:
    """Create the function that returns the placement's digest, for applications to compare."""
    name = sql.Identifier(QUERY, PLACEMENT)
    yield sql.SQL(
        "create or replace function {}() returns text language sql stable parallel safe as {}"
    ).format(name, sql.Literal(f"select '{digest}'::text"))
    yield sql.SQL("comment on function {}() is {}").format(name, sql.Literal(str(cluster)))


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


def server_name(node: str) -> str:
    """Return the name of a node's foreign server."""
    return f"shardids_{node}"


def server_options(url: URL) -> dict[str, str]:
    """Return the options of a foreign server for the node at ``url``."""
    return address_options(url) | _SERVER_OPTIONS


def address_options(url: URL) -> dict[str, str]:
    """Return those of them that say where the node is."""
    options = {
        "host": url.host or "localhost",
        "port": str(url.port or 5432),
        "dbname": url.database or "postgres",
    }
    options |= {name: str(url.query[name]) for name in _PASSED_ON if name in url.query}
    if "host" in url.query:
        options["host"] = str(url.query["host"])
    return options


def server(wanted: ForeignServer, present: Mapping[str, str] | None) -> Iterator[sql.Composable]:
    """Create a foreign server, or corrects the options of an existing one."""
    name = sql.Identifier(wanted.name)
    if present is None:
        yield sql.SQL("create server {} foreign data wrapper postgres_fdw options ({})").format(
            name, options_of(wanted.options)
        )
    elif (changes := changed_options(wanted.options, present)) is not None:
        yield sql.SQL("alter server {} options ({})").format(name, changes)


def changed_options(wanted: Mapping[str, str], present: Mapping[str, str]) -> sql.Composable | None:
    """Return what ALTER SERVER changes of a server's options; ``None`` if nothing."""
    changes = [
        sql.SQL("{} {} {}").format(
            sql.SQL("set" if option in present else "add"), sql.Identifier(option), sql.Literal(value)
        )
        for option, value in wanted.items()
        if present.get(option) != value
    ]
    changes += [
        sql.SQL("drop {}").format(sql.Identifier(option)) for option in present if option not in wanted
    ]
    return sql.SQL(", ").join(changes) if changes else None


def user_mapping(wanted: ForeignServer, *, is_mapped: bool, is_superuser: bool) -> Iterator[sql.Composable]:
    """Create or replace the owner's user mapping."""
    name = sql.Identifier(wanted.name)
    if is_mapped:
        yield sql.SQL("drop user mapping for current_user server {}").format(name)
    login = {} if wanted.password is None else {"password": wanted.password}
    if is_superuser and wanted.password is None:
        login = {"password_required": "false"}
    yield sql.SQL("create user mapping for current_user server {} options ({})").format(
        name, options_of({"user": wanted.user} | login)
    )


def options_of(options: Mapping[str, str]) -> sql.Composable:
    """Return the options of a server or a user mapping as SQL."""
    return sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in options.items()
    )


def shown_regions(regions: Iterable[Region]) -> str:
    """Return the regions as the comment of ``region_of`` names them: ``eu 0-1023, us 1024-2047``."""
    return ", ".join(f"{region.name} {region}" for region in regions) or "none"


def region_function(regions: Sequence[Region]) -> Iterator[sql.Composable]:
    """Create, or replace, the function that returns the region of a shard."""
    branches = [
        sql.SQL(" when shard between {} and {} then {}").format(
            sql.Literal(region.first_shard), sql.Literal(region.last_shard), sql.Literal(region.name)
        )
        for region in regions
    ]
    told = sql.SQL("case{} end").format(sql.Composed(branches)) if branches else sql.SQL("null::text")
    function = sql.SQL("{}(shard integer)").format(sql.Identifier(NODES, "region_of"))
    yield sql.SQL(
        "create or replace function {} returns text language sql stable parallel safe return {}"
    ).format(function, told)
    yield sql.SQL("comment on function {} is {}").format(function, sql.Literal(shown_regions(regions)))
