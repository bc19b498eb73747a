"""The SQL that creates a view over a table of all shards, or brings it up to date."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy.engine import URL

from shardids.catalog.regions import Region
from shardids.errors import ClusterConflict
from shardids.ids.layout import Layout

SCHEMA: Final = "shardids_views"
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
class ViewColumn:
    """A column of the table; ``is_cast`` if its type is in the shard's schema, so that it is read as text."""

    name: str
    type: str
    is_cast: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignServer:
    """Another node as a server of ``postgres_fdw``."""

    name: str
    options: Mapping[str, str]
    user: str
    password: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """Where a view reads a shard: a server, or, without one, its schema in the same database."""

    shard: int
    schema: str
    server: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPlan:
    """What a view will read: its table, its columns, and a source for every shard."""

    name: str
    table_name: str
    id_column: str
    columns: Sequence[ViewColumn]
    sources: Sequence[ShardSource]

    @property
    def shard_column(self) -> str:
        """Returns the name of the view's shard column, which the table does not have."""
        return "shardids_shard" if any(column.name == "shard" for column in self.columns) else "shard"


def server_name(node: str) -> str:
    """Returns the name of a node's foreign server."""
    return f"shardids_{node}"


def server_options(url: URL) -> dict[str, str]:
    """Returns the options of a foreign server for the node at ``url``."""
    return address_options(url) | _SERVER_OPTIONS


def address_options(url: URL) -> dict[str, str]:
    """Returns those of them that say where the node is."""
    options = {
        "host": url.host or "localhost",
        "port": str(url.port or 5432),
        "dbname": url.database or "postgres",
    }
    options |= {name: str(url.query[name]) for name in _PASSED_ON if name in url.query}
    if "host" in url.query:
        options["host"] = str(url.query["host"])
    return options


def foundation(layout: Layout) -> Iterator[sql.Composable]:
    """Creates what all views of a database share."""
    yield from extension()
    # It is inlined, so it can be the partition key. It needs no engine: the database may not be a node.
    yield sql.SQL(
        "create or replace function {}(id bigint) returns integer language sql immutable parallel safe"
        " return ((id >> {}) & {}::bigint)::integer"
    ).format(_in_schema("shard_of"), sql.Literal(layout.sequence_bits), sql.Literal(layout.shard_limit - 1))


def shown_regions(regions: Iterable[Region]) -> str:
    """Returns the regions as the comment of ``region_of`` names them: ``eu 0-1023, us 1024-2047``."""
    return ", ".join(f"{region.name} {region}" for region in regions) or "none"


def region_function(regions: Sequence[Region]) -> Iterator[sql.Composable]:
    """Creates, or replaces, the function that tells the region of a shard."""
    branches = [
        sql.SQL(" when shard between {} and {} then {}").format(
            sql.Literal(region.first_shard), sql.Literal(region.last_shard), sql.Literal(region.name)
        )
        for region in regions
    ]
    told = sql.SQL("case{} end").format(sql.Composed(branches)) if branches else sql.SQL("null::text")
    function = sql.SQL("{}(shard integer)").format(_in_schema("region_of"))
    yield sql.SQL(
        "create or replace function {} returns text language sql stable parallel safe return {}"
    ).format(function, told)
    yield sql.SQL("comment on function {} is {}").format(function, sql.Literal(shown_regions(regions)))


def extension() -> Iterator[sql.Composable]:
    """Creates the foreign data wrapper, and a schema for it."""
    schema = sql.Identifier(SCHEMA)
    yield sql.SQL("create schema if not exists {}").format(schema)
    yield sql.SQL("create extension if not exists postgres_fdw schema {}").format(schema)


def server(wanted: ForeignServer, present: Mapping[str, str] | None) -> Iterator[sql.Composable]:
    """Creates a foreign server, or corrects the options of an existing one."""
    name = sql.Identifier(wanted.name)
    if present is None:
        yield sql.SQL("create server {} foreign data wrapper postgres_fdw options ({})").format(
            name, options_of(wanted.options)
        )
    elif (changes := changed_options(wanted.options, present)) is not None:
        yield sql.SQL("alter server {} options ({})").format(name, changes)


def changed_options(wanted: Mapping[str, str], present: Mapping[str, str]) -> sql.Composable | None:
    """Returns what ALTER SERVER changes of a server's options; ``None`` if nothing."""
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


def user_mapping(wanted: ForeignServer, *, is_mapped: bool) -> Iterator[sql.Composable]:
    """Creates or replaces the owner's user mapping. Without a password only a superuser can use it."""
    name = sql.Identifier(wanted.name)
    if is_mapped:
        yield sql.SQL("drop user mapping for current_user server {}").format(name)
    login = {"password_required": "false"} if wanted.password is None else {"password": wanted.password}
    yield sql.SQL("create user mapping for current_user server {} options ({})").format(
        name, options_of({"user": wanted.user} | login)
    )


def view(
    plan: ViewPlan, present: Mapping[int, str | None], present_columns: Sequence[tuple[str, str]] | None
) -> Iterator[sql.Composable]:
    """Creates a view, or changes what differs from the plan.

    ``present`` says where the view reads each shard now; ``present_columns`` holds its columns' names and
    types, or is ``None`` if there is no view.

    Raises:
        ClusterConflict: columns were dropped or changed, which CREATE OR REPLACE VIEW cannot follow.
    """
    yield from _parent(plan, present_columns)
    yield from _parts(plan, present)
    wanted = {source.shard: source.server for source in plan.sources}
    if present_columns is None or present != wanted or len(plan.columns) > len(present_columns):
        yield _view(plan)
        yield _by_id(plan)


