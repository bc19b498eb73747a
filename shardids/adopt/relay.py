"""What an adoption makes on a relay, and removes there.

The relay subscribes to the source without filters, so that its tables have all rows. Then it stops for a
moment, in which rows without a key of their own get their shards, and goes on with triggers that keep these
right. Only then is anything published to the nodes: a row of which the shard is not known is on none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.copy_slots import drop_copy_slots, note_copy_slots
from shardids.adopt.definitions import AS_IS, Definition, qualified
from shardids.adopt.events import OnEvent
from shardids.adopt.filters import ROUTE
from shardids.adopt.plan import TablePlan
from shardids.adopt.relay_tables import create_table, fill, identity_of, index_paths, triggers
from shardids.adopt.replication import let_follow, publish_tables
from shardids.adopt.sides import Relay, Sides
from shardids.catalog.connections import keep_out_of_logs
from shardids.catalog.schemas import is_ours, own_schema, require_own_replication
from shardids.catalog.sqlfiles import read_sql
from shardids.errors import AdoptionFailed
from shardids.mover.replication import play, unpublish

_STOPS_WITHIN_S = 30.0
_NAMED = 5
_SCHEMA = "shardids_relay"
_MARK = text("""
    select t.oid is not null as is_there, obj_description(t.oid, 'pg_class') as mark,
           pg_get_userbyid(c.relowner) = current_user as is_own
    from to_regclass(:name) t (oid) left join pg_class c on c.oid = t.oid""")


def make(sides: Sides, relay: Relay, there: Mapping[str, Definition]) -> None:
    """Makes the relay's tables, and lets it follow the source from now on. Idempotent."""
    with relay.side.begin() as connection:
        if not is_ours(connection, _SCHEMA):
            install(connection, sides.name)
    for number, plan in enumerate(sides.plan.tables):
        if plan.name in there:
            _make_table(relay, number, plan, there[plan.name], sides.name)
    publish_tables(sides.source, relay.name, sides.names)
    conninfo = make_conninfo("", **sides.source.parameters())
    with relay.side.begin() as connection:
        subscribe(connection, relay.name, conninfo, "enabled = false")
    # Before the first slot of a copy is made.
    note_copy_slots(sides.source, relay)
    let_follow(relay, is_enabled=True)


def install(connection: Connection, adoption: str) -> None:
    """Make the schema ``shardids_relay``; the connection must not return to a pool.

    Raises:
        MissingPrivilege: another role has made it.
    """
    own_schema(connection, _SCHEMA)
    connection.execute(text("select set_config('shardids.adoption', :name, true)"), {"name": adoption})
    play(connection, read_sql("adopt/relay.v1"))


def subscribe(connection: Connection, name: str, conninfo: str, options: str) -> None:
    """Subscribes to the source.

    Raises:
        MissingPrivilege: another role made a subscription of this name.
    """
    keep_out_of_logs(connection)
    connection.execute(
        text("select shardids_relay.follow(:name, :conninfo, :options)"),
        {"name": name, "conninfo": conninfo, "options": options},
    )
    require_own_replication(connection, "subscription", name, is_node=False)


def _make_table(relay: Relay, number: int, plan: TablePlan, table: Definition, adoption: str) -> None:
    with relay.side.begin() as connection:
        found = connection.execute(_MARK, {"name": table.name}).one()
        if found.is_there and not (found.is_own and found.mark == adoption):
            raise AdoptionFailed(
                f"table {table.name} was made on the relay meanwhile",
                hint="shardids adopt abort; then drop it.",
            )
        if found.is_there:
            return
        schema = qualified(table.schema, "x").rpartition(".")[0]
        mark = "select format('comment on %s is %L', cast(:what as text), cast(:adoption as text))"
        is_there = text("select to_regnamespace(:name) is not null")
        if not connection.execute(is_there, {"name": schema}).scalar_one():
            connection.exec_driver_sql(f"create schema {schema}", execution_options=AS_IS)
            comment = connection.scalar(text(mark), {"what": f"schema {schema}", "adoption": adoption})
            connection.exec_driver_sql(comment or "", execution_options=AS_IS)
        connection.exec_driver_sql(create_table(number, plan, table), execution_options=AS_IS)
        comment = connection.scalar(text(mark), {"what": f"table {table.name}", "adoption": adoption})
        connection.exec_driver_sql(comment or "", execution_options=AS_IS)


