"""Checks what an adoption requires. Each function returns its reasons against it and changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.comparing import node_reader, source_reader
from shardids.adopt.definitions import AS_IS, Definition
from shardids.adopt.fitting import fits_shards, is_followable
from shardids.adopt.plan import Kind, Plan
from shardids.adopt.relay_requirements import lacks_relay, paths_are_known
from shardids.adopt.sides import Sides, Taker
from shardids.catalog.connections import keep_out_of_logs
from shardids.catalog.reader import HINT, SOURCE_HINT
from shardids.catalog.rows import Catalog
from shardids.catalog.trust import untrusted
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.mover.history import open_moves
from shardids.mover.requirements import CAPACITY, Refusal
from shardids.mover.sides import server_major
from shardids.mover.timeouts import ending_copies

_FIRST_WITH_FILTERS = 15
_CLOCKS_DIFFER = timedelta(days=1)
_SYNC_WORKERS = 2
"""How many workers copy tables beside the one that applies changes: PostgreSQL's default."""


def refuse(plan: Plan, refusals: Sequence[Refusal]) -> None:
    """Raises all reasons at once, if there are any.

    Raises:
        AdoptionRefused: there are.
    """
    if not refusals:
        return
    where = f"{plan.source} can't be adopted"
    if len(refusals) == 1:
        raise AdoptionRefused(f"{where}: {refusals[0].reason}", hint=refusals[0].remedy)
    raise AdoptionRefused(
        f"{where}:\n" + "\n".join(f"- {refusal.reason}" for refusal in refusals),
        hint="\n".join(f"- {remedy}" for remedy in dict.fromkeys(refusal.remedy for refusal in refusals)),
    )


def plan_is_runnable(plan: Plan) -> Iterator[Refusal]:
    """Requires a plan that nothing blocks, and a relay for tables without a column for the key."""
    for finding in plan.findings:
        if plan.is_blocked_by(finding):
            yield Refusal(reason=f"{finding.subject}: {finding.reason}", remedy=finding.remedy)
    if plan.via is not None:
        yield from paths_are_known(plan)
    for table in plan.tables:
        if table.kind is Kind.DERIVED:
            if plan.via is None:
                yield lacks_relay(table)
        elif table.kind in (Kind.ROOT, Kind.DIRECT) and table.key is None:
            yield Refusal(reason=f"table {table.name} has no key", remedy="Name its column in the plan: key")
    if not any(table.kind is Kind.ROOT for table in plan.tables):
        yield Refusal(reason="the plan has no root", remedy="Write the plan again: shardids adopt plan")


def rows_can_be_compared(sides: Sides) -> Iterator[Refusal]:
    """Requires readers of the source and of the nodes that have no right to write."""
    with source_reader(sides) as reader:
        if reader.skips is not None:
            yield Refusal(reason=f"rows of the source can't be compared: {reader.skips}", remedy=SOURCE_HINT)
    for taker in sides.takers:
        with node_reader(taker) as reader:
            if reader.skips is not None:
                yield Refusal(reason=f"rows can't be compared: {reader.skips}", remedy=HINT)


def code_is_trusted(
    sides: Sides, there: Mapping[str, Definition], trusted: Sequence[str]
) -> Iterator[Refusal]:
    """Requires that nobody else's code runs when rows are read for the nodes, and written there.

    The source plans the query for a filtered copy over indexes, as the role of its URL.
    """
    found = [("the source", sides.source, sides.names, False)]
    for taker in sides.takers:
        split = [there[table.name] for table in sides.split if table.name in there]
        names = [sides.in_shard(table, shard) for shard in taker.shards for table in split]
        names += [table.name for table in sides.reference]
        found.append((f'node "{taker.side.name}"', taker.side, names, True))
    for where, side, names, is_node in found:
        with side.engine.connect() as connection, connection.begin():
            for one in untrusted(connection, names, trusted=trusted, is_node=is_node):
                yield Refusal(reason=f"{where}: {one.reason}", remedy=one.remedy)


def cluster_is_ready(catalog: Catalog, sides: Sides) -> Iterator[Refusal]:
    """Requires all shards, each on its node, and none on the move."""
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


_SOURCE = text("""
    select current_setting('server_encoding') as encoding, pg_is_in_recovery() as is_standby,
           to_regnamespace('shardids') is not null or to_regnamespace('shardids_catalog') is not null
             as is_of_cluster,
           to_regnamespace('shardids_adopt') is not null as has_barrier,
           has_database_privilege(current_database(), 'create') as may_create""")


