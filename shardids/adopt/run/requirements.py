"""Requirements of an adoption. Each function returns its reasons against it and changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, Row, text

from shardids.adopt.plan.document import Kind, Plan, TablePlan
from shardids.adopt.run import relay as relays
from shardids.adopt.run.comparing import node_reader, source_reader
from shardids.adopt.run.fitting import fits_shards
from shardids.adopt.run.relay import REFERRED, base_type, identity_of
from shardids.adopt.run.sides import ROUTE, Relay, Sides, Taker
from shardids.catalog.moves import open_moves
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.pg.connections import keep_out_of_logs
from shardids.pg.definitions import KEY_TYPES, Column, Definition, read_definitions
from shardids.pg.queries import AS_IS, quoted
from shardids.pg.reader import HINT, SOURCE_HINT
from shardids.pg.schemas import untrusted
from shardids.replication.sides import server_major
from shardids.replication.subscriptions import Refusal, ending_copies, unable_to_publish, unable_to_subscribe

_RESERVED = ("shardids", "shardids_catalog", "shardids_query", "shardids_nodes", "shardids_adopt")
FULL_NEEDS_ALL: Final = 18
"""From this version on a table with replica identity FULL and a generated column refuses its updates."""


def is_followable(
    table: TablePlan, there: Definition, version: int, *, is_filtered: bool
) -> Iterator[Refusal]:
    """Require that every change of a table is logged with the column that determines its row's shard.

    ``is_filtered``: the source itself determines the shard, by a row filter.
    """
    name = table.name
    if there.kind not in ("r", "p") or there.persistence != "p":
        yield Refusal(
            reason=f"{name} is not an ordinary, logged table",
            remedy="Leave it out of the plan, or: alter table … set logged",
        )
        return
    if there.is_inherited:
        yield Refusal(
            reason=f"table {name} inherits, or is inherited by another",
            remedy="Adopt partitioned tables by their root; end other inheritance: alter table … no inherit",
        )
    if not there.is_own:
        yield Refusal(
            reason=f"the role is not an owner of {name}", remedy="Use the owner's or a superuser's URL."
        )
    if there.schema in _RESERVED:
        yield Refusal(reason=f"schema {there.schema} is shardids' own", remedy="Rename it at the source.")
    if there.identity == ():
        yield Refusal(
            reason=f"table {name} has no replica identity: its updates can't be followed",
            remedy=f"Give it a primary key, or: alter table {name} replica identity full",
        )
    if there.has_full_identity and version >= FULL_NEEDS_ALL and len(there.stored) < len(there.columns):
        yield Refusal(
            reason=f"table {name} has replica identity FULL and a generated column: updates would fail",
            remedy=f"alter table {name} replica identity using index …, a unique one with the key",
        )
    if table.kind in (Kind.ROOT, Kind.DIRECT):
        yield from _has_key(table, there, is_filtered=is_filtered)


def _has_key(table: TablePlan, there: Definition, *, is_filtered: bool) -> Iterator[Refusal]:
    key = there.columns.get(table.key or "")
    if key is None:
        yield Refusal(reason=f"table {table.name} has no column {table.key}", remedy="Write the plan again.")
        return
    if key.family is None or key.is_generated:
        generated = ", generated" if key.is_generated else ""
        collation = "" if key.is_deterministic else ", of a nondeterministic collation"
        yield Refusal(
            reason=f"{table.name}.{key.name} can't be a key: it is {key.type}{generated}{collation}",
            remedy=f"A key is a stored column, {' or '.join(KEY_TYPES)}.",
        )
    if not key.not_null:
        yield Refusal(
            reason=f"{table.name}.{key.name} may be NULL, and a row without key has no shard",
            remedy=f"alter table {table.name} alter column {quoted(key.name)} set not null",
        )
    if is_filtered and there.identity is not None and key.name not in there.identity:
        yield Refusal(
            reason=f"{table.name}.{key.name} is not logged when a row is updated or deleted: with the filter"
            " that the nodes need, every UPDATE and DELETE there would fail",
            remedy=f"alter table {table.name} replica identity full; to go back: … replica identity default;"
            " or bring the rows through a relay: --via URL",
        )
    elif is_filtered and table.kind is Kind.DIRECT and there.identity is not None and there.has_toast:
        yield Refusal(
            reason=f"{table.name} has columns whose large values are not logged by an UPDATE of others: a row"
            " whose key changes would arrive on another node without them",
            remedy=f"alter table {table.name} replica identity full; or bring the rows through a relay: --via"
            " URL",
        )


_AGAIN = "Write the plan again: shardids adopt plan"
_ALIKE = {"smallint": "integer", "bigint": "integer", "character varying": "text"}
"""Types of columns that can refer to one of another type."""
_WORKERS = 3
"""How many processes a subscription takes: one applies changes, two copy tables."""


def paths_are_known(plan: Plan) -> Iterator[Refusal]:
    """Require that the tables on the way of a derived one say the same of the rest of the way."""
    tables = {table.name: table for table in plan.tables}
    for table in plan.tables:
        if table.kind is not Kind.DERIVED:
            continue
        parent = tables.get(table.path[0].table) if table.path else None
        if parent is None or parent.kind in (Kind.REFERENCE, Kind.LOOSE):
            yield Refusal(reason=f"the path of {table.name} leads to no table that is split", remedy=_AGAIN)
        elif parent.path != table.path[1:] or parent.key != table.key:
            yield Refusal(
                reason=f"the path of {table.name} is not one hop and then that of {parent.name}",
                remedy=_AGAIN,
            )


def paths_are_fit(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require columns on the way to the key that the relay can compare as the source does."""
    for table in sides.derived:
        hop = table.path[0]
        if table.name not in there or hop.table not in there:
            continue
        if ROUTE in there[table.name].columns:
            yield Refusal(
                reason=f"table {table.name} has a column {ROUTE}", remedy="Rename it at the source."
            )
        for own, theirs in zip(hop.columns, hop.referenced, strict=True):
            unfit = [*_can_refer(there[table.name], own), *_can_refer(there[hop.table], theirs)]
            yield from unfit
            if not unfit and not _compare(there[table.name].columns[own], there[hop.table].columns[theirs]):
                yield Refusal(
                    reason=f"{table.name}.{own} and {hop.table}.{theirs} are of types that don't compare",
                    remedy=_AGAIN,
                )
    for name, found in there.items():
        if any(found.columns[column].is_generated for column in identity_of(found)):
            yield Refusal(
                reason=f"table {name} finds a changed row by a generated column, which is not replicated",
                remedy=f"alter table {name} replica identity using index …, one without it",
            )


