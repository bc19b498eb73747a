"""A relay: a database that follows the source, gives rows their shards, and that the nodes follow.

The relay subscribes to the source without filters, so that its tables have all rows. Then it stops for a
moment, in which rows that hold no key get their shards, and goes on with triggers that keep these
right. Only then is anything published to the nodes: a row of which the shard is not known is on none.

A row of a derived table has the shard of the row that it refers to, as both are on the relay at that moment.
One trigger computes it when the row is written; another, on the table that is referred to, computes it again
when that row comes later, goes, or finds another shard. They fire for the apply worker only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Hop, Kind, TablePlan
from shardids.adopt.plan.obstacles import ROUTE, base_type, identity_of
from shardids.adopt.run.following import (
    add_tables,
    await_copy,
    create_subscription,
    drop_subscription,
    has_subscription,
    let_follow,
    publish_tables,
)
from shardids.adopt.run.sides import Relay, Sides
from shardids.adopt.run.slots import drop_copy_slots, note_copy_slots
from shardids.adopt.run.sparing import Sparing
from shardids.errors import AdoptionFailed
from shardids.pg.definitions import Column, Definition
from shardids.pg.queries import AS_IS, comment_on, quoted
from shardids.pg.schemas import is_ours, own_schema, require_own_replication
from shardids.pg.sqlfiles import read_sql
from shardids.replication.steps import OnEvent
from shardids.replication.subscriptions import play, unpublish

_KEPT: Final = frozenset(
    {
        "boolean",
        "smallint",
        "integer",
        "bigint",
        "real",
        "double precision",
        "numeric",
        "uuid",
        "date",
        "timestamp without time zone",
        "timestamp with time zone",
        "text",
        "character varying",
        "bytea",
        "jsonb",
    }
)
"""Types that a relay also has. It stores values of any other, such as an enum, as text."""


def relay_type(column: Column) -> str:
    """Return the type that a column has on the relay."""
    return column.type if column.labels is None and base_type(column.type) in _KEPT else "text"


def create_table(number: int, plan: TablePlan, table: Definition) -> str:
    """Return the statements that make a table; ``number`` is its place in the plan."""
    columns = [f"{quoted(column.name)} {relay_type(column)}" for column in table.stored]
    if plan.kind is Kind.DERIVED:
        columns.append(f"{ROUTE} integer")
    columns.append(_key(number, table))
    return "; ".join(
        (
            f"create table {table.name} ({', '.join(columns)})",
            f"alter table {table.name} replica identity full",
            # A node refuses a TRUNCATE that leaves out a table which refers to this one there.
            *_trigger(table.name, "empty", "before truncate", "", "empty", each="statement"),
        )
    )


def _key(number: int, table: Definition) -> str:
    return f"constraint {_index(number, 'identity')} primary key ({_list(identity_of(table))})"


def fill(sides: Sides, number: int, plan: TablePlan, there: Mapping[str, Definition]) -> Iterator[str]:
    """Yield the statements that compute the shards of all rows of a derived table, parents' being right.

    Nothing is published yet, and nobody looks for rows: old rows are not logged, and the key comes after.
    """
    hop = plan.path[0]
    yield f"alter table {plan.name} drop constraint {_index(number, 'identity')}, replica identity nothing"
    yield (
        f"update {plan.name} c set {ROUTE} = {home_of_parent(sides, plan, there, 'p.')}"  # noqa: S608 -- quoted
        f" from {hop.table} p where {_joined(hop, 'p', 'c')}"
    )
    yield f"alter table {plan.name} add {_key(number, there[plan.name])}, replica identity full"


def home_of_parent(sides: Sides, plan: TablePlan, there: Mapping[str, Definition], of: str) -> str:
    """Return an expression for the shard of the row that one of a derived table refers to, on the relay."""
    if len(plan.path) > 1:
        return f"{of}{ROUTE}"
    parent = next(table for table in sides.split if table.name == plan.path[0].table)
    return sides.shard_of_key(parent, there[parent.name], of=of)


def index_paths(
    number: int, parent_number: int, plan: TablePlan, there: Mapping[str, Definition]
) -> Iterator[str]:
    """Yield the statements that index the way from derived rows to their targets, and back."""
    hop = plan.path[0]
    make = "create index if not exists"
    yield f"{make} {_index(number, 'path')} on {plan.name} ({_list(hop.columns)})"
    yield f"{make} {_index(number, 'lost')} on {plan.name} ({_list(hop.columns)}) where {ROUTE} is null"
    parent = there[hop.table]
    if tuple(identity_of(parent)) != hop.referenced:
        yield f"{make} {_index(number, f'of_{parent_number}')} on {hop.table} ({_list(hop.referenced)})"


def triggers(number: int, plan: TablePlan, sides: Sides, there: Mapping[str, Definition]) -> Iterator[str]:
    """Yield the statements that make the triggers of a derived table and of the one that it refers to."""
    hop = plan.path[0]
    place, pass_on = f"place_{number}", f"pass_on_{number}"
    yield _function(
        place,
        f"select {home_of_parent(sides, plan, there, 'p.')} into new.{ROUTE} from {hop.table} p"  # noqa: S608 -- quoted
        f" where {_joined(hop, 'p', 'new')}; return new;",
    )
    again = f"update {plan.name} c set {ROUTE} = null where"  # noqa: S608 -- quoted
    old, new = (_joined(hop, row, "c") for row in ("old", "new"))
    yield _function(
        pass_on,
        f"if tg_op = 'INSERT' then {again} {new} and c.{ROUTE} is null; else {again} {old};"
        f" if tg_op = 'UPDATE' and {_differ(hop.referenced)} then {again} {new}; end if;"
        " end if; return null;",
    )
    # An update of the apply worker leaves the shard as it was; those of the other trigger have it computed.
    moved = f"{_differ(hop.columns)} or pg_trigger_depth() > 0"
    yield from _trigger(plan.name, f"{place}_new", "before insert", "", place)
    yield from _trigger(plan.name, f"{place}_moved", "before update", moved, place)
    home = (ROUTE,) if len(plan.path) > 1 else (plan.key or "",)
    yield from _trigger(hop.table, f"{pass_on}_new", "after insert or delete", "", pass_on)
    yield from _trigger(
        hop.table, f"{pass_on}_moved", "after update", _differ((*hop.referenced, *home)), pass_on
    )


def _function(name: str, body: str) -> str:
    return (
        f"create or replace function shardids_relay.{name}() returns trigger language plpgsql"
        f" set search_path = pg_catalog, pg_temp as {_literal(f'begin {body} end')};"
        f" revoke execute on function shardids_relay.{name}() from public"
    )


def _trigger(
    table: str, name: str, when: str, condition: str, function: str, *, each: str = "row"
) -> Iterator[str]:
    only = f"when ({condition}) " if condition else ""
    yield (
        f"create or replace trigger shardids_{name} {when} on {table}"
        f" for each {each} {only}execute function shardids_relay.{function}()"
    )
    yield f"alter table {table} enable replica trigger shardids_{name}"


def _joined(hop: Hop, parent: str, child: str) -> str:
    return " and ".join(
        f"{parent}.{quoted(theirs)} = {child}.{quoted(own)}"
        for own, theirs in zip(hop.columns, hop.referenced, strict=True)
    )


def _differ(columns: Sequence[str]) -> str:
    return "({})".format(
        " or ".join(f"old.{quoted(name)} is distinct from new.{quoted(name)}" for name in columns)
    )


def _index(number: int, what: str) -> str:
    return f"shardids_{number}_{what}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


def _literal(value: str) -> str:
    return sql.Literal(value).as_string()


_STOPS_WITHIN_S = 30.0
_NAMED = 5
_SCHEMA = "shardids_relay"
_MARK = text("""
    select t.oid is not null as is_there, obj_description(t.oid, 'pg_class') as mark,
           pg_get_userbyid(c.relowner) = current_user as is_own
    from to_regclass(:name) t (oid) left join pg_class c on c.oid = t.oid""")


def make(sides: Sides, there: Mapping[str, Definition], on_event: OnEvent) -> None:
    """Make the relay's tables, and a subscription that brings no rows yet. Idempotent."""
    relay = sides.relay
    with relay.side.begin() as connection:
        if not is_ours(connection, _SCHEMA):
            install(connection, sides.name)
    for number, plan in enumerate(sides.plan.tables):
        if plan.name in there:
            _make_table(relay, number, plan, there[plan.name], sides.name)
    publish_tables(sides.source, relay.name, [], on_event=on_event)
    with relay.side.begin() as connection:
        if not has_subscription(connection, relay.name):
            create_subscription(connection, relay.name, sides.source, "enabled = false")
        require_own_replication(connection, "subscription", relay.name, is_node=False)
    # Before the first slot of a copy is made.
    note_copy_slots(sides.source, relay)
    let_follow(relay, is_enabled=True)