def source_is_fit(source: Connection, sides: Sides) -> Iterator[Refusal]:
    """Requires a server that filters rows, its settings, and rights of the role."""
    for reason, remedy in ending_copies(source, "the source"):
        yield Refusal(reason=reason, remedy=remedy)
    facts, there = source.execute(_SOURCE).one(), source.execute(CAPACITY).one()
    needed = (1 if sides.relay else len(sides.takers)) * (1 + _SYNC_WORKERS)
    if (version := server_major(source)) < _FIRST_WITH_FILTERS and sides.relay is None:
        yield Refusal(
            reason=f"the source runs PostgreSQL {version}, which can't publish some rows of a table",
            remedy="Bring the rows through a relay: --via URL, an empty database of PostgreSQL 15 or later.",
        )
    if facts.is_standby:
        yield Refusal(reason="the source is a standby", remedy="Write the plan with its primary's URL.")
    if facts.is_of_cluster:
        yield Refusal(
            reason="the source is a node or has a catalog", remedy="Adopt a database that is of no cluster."
        )
    if facts.has_barrier:
        yield Refusal(
            reason="the source has a schema shardids_adopt: it was adopted, or is being adopted",
            remedy="If no cluster needs it any more: drop schema shardids_adopt cascade",
        )
    if facts.encoding != "UTF8":
        yield Refusal(
            reason=f"the source is in {facts.encoding}", remedy="Adopt a database with encoding UTF8."
        )
    if there.wal_level != "logical":
        yield Refusal(
            reason=f"the source has wal_level = {there.wal_level}",
            remedy="alter system set wal_level = logical, and restart that server",
        )
    for setting, free in (("max_replication_slots", there.slots), ("max_wal_senders", there.senders)):
        if free < needed:
            yield Refusal(
                reason=f"the source has {max(free, 0)} free of {setting}; it takes {needed}",
                remedy=f"Raise {setting} there and restart that server.",
            )
    if not there.may_replicate:
        yield Refusal(
            reason="the role may not make replication slots on the source", remedy="alter role … replication"
        )
    if not facts.may_create:
        yield Refusal(
            reason="the role may create neither publications nor schemas on the source",
            remedy="grant create on database … to …",
        )


def tables_are_fit(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Requires that logical replication can tell the shard of every row and of every change."""
    for table in (*sides.split, *sides.reference):
        if table.name not in there:
            yield Refusal(
                reason=f"the source has no table {table.name}",
                remedy="Write the plan again: shardids adopt plan",
            )
        else:
            is_filtered = sides.relay is None
            yield from is_followable(
                table, there[table.name], sides.plan.server_version, is_filtered=is_filtered
            )
    bare = Counter(there[table.name].table for table in sides.split if table.name in there)
    for name, number in bare.items():
        if number > 1:
            yield Refusal(
                reason=f'{number} tables, in different schemas, are called "{name}", and would be one',
                remedy="Rename them at the source until they differ.",
            )


def keys_are_fit(source: Connection, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Requires IDs that can't be taken for those of the cluster."""
    for table in sides.split:
        column = there[table.name].columns.get(table.id or "")
        if column is None or column.type not in ("smallint", "integer", "bigint"):
            continue
        quoted = source.dialect.identifier_preparer.quote_identifier(column.name)
        layout = sides.cluster.layout
        # Those that the cluster can have issued came back with the rows of an earlier adoption.
        own = (
            f"where {quoted} >= {layout.min_id(datetime.now(UTC) + _CLOCKS_DIFFER)} or {quoted} >="
            f" {sides.lowest_new_id} and ({quoted}::bigint >> {layout.sequence_bits}"
            f" & {(1 << layout.shard_bits) - 1}) >= {sides.cluster.shard_count}"
        )
        highest = source.exec_driver_sql(
            f"select max({quoted}) from {table.name} {own if sides.has_returned else ''}",  # noqa: S608 -- quoted
            execution_options=AS_IS,
        ).scalar()
        if highest is not None and highest >= sides.lowest_new_id:
            yield Refusal(
                reason=f"{table.name} has ID {highest}; IDs from {sides.lowest_new_id} on are the cluster's",
                remedy="Such IDs could not be told from new ones. Adopt the table in place.",
            )


def node_is_fit(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Requires free workers on a node, rights of the role, and tables in its shards that take the rows."""
    node = f'node "{taker.side.name}"'
    with taker.side.autocommit() as connection:
        here = connection.execute(CAPACITY).one()
        version = server_major(connection)
        ended = ending_copies(connection, node, taking=True)
        roles = set(
            connection.scalars(
                text("select state from shardids.shard where id = any(:shards)"),
                {"shards": list(taker.shards)},
            )
        )
    yield from (Refusal(reason=reason, remedy=remedy) for reason, remedy in ended)
    if version < _FIRST_WITH_FILTERS:
        yield Refusal(
            reason=f"{node} runs PostgreSQL {version}, which copies tables without their filters",
            remedy="Upgrade it to 15 or later.",
        )
    if roles != {"active"}:
        yield Refusal(
            reason=f"{node} has shards that are not active", remedy="shardids doctor says which, and why."
        )
    for setting, free in (
        ("max_logical_replication_workers", here.workers),
        ("max_worker_processes", here.processes),
        ("max_active_replication_origins" if version >= 18 else "max_replication_slots", here.origins),
    ):
        if free < 1 + _SYNC_WORKERS:
            yield Refusal(
                reason=f"{node} has {max(free, 0)} free of {setting}; it takes {1 + _SYNC_WORKERS}",
                remedy=f"Raise {setting} there and restart that server.",
            )
    if not here.may_subscribe:
        yield Refusal(
            reason=f"the role may not subscribe on {node}",
            remedy="Use a superuser's URL; from version 16 on, grant pg_create_subscription does.",
        )
    with taker.side.engine.connect() as connection:
        yield from fits_shards(connection, taker, sides, there)


def node_reaches_feed(taker: Taker, sides: Sides) -> Iterator[Refusal]:
    """Requires that a node can connect to what it is to follow: it tries, and rolls back."""
    feed = sides.feed.name
    conninfo = make_conninfo("", **sides.feed.parameters())
    with taker.side.engine.connect() as connection, connection.begin() as transaction:
        keep_out_of_logs(connection)
        try:
            connection.execute(text("select shardids.try_subscribing(:conninfo)"), {"conninfo": conninfo})
        except ShardidsError as error:
            yield Refusal(
                reason=f'node "{taker.side.name}" can\'t reach the {feed}: {error.message}',
                remedy=f"The {feed}'s URL must be good on the node, and pg_hba.conf must let the role in.",
            )
        transaction.rollback()