def _compare(own: Column, theirs: Column) -> bool:
    kinds = {_ALIKE.get(base_type(column.type), column.type) for column in (own, theirs)}
    return len(kinds) == 1


def _can_refer(table: Definition, name: str) -> Iterator[Refusal]:
    column = table.columns.get(name)
    if column is None:
        yield Refusal(
            reason=f"table {table.name} has no column {name}",
            remedy=_AGAIN,
        )
    elif column.labels is not None or base_type(column.type) not in REFERRED or column.is_generated:
        generated = ", generated" if column.is_generated else ""
        yield Refusal(
            reason=f"{table.name}.{name} is on the way to a key, and {column.type}{generated}",
            remedy=f"Such a column is a stored one, {', '.join(sorted(REFERRED))}; or give the table a"
            " column with the key.",
        )
    elif not column.is_deterministic:
        yield Refusal(
            reason=f"{table.name}.{name} is on the way to a key, and of a nondeterministic collation",
            remedy="Give the table a column with the key.",
        )


_DATABASE = text("""
    select current_setting('server_encoding') as encoding, pg_is_in_recovery() as is_standby,
           to_regnamespace('shardids') is not null or to_regnamespace('shardids_catalog') is not null
             as is_of_cluster,
           to_regnamespace('shardids_relay') is not null as is_relay,
           to_regnamespace('shardids_adopt') is not null as has_barrier,
           has_database_privilege(current_database(), 'create') as may_create""")
_WHERE = text("""
    select pg_postmaster_start_time()::text as started, d.oid, d.datname::text as database
    from pg_database d where d.datname = current_database()""")


def relay_is_fit(sides: Sides, relay: Relay) -> Iterator[Refusal]:
    """Require a server with room, rights of the role, and another database than the source."""
    with relay.side.autocommit() as connection:
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