def _parent(plan: ViewPlan, present_columns: Sequence[tuple[str, str]] | None) -> Iterator[sql.Composable]:
    """Creates or alters the partitioned table over the foreign tables."""
    parent = _in_schema(f"{plan.name}_foreign")
    columns = [(column.name, column.type) for column in plan.columns]
    if present_columns is None:
        yield sql.SQL("create table {} ({}) partition by list ({}({}))").format(
            parent,
            sql.SQL(", ").join(_defined(name, type_) for name, type_ in columns),
            _in_schema("shard_of"),
            sql.Identifier(plan.id_column),
        )
    elif columns[: len(present_columns)] != list(present_columns):
        raise ClusterConflict(
            f'view "{plan.name}" has columns that table "{plan.table_name}" no longer has, or has with'
            " another type",
            hint=f"Run shardids view drop {plan.name}, and create it again; its grants are lost.",
        )
    else:
        for name, type_ in columns[len(present_columns) :]:
            yield sql.SQL("alter table {} add column {}").format(parent, _defined(name, type_))


def _parts(plan: ViewPlan, present: Mapping[int, str | None]) -> Iterator[sql.Composable]:
    """Creates or replaces the foreign tables, one for each shard on another server."""
    wanted = {source.shard: source.server for source in plan.sources}
    for shard, server_there in present.items():
        if server_there is not None and wanted.get(shard) != server_there:
            yield sql.SQL("drop foreign table {}").format(_part(plan, shard))
    for source in plan.sources:
        if source.server is not None and present.get(source.shard) != source.server:
            yield sql.SQL(
                "create foreign table {} partition of {} for values in ({}) server {}"
                " options (schema_name {}, table_name {})"
            ).format(
                _part(plan, source.shard),
                _in_schema(f"{plan.name}_foreign"),
                sql.Literal(source.shard),
                sql.Identifier(source.server),
                sql.Literal(source.schema),
                sql.Literal(plan.table_name),
            )


def _view(plan: ViewPlan) -> sql.Composable:
    """Creates the view over all shards: those of this database, one by one, and the foreign ones."""
    parent = _in_schema(f"{plan.name}_foreign")
    columns = sql.SQL(", ").join(
        sql.SQL("t.{}").format(sql.Identifier(column.name)) for column in plan.columns
    )
    cast = sql.SQL(", ").join(
        sql.SQL("t.{0}::{1} as {0}" if column.is_cast else "t.{0}").format(
            sql.Identifier(column.name), sql.SQL(column.type)
        )
        for column in plan.columns
    )
    shard = sql.Identifier(plan.shard_column)
    selects = [
        # The shard is a constant here: given a condition on it, the planner drops the other branches.
        sql.SQL("select {} as {}, {} from {} t").format(
            sql.Literal(source.shard), shard, cast, sql.Identifier(source.schema, plan.table_name)
        )
        for source in plan.sources
        if source.server is None
    ]
    selects.append(
        sql.SQL("select {}(t.{}) as {}, {} from {} t").format(
            _in_schema("shard_of"), sql.Identifier(plan.id_column), shard, columns, parent
        )
    )
    return sql.SQL("create or replace view {} as\n{}").format(
        _in_schema(plan.name), sql.SQL("\nunion all ").join(selects)
    )


def _by_id(plan: ViewPlan) -> sql.Composable:
    # The body is text: a parsed body would keep CREATE OR REPLACE VIEW from adding columns.
    name, id_column = _in_schema(plan.name), sql.Identifier(plan.id_column)
    body = sql.SQL("select * from {} v where v.{} = $1 and v.{} = {}($1)").format(
        name, id_column, sql.Identifier(plan.shard_column), _in_schema("shard_of")
    )
    return sql.SQL(
        "create or replace function {}(id bigint) returns setof {} language sql stable as {}"
    ).format(_in_schema(f"{plan.name}_by_id"), name, sql.Literal(body.as_string()))


def removal(name: str) -> Iterator[sql.Composable]:
    """Drops a view and what belongs to it. Fails where other objects use it."""
    yield sql.SQL("drop function if exists {}(bigint)").format(_in_schema(f"{name}_by_id"))
    yield sql.SQL("drop view if exists {}").format(_in_schema(name))
    yield sql.SQL("drop table if exists {}").format(_in_schema(f"{name}_foreign"))


def trials(plan: ViewPlan) -> Iterator[tuple[str, sql.Composable]]:
    """Yields for every server a query that reads a row of one of its shards."""
    first = {source.server: source.shard for source in reversed(plan.sources) if source.server is not None}
    for name, shard in first.items():
        yield name, sql.SQL("select count(*) from (select from {} limit 1) one").format(_part(plan, shard))


def _in_schema(name: str) -> sql.Identifier:
    return sql.Identifier(SCHEMA, name)


def _part(plan: ViewPlan, shard: int) -> sql.Identifier:
    return _in_schema(f"{plan.name}_{shard:04}")


def _defined(name: str, type_: str) -> sql.Composable:
    # The server wrote the type (format_type), so it is SQL already.
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_))


def options_of(options: Mapping[str, str]) -> sql.Composable:
    """Returns the options of a server or a user mapping as SQL."""
    return sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in options.items()
    )