def copy(sides: Sides, there: Mapping[str, Definition], sparing: Sparing) -> None:
    """Let the relay fetch all rows, and all changes since: one table after the other where a limit says so.

    The source's server sends a table as fast as it can. Between two tables the copy waits until their rate
    and the source's answers allow the next. Idempotent.
    """
    for names in [[name] for name in sides.names] if sparing.limits.paces else [sides.names]:
        started = time.monotonic()
        is_new = add_tables(sides.source, sides.relay, names, sparing)
        await_copy(sides, sides.source, [sides.relay], sparing)
        if is_new and sparing.limits.paces:
            with sides.source.autocommit() as source:
                size = source.scalar(_SIZE, {"parts": [part for name in names for part in there[name].parts]})
            sparing.rest(int(size or 0), time.monotonic() - started)


_SIZE = text("""
    select sum(pg_table_size(part)) from unnest(cast(:parts as regclass[])) part""")


def install(connection: Connection, adoption: str) -> None:
    """Make the schema ``shardids_relay``; the connection must not return to a pool.

    Raises:
        MissingPrivilege: another role has made it.
    """
    own_schema(connection, _SCHEMA)
    connection.execute(text("select set_config('shardids.adoption', :name, true)"), {"name": adoption})
    play(connection, read_sql("adopt/relay.v1"))


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
        schema = quoted(table.schema)
        is_there = text("select to_regnamespace(:name) is not null")
        if not connection.execute(is_there, {"name": schema}).scalar_one():
            connection.exec_driver_sql(f"create schema {schema}", execution_options=AS_IS)
            comment_on(connection, "schema", table.schema, adoption)
        connection.exec_driver_sql(create_table(number, plan, table), execution_options=AS_IS)
        comment_on(connection, "table", sql.Identifier(table.schema, table.table), adoption)