def relay_is_free(sides: Sides, relay: Relay, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require that the relay has none of the tables, and reaches the source: it tries, and rolls back."""
    with relay.side.engine.connect() as connection:
        found = sorted(read_definitions(connection, there.keys()))
    if found:
        yield Refusal(
            reason=f"the relay already has tables: {', '.join(found[:5])}",
            remedy="Make an empty database for it.",
        )
    conninfo = make_conninfo("", **sides.source.parameters())
    with relay.side.engine.connect() as connection, connection.begin() as transaction:
        try:
            relays.install(connection, "trial")
            relays.subscribe(connection, "shardids_trial", conninfo, "enabled = false, slot_name = none")
        except ShardidsError as error:
            yield Refusal(
                reason=f"the relay can't reach the source: {error.message}",
                remedy="The source's URL must be good on the relay, and pg_hba.conf must let the role in.",
            )
        transaction.rollback()


def as_fed(sides: Sides, there: Mapping[str, Definition]) -> dict[str, Definition]:
    """Return the tables as the nodes get them: a relay sends whole rows, whatever the source logs."""
    if sides.relay is None:
        return dict(there)
    return {name: replace(table, identity=None) for name, table in there.items()}


def lacks_relay(table: TablePlan) -> Refusal:
    """Return why a derived table can't be taken in without a relay."""
    return Refusal(
        reason=f"table {table.name} has no column with the key: only its foreign keys lead to it",
        remedy="Bring the rows through a relay: --via URL, an empty database of PostgreSQL 15 or later. Or"
        " give the table such a column, NOT NULL, kept by the application or by a trigger, and plan again.",
    )


_FIRST_WITH_FILTERS = 15
_CLOCKS_DIFFER = timedelta(days=1)


def refuse(plan: Plan, refusals: Sequence[Refusal]) -> None:
    """Raise all reasons at once, if there are any.

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
    """Require a plan that nothing blocks, and a relay for tables without a column for the key."""
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
    """Require readers of the source and of the nodes that have no right to write."""
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
    """Require that nobody else's code runs when rows are read for the nodes, and written there.

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


def source_is_fit(source: Connection, sides: Sides) -> Iterator[Refusal]:
    """Require a server that filters rows, its settings, and rights of the role."""
    yield from ending_copies(source, "the source")
    facts, followers = source.execute(_DATABASE).one(), 1 if sides.relay else len(sides.takers)
    yield from unable_to_publish(source, "the source", followers * _WORKERS)
    if (version := server_major(source)) < _FIRST_WITH_FILTERS and sides.relay is None:
        yield Refusal(
            reason=f"the source runs PostgreSQL {version}, which can't publish some rows of a table",
            remedy="Bring the rows through a relay: --via URL, an empty database of PostgreSQL 15 or later.",
        )
    if facts.has_barrier:
        yield Refusal(
            reason="the source has a schema shardids_adopt: it was adopted, or is being adopted",
            remedy="If no cluster needs it any more: drop schema shardids_adopt cascade",
        )
    yield from _is_usable(facts, "the source", "Adopt a database that is of no cluster.")


def tables_are_fit(sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require that logical replication can determine the shard of every row and of every change."""
    for table in (*sides.split, *sides.reference):
        if table.name not in there:
            yield Refusal(
                reason=f"the source has no table {table.name}",
                remedy="Write the plan again: shardids adopt plan",
            )
        else:
            is_filtered = sides.relay is None
            yield from is_followable(
                table, there[table.name], sides.plan.server_version // 10000, is_filtered=is_filtered
            )
    bare = Counter(there[table.name].table for table in sides.split if table.name in there)
    for name, number in bare.items():
        if number > 1:
            yield Refusal(
                reason=f'{number} tables, in different schemas, are called "{name}", and would be one',
                remedy="Rename them at the source until they differ.",
            )


def keys_are_fit(source: Connection, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require IDs that can't be taken for those of the cluster."""
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
                remedy="Such IDs look like new ones. Adopt the table in place.",
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
            reason=f"{node} runs PostgreSQL {version}, which copies tables without their filters",
            remedy="Upgrade it to 15 or later.",
        )
    if roles != {"active"}:
        yield Refusal(
            reason=f"{node} has shards that are not active", remedy="shardids doctor says which, and why."
        )
    with taker.side.engine.connect() as connection:
        yield from fits_shards(connection, taker, sides, there)


def node_reaches_feed(taker: Taker, sides: Sides) -> Iterator[Refusal]:
    """Require that a node can connect to its publisher: it tries, and rolls back."""
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
