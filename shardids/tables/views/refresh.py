"""The refresh of a query node: first each node's views over its shards, then their readers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.references import References, references_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA, Placement, schema_name
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.pg.queries import prepare, rows
from shardids.pg.schemas import engine_owner, own_schema
from shardids.pg.sqlfiles import read_sql
from shardids.tables.views import statements
from shardids.tables.views.database import (
    STORING,
    connection_to,
    correct_regions,
    correct_servers,
    lock,
    own,
    passing_on,
    run,
    strangers_on,
    try_servers,
    unused_servers,
    wanted_servers,
)
from shardids.tables.views.statements import (
    FOREIGN,
    LOCAL,
    NODES,
    PLACEMENT,
    QUERY,
    Choice,
    ForeignServer,
    LocalView,
    QueryTable,
    choose_tables,
)

_PATIENCE_S: Final = 60.0
"""How long to try to lock the tables. Queries that read them are waited for; new ones wait at most…"""
_ATTEMPT_MS: Final = 300
"""…this long for each attempt."""
_PAUSE_S: Final = 0.2
_LOCK_NOT_AVAILABLE: Final = "55P03"
_LOCALE: Final = ("encoding", "datcollate", "datctype", "datlocprovider", "datlocale", "datcollversion")
"""The columns of ``pg_database`` that say how text is compared, as far as the version has them."""

_Views = Mapping[str, Mapping[str, LocalView]]
"""By table, then by server: what each node is to be read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTable:
    """A table of the query node: a row of ``views/query_state.v1.sql``.

    Attributes:
        name: its name.
        signature: of the columns that it was created from.
        parts: the name of the node's view that each server is read by.
        readers: for the schema of each of its views, the roles that may read it, as SQL.
    """

    name: str
    signature: str
    parts: dict[str, str]
    readers: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The objects of the query node.

    Attributes:
        has_schemas: whether it has been made at all.
        tables: its tables.
        enums: the names of its enum types.
        probed: the servers that have a table to ask their node for its name.
    """

    has_schemas: bool
    tables: tuple[ShownTable, ...]
    enums: tuple[str, ...]
    probed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """The statements that were run, without passwords, and a line about each table that is left out."""

    statements: list[str]
    left_out: tuple[str, ...]


def shown_tables(database: Connection) -> Shown:
    """Return the objects of the query node, in the open transaction."""
    enums = database.scalars(
        text("""select t.typname from pg_type t join pg_namespace n on n.oid = t.typnamespace
                where n.nspname = :schema and t.typtype = 'e' order by 1"""),
        {"schema": QUERY},
    )
    probed = database.scalars(
        text("""select s.srvname from pg_foreign_table f
                join pg_foreign_server s on s.oid = f.ftserver
                join pg_class c on c.oid = f.ftrelid
                where c.relnamespace = to_regnamespace(:schema) and not c.relispartition"""),
        {"schema": FOREIGN},
    )
    return Shown(
        has_schemas=bool(
            database.scalar(
                text(
                    f"select to_regnamespace('{QUERY}') is not null"  # noqa: S608 -- a constant
                    " and exists (select from pg_extension where extname = 'postgres_fdw')"
                )
            )
        ),
        tables=tuple(rows(database, read_sql("views/query_state.v1"), ShownTable)),
        enums=tuple(enums),
        probed=frozenset(probed),
    )


def digest_in(database: Connection) -> str | None:
    """Return the digest of the placement that the query node reads from; ``None`` if it has no views.

    It is read from the function's text: another role's function would run with this session's rights.
    """
    found: str | None = database.scalar(
        text("""select substring(p.prosrc from '[0-9a-f]{32}') from pg_proc p
                join pg_namespace n on n.oid = p.pronamespace and n.nspname = :schema
                where p.proname = :name and p.pronargs = 0"""),
        {"schema": QUERY, "name": PLACEMENT},
    )
    return found


def bring_up_to_date(
    catalog: Catalog,
    there: QueryNode,
    *,
    url: str | None = None,
    store_password: bool = False,
    dry_run: bool = False,
    named: Collection[str] = (),
    settled: int | None = None,
) -> Refreshed:
    """Make the query node show the shards' tables as they are, each from its owner.

    ``named`` are tables that have to be there. ``settled`` is the number of a key's move whose rows are each
    in one shard, although the placement does not say so yet.

    With ``dry_run`` all is rolled back, and the nodes are not asked for their rows.

    Raises:
        BadArgument, ClusterConflict, MissingPrivilege, StatementFailed: see
            :func:`shardids.tables.views.create_query_node`.
    """
    description = catalog.describe()
    with connection_to(catalog, there, url) as database, database.begin() as transaction:
        lock(database, there.where)
        _require_free(database, there, description.cluster)
        # Reads the placement under the lock, so that the second of two callers has the newer one.
        placement = catalog.placement()
        # Rows of a lost shard would be missing without a word.
        placement.all_shards()
        # And those of a key that is on its way would be there twice.
        if settled is None or are_others_unsettled(catalog, settled):
            placement.require_settled()
        references = references_of(catalog)
        shown = shown_tables(database)
        own(database, there)
        with Nodes(placement.nodes, catalog.url) as nodes:
            choice = _choice(nodes, placement, there, shown, references, named=named)
            views = _local_views(choice.tables, placement, description.schema_prefix)
            _require_alike(database, nodes, placement)
            if not dry_run:
                _create_local(nodes, views)
            servers = wanted_servers(database, nodes, placement, store_password=store_password)
            done = run(database, statements.foundation()) if not shown.has_schemas else []
            done += correct_regions(database, list(placement.regions.values()))
            done += correct_servers(database, servers)
            done += _correct_probes(database, {server.name for server in servers}, shown)
            done += _change(database, there, choice.tables, views, shown)
            if digest_in(database) != placement.digest():
                done += run(database, statements.placement_function(placement.digest(), description.cluster))
            done += run(database, unused_servers(database))
            if dry_run:
                transaction.rollback()
                return Refreshed(statements=done, left_out=choice.left_out)
            done += _tried(database, servers, placement, shown, there.where)
            transaction.commit()
            _drop_unused_local(nodes, views, shown)
    return Refreshed(statements=done, left_out=choice.left_out)


def are_others_unsettled(catalog: Catalog, move: int) -> bool:
    """Return whether rows of a key may be in two shards, by another move than this one."""
    with catalog.engine.connect() as connection:
        return bool(connection.scalar(_OTHERS, {"move": move}))


_OTHERS: Final = text("""
    select exists (select from shardids_catalog.key_move
                   where ended_at is null and is_unsettled and id <> :move)""")


def hide(catalog: Catalog, there: QueryNode, names: Collection[str], nodes: Collection[str]) -> None:
    """Let the query node read no rows of tables from nodes: queries fail by a name until the next refresh.

    Queries that are under way have ended when it returns.
    """
    with connection_to(catalog, there) as database, database.begin():
        lock(database, there.where)
        shown = [table for table in shown_tables(database).tables if table.name in names]
        own(database, there)
        servers = {statements.server_name(node) for node in nodes}
        _lock_tables(database, there, sorted(table.name for table in shown))
        run(
            database,
            (
                statements.hidden(table.name, server)
                for table in shown
                for server in sorted(servers & table.parts.keys())
            ),
        )


def _require_free(database: Connection, there: QueryNode, cluster: UUID) -> None:
    """Refuse a database whose copies would hold stored passwords, and that of another cluster."""
    is_template, claim = database.execute(
        text("""select datistemplate, obj_description(to_regprocedure(:function), 'pg_proc')
                from pg_database where datname = current_database()"""),
        {"function": f"{QUERY}.{PLACEMENT}()"},
    ).one()
    if is_template:
        raise ClusterConflict(
            f"{there.where} is a template: every database made from it would have the query node's logins",
            hint="Use another database.",
        )
    if claim not in (None, str(cluster)):
        raise ClusterConflict(
            f"{there.where} is the query node of another cluster ({claim})", hint="Use another database."
        )


def _choice(
    nodes: Nodes,
    placement: Placement,
    there: QueryNode,
    shown: Shown,
    references: References,
    *,
    named: Collection[str] = (),
) -> Choice:
    return choose_tables(
        nodes,
        placement,
        references,
        sharded=there.sharded,
        reference=there.reference,
        shown=[table.name for table in shown.tables],
        named=named,
    )


def unlike_tables(
    nodes: Nodes, placement: Placement, there: QueryNode, shown: Shown, references: References
) -> list[str]:
    """Return the tables that a refresh would show, change or take away."""
    choice = _choice(nodes, placement, there, shown, references)
    wanted = {table.name: table for table in choice.tables}
    present = {table.name: table for table in shown.tables}
    unlike = {name for name, table in wanted.items() if not _is_same(table, present.get(name))}
    return sorted(unlike | (present.keys() - wanted.keys()))


def _local_views(tables: Iterable[QueryTable], placement: Placement, prefix: str) -> _Views:
    of_shards: dict[str, dict[int | None, str]] = {
        node: {shard: schema_name(prefix, shard) for shard in shards}
        for node, shards in placement.by_node().items()
    }
    views: dict[str, dict[str, LocalView]] = {}
    for table in tables:
        schemas = of_shards
        if table.writer is not None:
            schemas = {table.writer: {None: REFERENCE_SCHEMA}}
        elif table.is_reference:
            lowest = min(placement.node_of)
            schemas = {placement.node_of[lowest]: {lowest: schema_name(prefix, lowest)}}
        views[table.name] = {
            statements.server_name(node): LocalView(node=node, table=table, schemas=there)
            for node, there in schemas.items()
        }
    return views


def _of_node(views: _Views, node: str) -> dict[str, LocalView]:
    """Return a node's views by their own name."""
    return {
        view.name: view for by_server in views.values() for view in by_server.values() if view.node == node
    }


