"""Checks what a relay, and tables whose rows find their key in another one, require. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from psycopg.conninfo import make_conninfo
from sqlalchemy import text

from shardids.adopt import relay as relays
from shardids.adopt.definitions import Column, Definition, read_definitions
from shardids.adopt.filters import ROUTE
from shardids.adopt.plan import Kind, Plan, TablePlan
from shardids.adopt.relay_tables import REFERRED, base_type, identity_of
from shardids.adopt.sides import Relay, Sides
from shardids.errors import ShardidsError
from shardids.mover.requirements import CAPACITY, Refusal
from shardids.mover.sides import server_major
from shardids.mover.timeouts import ending_copies

_FIRST_RELAY = 15
_AGAIN = "Write the plan again: shardids adopt plan"
_ALIKE = {"smallint": "integer", "bigint": "integer", "character varying": "text"}
"""Types of columns that can refer to one of another type."""
_WORKERS = 3
"""How many processes a subscription takes: one applies changes, two copy tables."""


def paths_are_known(plan: Plan) -> Iterator[Refusal]:
    """Requires that the tables on the way of a derived one say the same of the rest of the way."""
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
    """Requires columns on the way to the key that the relay can compare as the source does."""
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


_RELAY = text("""
    select current_setting('server_encoding') as encoding, pg_is_in_recovery() as is_standby,
           to_regnamespace('shardids') is not null or to_regnamespace('shardids_catalog') is not null
             as is_of_cluster,
           to_regnamespace('shardids_relay') is not null as is_relay,
           has_database_privilege(current_database(), 'create') as may_create""")
_WHERE = text("""
    select pg_postmaster_start_time()::text as started, d.oid, d.datname::text as database
    from pg_database d where d.datname = current_database()""")


def relay_is_fit(sides: Sides, relay: Relay) -> Iterator[Refusal]:
    """Requires a server with room, rights of the role, and another database than the source."""
    with relay.side.autocommit() as connection:
        facts, there = connection.execute(_RELAY).one(), connection.execute(CAPACITY).one()
        version, where = server_major(connection), connection.execute(_WHERE).one()
        ended = ending_copies(connection, "the relay")
    yield from (Refusal(reason=reason, remedy=remedy) for reason, remedy in ended)
    with sides.source.autocommit() as source:
        if source.execute(_WHERE).one() == where:
            yield Refusal(
                reason=f"the relay is the source: database {where.database}",
                remedy="Make an empty database for it, on any server of PostgreSQL 15 or later.",
            )
            return
    if version < _FIRST_RELAY:
        yield Refusal(
            reason=f"the relay runs PostgreSQL {version}, which can't publish some rows of a table",
            remedy="Use a server of PostgreSQL 15 or later.",
        )
    for is_wrong, reason, remedy in (
        (facts.is_standby, "is a standby", "Give its primary's URL."),
        (
            facts.is_of_cluster,
            "is a node or has a catalog",
            "Make a database of its own; on that server will do.",
        ),
        (
            facts.is_relay,
            "has a schema shardids_relay: it is a relay already",
            "Use another database; or, if no adoption needs this one, drop and create it.",
        ),
        (facts.encoding != "UTF8", f"is in {facts.encoding}", "Make a database with encoding UTF8."),
        (
            there.wal_level != "logical",
            f"has wal_level = {there.wal_level}",
            "alter system set wal_level = logical, and restart that server",
        ),
        (not there.may_replicate, "does not let the role make replication slots", "alter role … replication"),
        (
            not there.may_subscribe,
            "does not let the role subscribe",
            "Use a superuser's URL; from version 16 on, grant pg_create_subscription does.",
        ),
        (
            not facts.may_create,
            "does not let the role create publications and schemas",
            "grant create on database … to …",
        ),
    ):
        if is_wrong:
            yield Refusal(reason=f"the relay {reason}", remedy=remedy)
    origins = "max_active_replication_origins" if version >= 18 else "max_replication_slots"
    needed = len(sides.takers) * _WORKERS
    for setting, free, wanted in (
        ("max_replication_slots", there.slots, needed),
        ("max_wal_senders", there.senders, needed),
        ("max_logical_replication_workers", there.workers, _WORKERS),
        ("max_worker_processes", there.processes, _WORKERS),
        (origins, there.origins, _WORKERS),
    ):
        if free < wanted:
            yield Refusal(
                reason=f"the relay has {max(free, 0)} free of {setting}; it takes {wanted}",
                remedy=f"Raise {setting} there and restart that server.",
            )


def relay_is_free(sides: Sides, relay: Relay, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Requires that the relay has none of the tables, and reaches the source: it tries, and rolls back."""
    with relay.side.engine.connect() as connection:
        found = sorted(read_definitions(connection, there.keys()))
    if found:
        yield Refusal(
            reason=f"the relay has tables of its own: {', '.join(found[:5])}",
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
    """Returns the tables as the nodes get them: a relay sends whole rows, whatever the source logs."""
    if sides.relay is None:
        return dict(there)
    return {name: replace(table, identity=None) for name, table in there.items()}


def lacks_relay(table: TablePlan) -> Refusal:
    """Returns why a derived table can't be taken in without a relay."""
    return Refusal(
        reason=f"table {table.name} has no column with the key: only its foreign keys lead to it",
        remedy="Bring the rows through a relay: --via URL, an empty database of PostgreSQL 15 or later. Or"
        " give the table such a column, NOT NULL, kept by the application or by a trigger, and plan again.",
    )