def unmake(sides: Sides, relay: Relay, on_event: OnEvent) -> None:
    """Removes all from the relay, and the relay's publication and slots from the source. Idempotent."""
    with relay.side.begin() as connection:
        if is_ours(connection, _SCHEMA):
            connection.execute(text("select shardids_relay.unfollow(:name)"), {"name": relay.name})
    with relay.side.begin() as connection:
        if is_ours(connection, _SCHEMA):
            connection.execute(text("select shardids_relay.drop_tables()"))
            connection.exec_driver_sql("drop schema shardids_relay cascade")
    drop_copy_slots(sides.source, relay, on_event)
    unpublish(sides.source, relay.name)


def place_rows(sides: Sides, relay: Relay, there: Mapping[str, Definition]) -> None:
    """Gives all rows that have no key of their own their shards, now and from now on. Idempotent.

    The relay does not follow the source meanwhile: rows that one statement reads must not change under it.
    """
    let_follow(relay, is_enabled=False)
    _await_stopped(relay)
    numbers = {plan.name: number for number, plan in enumerate(sides.plan.tables)}
    with relay.side.autocommit() as connection:
        for name in sides.names:
            connection.exec_driver_sql(f"analyze {name}", execution_options=AS_IS)
    for plan in sides.derived:
        number, parent_number = numbers[plan.name], numbers[plan.path[0].table]
        with relay.side.begin() as connection:
            connection.execute(text("select set_config('statement_timeout', '0', true)"))
            for statement in (
                *fill(sides, plan, there),
                *index_paths(number, parent_number, plan, there),
                *triggers(number, plan, sides, there),
                f"analyze {plan.name}",
            ):
                connection.exec_driver_sql(statement, execution_options=AS_IS)
    let_follow(relay, is_enabled=True)


def _await_stopped(relay: Relay) -> None:
    """Waits until the workers of the subscription have ended, and their transactions with them."""
    deadline = time.monotonic() + _STOPS_WITHIN_S
    with relay.side.autocommit() as connection:
        while connection.scalar(
            text(
                "select exists (select from pg_stat_subscription where subname = :name and pid is not null)"
            ),
            {"name": relay.name},
        ):
            if time.monotonic() > deadline:
                raise AdoptionFailed(
                    f"the relay does not stop following the source within {_STOPS_WITHIN_S:.0f} s",
                    hint="Its log may say why. Then: shardids adopt resume, or shardids adopt abort.",
                )
            time.sleep(0.05)


def require_placed(sides: Sides, there: Mapping[str, Definition]) -> None:
    """Requires a shard of each row on the relay, as it is now: rows of unknown shard are on no node.

    Raises:
        AdoptionFailed: rows have none; the message names some.
    """
    if sides.relay is None or not sides.derived:
        return
    with sides.relay.side.autocommit() as connection:
        # One query in the usual case, since writes may be stopped.
        counts = " union all ".join(
            f"select {number} as number, count(*) from {plan.name} where {ROUTE} is null"  # noqa: S608 -- quoted
            for number, plan in enumerate(sides.derived)
        )
        for number, count in connection.exec_driver_sql(counts, execution_options=AS_IS).all():
            if count:
                plan = sides.derived[number]
                query = lost_keys(there[plan.name], f"{plan.name} where {ROUTE} is null")
                some = connection.exec_driver_sql(query, execution_options=AS_IS).scalars().all()
                raise lost_rows(some, plan, there[plan.name], count)


def lost_keys(table: Definition, rows: str) -> str:
    """Returns the query for some of the rows of a table that find no key; ``rows``: those, for FROM."""
    columns = ", ".join(qualified("x", name).partition(".")[2] for name in _identity(table))
    return f"select row({columns})::text as key from {rows} order by 1 limit {_NAMED}"  # noqa: S608 -- quoted


def _identity(table: Definition) -> Sequence[str]:
    return identity_of(table) or tuple(table.columns)


def lost_rows(some: Sequence[str], plan: TablePlan, table: Definition, count: int) -> AdoptionFailed:
    """Returns the error about rows of a table that find no key; ``some`` as :func:`lost_keys` finds them."""
    own = ", ".join(plan.path[0].columns)
    return AdoptionFailed(
        f"{count:,} rows of {plan.name} find no key by {own}, and so no shard:"
        f" ({', '.join(_identity(table))}) = {', '.join(some)}{', …' if count > _NAMED else ''}",
        hint="Give them one at the source, or delete them there; the nodes follow. Then: shardids adopt"
        " resume, or shardids adopt switch.",
    )