def _locale(connection: Connection) -> dict[str, object]:
    found = connection.scalar(
        text("select to_jsonb(d) from pg_database d where datname = current_database()")
    )
    return {name: found[name] for name in _LOCALE if found and name in found}


def _require_alike(database: Connection, nodes: Nodes, placement: Placement) -> None:
    """Refuse nodes that order or compare text in another way than the query node."""
    mine = _locale(database)

    def locale(_name: str, engine: Engine) -> dict[str, object]:
        with engine.connect() as connection:
            return _locale(connection)

    for name, theirs in nodes.each(locale, set(placement.node_of.values())).all().items():
        for what in mine.keys() & theirs.keys():
            if mine[what] != theirs[what]:
                raise ClusterConflict(
                    f'the query node has {what} {mine[what]!r}, and node "{name}" {theirs[what]!r}',
                    hint="Create the query node's database with the encoding and locale of the nodes.",
                )


def _create_local(nodes: Nodes, views: _Views) -> None:
    """Create the nodes' views that are missing. Those that are read now stay until others are."""

    def create(name: str) -> None:
        wanted = _of_node(views, name)
        with nodes[name].begin() as connection:
            prepare(connection)
            there = set(_local_names(connection))
            missing = [view for key, view in wanted.items() if key not in there]
            own_schema(connection, LOCAL, owner=engine_owner(connection))
            for view in missing:
                run(connection, view.creation())

    nodes.each(lambda name, _: create(name), {v.node for by in views.values() for v in by.values()}).all()


