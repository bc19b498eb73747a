"""Requirements of an adoption. Each function returns its reasons against it and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, Row, text

from shardids.adopt.plan.document import Finding, Kind, Plan
from shardids.adopt.plan.facts import column_name
from shardids.adopt.plan.inventory import read_server
from shardids.adopt.plan.obstacles import AGAIN, Obstacles
from shardids.adopt.run.comparing import all_rows, node_reader, source_reader
from shardids.adopt.run.fitting import computes_rows, fits_shards
from shardids.adopt.run.following import try_subscribing
from shardids.adopt.run.sides import Sides, Taker
from shardids.catalog.keys.homes import read_homes
from shardids.catalog.moves import open_moves
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.pg.connections import keep_out_of_logs, server_major
from shardids.pg.definitions import Column, Definition, read_definitions
from shardids.pg.queries import AS_IS, quoted
from shardids.pg.reader import HINT, SOURCE_HINT, Reader
from shardids.pg.schemas import untrusted
from shardids.replication.subscriptions import (
    Refusal,
    ending_copies,
    refused,
    unable_to_publish,
    unable_to_subscribe,
)

_KINDS = {"integer": "bigint"}
"""The kinds of keys, where families have other names."""
_WORKERS = 3
"""How many processes a subscription takes: one applies changes, two copy tables."""


_DATABASE = text("""
    select current_setting('server_encoding') as encoding, pg_is_in_recovery() as is_standby,
           to_regnamespace('shardids') is not null or to_regnamespace('shardids_catalog') is not null
             as is_of_cluster,
           to_regnamespace('shardids_relay') is not null as is_relay,
           has_database_privilege(current_database(), 'create') as may_create""")
_WHERE = text("""
    select pg_postmaster_start_time()::text as started, d.oid, d.datname::text as database
    from pg_database d where d.datname = current_database()""")


def relay_is_fit(sides: Sides) -> Iterator[Refusal]:
    """Require a server with room, rights of the role, and another database than the source."""
    with sides.relay.side.autocommit() as connection:
        facts, version = connection.execute(_DATABASE).one(), server_major(connection)
        where = connection.execute(_WHERE).one()
        yield from ending_copies(connection, "the relay")
        yield from unable_to_publish(connection, "the relay", len(sides.takers) * _WORKERS)
        yield from unable_to_subscribe(connection, "the relay", _WORKERS)
    with sides.source.autocommit() as source:
        if source.execute(_WHERE).one() == where:
            yield Refusal(
                reason=f"the relay is the source: database {where.database}",
                remedy="Make an empty database for it, on any server of PostgreSQL 15 or later.",
            )
            return
    if version < _FIRST_WITH_FILTERS:
        yield Refusal(
            reason=f"the relay runs PostgreSQL {version}, which can't publish some rows of a table",
            remedy="Use a server of PostgreSQL 15 or later.",
        )
    if facts.is_relay:
        yield Refusal(
            reason="the relay has a schema shardids_relay: it is a relay already",
            remedy="Use another database; or, if no adoption needs this one, drop and create it.",
        )
    yield from _is_usable(facts, "the relay", "Make a separate database; on that server will do.")


def _is_usable(facts: Row[Any], where: str, otherwise: str) -> Iterator[Refusal]:
    """Require a primary, of no cluster, in UTF-8, where the role may create what replication needs."""
    for is_wrong, reason, remedy in (
        (facts.is_standby, f"{where} is a standby", "Give the URL of its primary."),
        (facts.is_of_cluster, f"{where} is a node or has a catalog", otherwise),
        (facts.encoding != "UTF8", f"{where} is in {facts.encoding}", "Use a database with encoding UTF8."),
        (
            not facts.may_create,
            f"the role may create neither publications nor schemas on {where}",
            "grant create on database … to …",
        ),
    ):
        if is_wrong:
            yield Refusal(reason=reason, remedy=remedy)


def relay_is_free(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require that the relay has none of the tables, and reaches the source: it tries, and rolls back."""
    relay = sides.relay.side
    with relay.engine.connect() as connection:
        found = sorted(read_definitions(connection, there.keys()))
    if found:
        yield Refusal(
            reason=f"the relay already has tables: {', '.join(found[:5])}",
            remedy="Make an empty database for it.",
        )
    try:
        try_subscribing(relay, sides.source)
    except ShardidsError as error:
        yield Refusal(
            reason=f"the relay can't reach the source: {error.message}",
            remedy="The source's URL must be good on the relay, and pg_hba.conf must let the role in.",
        )