def unmake(sides: Sides) -> None:
    """Remove all from the relay. Idempotent."""
    relay = sides.relay
    drop_subscription(relay.side, relay.name)
    with relay.side.begin() as connection:
        if is_ours(connection, _SCHEMA):
            connection.execute(text("select shardids_relay.drop_tables()"))
            connection.exec_driver_sql("drop schema shardids_relay cascade")


def leave_source(sides: Sides, on_event: OnEvent) -> None:
    """Remove the relay's publication and slots from the source, once the relay is unmade. Idempotent."""
    drop_copy_slots(sides.source, sides.relay_name, on_event)
    unpublish(sides.source, sides.relay_name)


def place_rows(sides: Sides, there: Mapping[str, Definition]) -> None:
    """Give all rows without a key their shards, now and from now on. Idempotent.

    The relay does not follow the source meanwhile: rows that one statement reads must not change under it. A
    table gets its shards and its triggers in one transaction.
    """
    relay = sides.relay
    let_follow(relay, is_enabled=False)
    _await_stopped(relay)
    numbers = {plan.name: number for number, plan in enumerate(sides.plan.tables)}
    with relay.side.autocommit() as connection:
        for name in sides.names:
            connection.exec_driver_sql(f"analyze {name}", execution_options=AS_IS)
    for plan in sides.derived:
        number, parent_number = numbers[plan.name], numbers[plan.path[0].table]
        with relay.side.begin() as connection:
            if connection.scalar(_IS_PLACED, {"name": plan.name, "trigger": f"shardids_place_{number}_new"}):
                continue
            connection.execute(_LIMITS)
            for statement in (
                *fill(sides, number, plan, there),
                *index_paths(number, parent_number, plan, there),
                *triggers(number, plan, sides, there),
                f"analyze {plan.name}",
            ):
                connection.exec_driver_sql(statement, execution_options=AS_IS)
    let_follow(relay, is_enabled=True)


_IS_PLACED: Final = text("""
    select exists (select from pg_trigger t where t.tgrelid = to_regclass(:name) and t.tgname = :trigger)""")
_LIMITS: Final = text("""
    select set_config('statement_timeout', '0', true), set_config('work_mem', '256MB', true),
           set_config('maintenance_work_mem', '256MB', true)""")


def _await_stopped(relay: Relay) -> None:
    """Wait until the workers of the subscription have ended, and their transactions with them."""
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
                    hint="Its log may say why. Then: shardids adopt run --resume, or shardids adopt abort.",
                )
            time.sleep(0.05)


def require_placed(sides: Sides, there: Mapping[str, Definition]) -> None:
    """Require a shard of each row on the relay, as it is now: rows of unknown shard are on no node.

    Raises:
        AdoptionFailed: rows have none; the message names some.
    """
    if not sides.derived:
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
    """Return the query for some of the rows of a table that find no key; ``rows``: those, for FROM."""
    columns = _list(identity_of(table))
    return f"select row({columns})::text as key from {rows} order by 1 limit {_NAMED}"  # noqa: S608 -- quoted


def lost_rows(some: Sequence[str], plan: TablePlan, table: Definition, count: int) -> AdoptionFailed:
    """Return the error about rows of a table that find no key; ``some`` as :func:`lost_keys` finds them."""
    own = ", ".join(plan.path[0].columns)
    return AdoptionFailed(
        f"{count:,} rows of {plan.name} find no key by {own}, and so no shard:"
        f" ({', '.join(identity_of(table))}) = {', '.join(some)}{', …' if count > _NAMED else ''}",
        hint="Give them one at the source, or delete them there; the nodes follow. Then: shardids adopt"
        " run --resume, or shardids adopt switch.",
    )