def _local_names(connection: Connection) -> list[str]:
    found = connection.scalars(
        text("""select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where n.nspname = :schema and c.relkind = 'v' and starts_with(c.relname, 'v_')"""),
        {"schema": LOCAL},
    )
    return list(found)


def _drop_unused_local(nodes: Nodes, views: _Views, before: Shown) -> None:
    """Drop the nodes' views that nobody needs; a query that has begun may still need those from before."""
    kept = {name for table in before.tables for name in table.parts.values()}

    def drop(name: str) -> None:
        wanted = _of_node(views, name).keys() | kept
        with nodes[name].begin() as connection:
            prepare(connection)
            for old in _local_names(connection):
                if old not in wanted:
                    run(connection, statements.local_removal(old))

    # A view that is left now goes with the next refresh.
    nodes.each(lambda name, _: drop(name))


def _change(
    database: Connection, there: QueryNode, tables: Collection[QueryTable], views: _Views, shown: Shown
) -> list[str]:
    """Change the tables that differ, under locks on all of them: a query sees all changes or none."""
    present = {table.name: table for table in shown.tables}
    wanted = {table.name: table for table in tables}
    unlike = [name for name, table in wanted.items() if not _is_same(table, present.get(name))]
    gone = [name for name in present if name not in wanted or name in unlike]
    changes = {
        name: list(statements.parts(table, views[name], present[name].parts if name not in unlike else {}))
        for name, table in wanted.items()
    }
    changed = sorted({*gone, *(name for name, steps in changes.items() if steps)} & present.keys())
    _lock_tables(database, there, changed)
    done = run(database, (step for name in gone for step in statements.table_removal(name)))
    done += run(database, _types(wanted.values(), shown, kept=wanted.keys() - set(unlike)))
    for name in unlike:
        readers = present[name].readers if name in present else {}
        done += run(database, statements.table_creation(wanted[name], readers))
    return done + run(database, (step for steps in changes.values() for step in steps))