_FIRST_WITH_FILTERS = 15
_CLOCKS_DIFFER = timedelta(days=1)


def refuse(plan: Plan, refusals: Sequence[Refusal]) -> None:
    """Raise all reasons at once, if there are any.

    Raises:
        AdoptionRefused: there are.
    """
    if refusals:
        raise refused(f"{plan.source} can't be adopted", refusals, AdoptionRefused)


def plan_is_runnable(plan: Plan) -> Iterator[Refusal]:
    """Require a plan that nothing blocks, with a root."""
    yield from _blocking(plan, plan.findings)
    if not any(table.kind is Kind.ROOT for table in plan.tables):
        yield Refusal(reason="the plan has no root", remedy=AGAIN)


def _blocking(plan: Plan, findings: Iterable[Finding]) -> Iterator[Refusal]:
    for finding in findings:
        if plan.is_blocked_by(finding):
            yield Refusal(reason=f"{finding.subject}: {finding.reason}", remedy=finding.remedy)


def rows_can_be_compared(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require readers of the source and of the nodes that have no right to write, and see all rows."""
    with source_reader(sides) as reader:
        if reader.skips is not None:
            yield Refusal(reason=f"rows of the source can't be compared: {reader.skips}", remedy=SOURCE_HINT)
        else:
            parts = [part for table in there.values() for part in table.parts]
            yield from _sees_all(reader, "the source", parts)
    for taker in sides.takers:
        with node_reader(taker) as reader:
            if reader.skips is not None:
                yield Refusal(reason=f"rows can't be compared: {reader.skips}", remedy=HINT)
            else:
                yield from _sees_all(reader, f'node "{taker.side.name}"', _tables_of(taker, sides, there))


def _sees_all(reader: Reader, where: str, names: Sequence[str]) -> Iterator[Refusal]:
    rows = all_rows(
        reader,
        reader.with_values(
            "select min(name) as name, current_user::text as role from unnest(%s::text[]) name"
            " where row_security_active(to_regclass(name)) having count(*) > 0",
            [list(names)],
        ),
    )
    for row in rows:
        role = quoted(row["role"])
        yield Refusal(
            reason=f"{where}: row security of {row['name']} hides rows from role {role}, which compares them",
            remedy=f"As a superuser there: alter role {role} bypassrls",
        )


def _tables_of(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> list[str]:
    """Return the names of the tables of a node that take rows in."""
    split = [there[table.name] for table in sides.split if table.name in there]
    names = [sides.in_shard(table, shard) for shard in taker.shards for table in split]
    return names + [table.name for table in sides.reference]


def code_is_trusted(
    sides: Sides, there: Mapping[str, Definition], trusted: Sequence[str]
) -> Iterator[Refusal]:
    """Require that nobody else's code runs when rows are read for the relay, and written to the nodes.

    The source plans a query for the copy of a partitioned table, as the role of its URL.
    """
    found = [("the source", sides.source, sides.names, False)]
    for taker in sides.takers:
        found.append((f'node "{taker.side.name}"', taker.side, _tables_of(taker, sides, there), True))
    for where, side, names, is_node in found:
        with side.engine.connect() as connection, connection.begin():
            for one in untrusted(connection, names, trusted=trusted, is_node=is_node):
                yield Refusal(reason=f"{where}: {one.reason}", remedy=one.remedy)


def cluster_is_ready(catalog: Catalog, sides: Sides) -> Iterator[Refusal]:
    """Require all shards, each on its node, and none on the move."""
    placement, count = catalog.placement(), sides.cluster.shard_count
    if sides.plan.shard_count != count:
        yield Refusal(
            reason=f"the plan is for {sides.plan.shard_count} shards, and the cluster has {count}",
            remedy="Write the plan for as many, or make a cluster for the plan: shardids init --shards N",
        )
    missing = sorted(set(range(count)) - placement.node_of.keys())
    if missing:
        yield Refusal(
            reason=f"{len(missing)} shards are on no node, the first is {missing[0]}",
            remedy="shardids shard create all; of lost ones: shardids node replace",
        )
    for move in open_moves(catalog):
        yield Refusal(
            reason=f"shard {move.shard} is being moved",
            remedy=f"shardids shard move {move.shard} --resume, or --abort",
        )


def source_is_fit(source: Connection, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require all that the plan requires of the source, as it is now, and rights of the role."""
    obstacles = Obstacles(
        tables=sides.plan.tables,
        there=there,
        server=read_server(source),
        shard_count=sides.plan.shard_count,
    )
    yield from _blocking(sides.plan, obstacles.find())
    yield from obstacles.of_role(source)


def keys_are_fit(source: Connection, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require IDs, and keys, that can't be taken for those of the cluster."""
    for table in sides.split:
        names = [table.id, table.key if table.kind is not Kind.DERIVED else None]
        for name in dict.fromkeys(name for name in names if name is not None):
            column = there[table.name].columns.get(name)
            if column is not None and column.type in ("smallint", "integer", "bigint"):
                yield from _below_new_ids(source, sides, table.name, column)


def _below_new_ids(source: Connection, sides: Sides, table: str, column: Column) -> Iterator[Refusal]:
    quoted = source.dialect.identifier_preparer.quote_identifier(column.name)
    layout = sides.cluster.layout
    # Those that the cluster can have issued came back with the rows of an earlier adoption.
    own = (
        f"where {quoted} >= {layout.min_id(datetime.now(UTC) + _CLOCKS_DIFFER)} or {quoted} >="
        f" {sides.lowest_new_id} and ({quoted}::bigint >> {layout.sequence_bits}"
        f" & {(1 << layout.shard_bits) - 1}) >= {sides.cluster.shard_count}"
    )
    highest = source.exec_driver_sql(
        f"select max({quoted}) from {table} {own if sides.has_returned else ''}",  # noqa: S608 -- quoted
        execution_options=AS_IS,
    ).scalar()
    if highest is not None and highest >= sides.lowest_new_id:
        yield Refusal(
            reason=f"{column_name(table, column.name)} has {highest}; IDs from {sides.lowest_new_id} on are"
            " the cluster's",
            remedy="Such IDs look like new ones. Adopt the table in place.",
        )


def keys_live_by_hash(catalog: Catalog, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require that no key of the kind of the tables' keys lives elsewhere, by the directory of keys."""
    families = {
        family
        for table in sides.split
        if (key := there[table.name].columns.get(table.key or "")) is not None
        and (family := key.family) is not None
    }
    with catalog.engine.connect() as connection:
        for kind in sorted(_KINDS.get(family, family) for family in families):
            if found := read_homes(connection, kind=kind, limit=1):
                yield Refusal(
                    reason=f"key {found[0].key[:60]!r} of kind {kind} lives in shard {found[0].shard} by the"
                    " directory of keys, and an adoption places rows by the hash of their keys",
                    remedy="Move such keys back to the shards of their hashes first: shardids tenant list",
                )


def node_is_fit(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require free workers on a node, rights of the role, and tables in its shards that take the rows."""
    node = f'node "{taker.side.name}"'
    with taker.side.autocommit() as connection:
        version = server_major(connection)
        yield from ending_copies(connection, node, taking=True)
        yield from unable_to_subscribe(connection, node, _WORKERS)
        roles = set(
            connection.scalars(
                text("select state from shardids.shard where id = any(:shards)"),
                {"shards": list(taker.shards)},
            )
        )
    if version < _FIRST_WITH_FILTERS:
        yield Refusal(
            reason=f"{node} runs PostgreSQL {version}, which copies tables without their row filters",
            remedy="Upgrade it to 15 or later.",
        )
    if roles != {"active"}:
        yield Refusal(
            reason=f"{node} has shards that are not active", remedy="shardids doctor says which, and why."
        )
    with taker.side.engine.connect() as connection:
        if refusals := list(computes_rows(connection, taker, sides, there)):
            # A query of such a table may fail.
            yield from refusals
            return
        connection.rollback()
        yield from fits_shards(connection, taker, sides, there)


def node_reaches_relay(taker: Taker, sides: Sides) -> Iterator[Refusal]:
    """Require that a node can connect to the relay: it tries, and rolls back."""
    conninfo = make_conninfo("", **sides.relay.side.parameters())
    with taker.side.engine.connect() as connection, connection.begin() as transaction:
        keep_out_of_logs(connection)
        try:
            connection.execute(text("select shardids.try_subscribing(:conninfo)"), {"conninfo": conninfo})
        except ShardidsError as error:
            yield Refusal(
                reason=f'node "{taker.side.name}" can\'t reach the relay: {error.message}',
                remedy="The relay's URL must be good on the node, and pg_hba.conf must let the role in.",
            )
        transaction.rollback()