def _is_same(table: QueryTable, shown: ShownTable | None) -> bool:
    return shown is not None and shown.signature == statements.signature(table)


def _types(tables: Iterable[QueryTable], shown: Shown, *, kept: Collection[str]) -> Iterator[sql.Composable]:
    """Create the enum types that are missing, and drop those that no table uses."""
    in_use = {name for table in tables if table.name in kept for name in table.enums}
    wanted = {name: labels for table in tables for name, labels in table.enums.items() if name not in in_use}
    for name in shown.enums:
        if name not in in_use:
            yield sql.SQL("drop type {}").format(sql.Identifier(QUERY, name))
    yield from statements.enum_types(wanted)


def _lock_tables(database: Connection, there: QueryNode, names: Collection[str]) -> None:
    """Lock tables in short attempts: queries that come later don't wait for a long one that came before.

    Raises:
        ClusterConflict: a query has kept a lock for a minute.
    """
    if not names:
        return
    # Locking a view locks what it reads and the partitions of that, in the order in which queries do.
    views = sql.SQL(", ").join(sql.Identifier(s, name) for name in names for s in (QUERY, NODES))
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with database.begin_nested():
                database.execute(text(f"set local lock_timeout = {_ATTEMPT_MS}"))
                run(database, [sql.SQL("lock table {} in access exclusive mode").format(views)])
            return
        except StatementFailed as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            if time.monotonic() > deadline:
                raise ClusterConflict(
                    f"queries on {there.where} have been reading the views for {_PATIENCE_S:g} s",
                    hint="Wait for them, or look at them in pg_stat_activity there.",
                ) from error
        time.sleep(_PAUSE_S)


def _correct_probes(database: Connection, servers: Collection[str], shown: Shown) -> list[str]:
    done = run(database, (statements.probe_removal(name) for name in shown.probed - set(servers)))
    return done + run(
        database, (step for name in servers if name not in shown.probed for step in statements.probe(name))
    )


def _tried(
    database: Connection, servers: Sequence[ForeignServer], placement: Placement, shown: Shown, where: str
) -> list[str]:
    """Try the nodes; if one can't be read, again with the login of this session, where servers can do that.

    Returns the statements that this takes. Raises as :func:`try_nodes` does.
    """
    try:
        with database.begin_nested():
            try_nodes(database, placement, shown, where)
    except StatementFailed:
        statements_ = passing_on(database, servers)
        if not statements_:
            raise
        with suppress(StatementFailed), database.begin_nested():
            done = run(database, statements_)
            try_nodes(database, placement, shown, where)
            return done
        raise
    return []


def try_nodes(
    database: Connection,
    placement: Placement,
    shown: Shown,
    where: str,
    *,
    without: Collection[str] = frozenset(),
) -> None:
    """Ask the nodes that have shards, and new ones, for their names; except those of ``without``.

    Raises:
        ClusterConflict: another node is at the address.
        StatementFailed: a node can't be read.
    """
    owners = set(placement.node_of.values())
    servers = {statements.server_name(name): name for name in placement.nodes if name not in without}
    for server, node in servers.items():
        if node in owners or server not in shown.probed:
            ask = statements.probing(server)
            try_servers(database, [(server, ask)], where)
            found = database.scalar(text(ask.as_string()))
            if found != node:
                raise ClusterConflict(
                    f'from {where} the URL of node "{node}" leads to '
                    + (f'node "{found}"' if found else "a database that is not a node"),
                    hint="See: shardids node list",
                )


REFRESH: Final = "shardids query-node refresh"
_READING_S: Final = 10
"""How long a node may keep silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something wrong with the query node.

    ``is_passing``: a move or a migration may repair it by itself. ``unreachable``: the node that does not
    answer, or refuses the login, also from here: that is all that is wrong.
    """

    what: str
    to_do: str
    commands: str = REFRESH
    is_passing: bool = False
    unreachable: str | None = None

    def __str__(self) -> str:
        """Name it, with the next step."""
        return f"{self.what}. {self.to_do.rstrip('.')}."


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The query node: its place, the number of its tables, and its faults."""

    there: QueryNode
    tables: int | None
    faults: tuple[Fault, ...]


def state_of(catalog: Catalog) -> State | None:
    """Return the state of the cluster's query node; ``None`` if it has none. Nothing is changed."""
    there = query_node_of(catalog)
    if there is None:
        return None
    placement = catalog.placement()
    shown: Shown | None = None
    faults: list[Fault] = []
    try:
        with connection_to(catalog, there) as database, database.begin():
            prepare(database)
            shown = shown_tables(database)
            faults += _faults(catalog, there, database, shown, placement)
    except ShardidsError as error:
        lost = there.node if shown is None and isinstance(error, ConnectionFailed) else None
        faults.append(
            Fault(what=error.message, to_do=error.hint or "Repair it", commands="", unreachable=lost)
        )
    return State(there=there, tables=None if shown is None else len(shown.tables), faults=tuple(faults))


def _faults(
    catalog: Catalog, there: QueryNode, database: Connection, shown: Shown, placement: Placement
) -> Iterator[Fault]:
    if strangers := strangers_on(database, there):
        # A table of another role is not read.
        yield from (Fault(what=one.message, to_do=one.fix, commands="") for one in strangers)
        return
    if not shown.has_schemas:
        yield Fault(
            what="it has not been created",
            to_do="Create it; if the nodes require a password: --store-password",
        )
        return
    if digest_in(database) != placement.digest():
        yield Fault(
            what="it does not read every shard from its owner, so it refuses sessions",
            to_do="Refresh it",
            is_passing=True,
        )
    with Nodes(
        placement.nodes, catalog.url, connect_timeout_s=_READING_S, read_only=catalog.read_only
    ) as nodes:
        yield from _faults_of_nodes(nodes, there, database, shown, placement, references_of(catalog))


def _connect(_name: str, engine: Engine) -> None:
    with engine.connect():
        pass


def _faults_of_nodes(  # noqa: PLR0917 -- as unlike_tables
    nodes: Nodes,
    there: QueryNode,
    database: Connection,
    shown: Shown,
    placement: Placement,
    references: References,
) -> Iterator[Fault]:
    unreachable = {
        name: error
        for name, error in nodes.each(_connect).failures.items()
        if isinstance(error, ConnectionFailed)
    }
    for name, error in unreachable.items():
        yield Fault(
            what=error.message,
            to_do=error.hint or "Bring the node back; until then queries of its shards fail",
            commands="",
            unreachable=name,
        )
    # Other roles than its owner may read the views, but not the foreign tables.
    if database.scalar(
        text("select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = :schema"),
        {"schema": FOREIGN},
    ):
        try:
            # libpq's connect_timeout does not hold in postgres_fdw: a silent node would keep it waiting.
            database.execute(text(f"set local statement_timeout = {_READING_S * 1000}"))
            try_nodes(database, placement, shown, there.where, without=unreachable)
        except ShardidsError as error:
            commands = STORING if STORING in error.hint else ""
            yield Fault(what=error.message, to_do=error.hint or "Repair it", commands=commands)
    # The tables of nodes that do not answer are not known.
    if unreachable:
        return
    names = unlike_tables(nodes, placement, there, shown, references)
    if names:
        yield Fault(
            what=f"tables have changed since it was refreshed: {', '.join(names)}",
            to_do="Refresh it",
            is_passing=True,
        )
