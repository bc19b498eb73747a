"""The way back: after the switch the source follows the shards, by one subscription a node.

A node publishes the tables in which rows arrived, whose partitions the shards' tables still are: so changes
are sent under the source's names. Only the first node sends reference tables, which all nodes have. Nothing
is copied: a node's slot begins where it had all of the source and no client had written to its shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Kind, TablePlan
from shardids.adopt.plan.obstacles import ROUTE, identity_of
from shardids.adopt.run.following import (
    await_slot,
    create_subscription,
    drop_subscription,
    has_subscription,
    is_noted_source,
    note_source,
    source_timeline,
)
from shardids.adopt.run.sides import Sides, Taker
from shardids.pg.definitions import Definition, read_definitions
from shardids.pg.queries import AS_IS, quoted
from shardids.pg.schemas import require_no_slot, require_own_replication
from shardids.replication.barrier import with_locks
from shardids.replication.steps import OnEvent, Waiting
from shardids.replication.subscriptions import (
    count_failures,
    drop_slot,
    flush,
    has_publication,
    unpublish,
)

ANOTHER_SOURCE: Final = (
    "the source is another server than the one that followed the shards: a promoted standby, or a restored"
    " backup. It may lack changes that the other had confirmed"
)
_NO_CLIENTS: Final = (
    "table %s brings changes to the adopted database, and is not written to",
    "The shards' tables take writes: connect by the catalog.",
)


def back_name(taker: Taker) -> str:
    """Return the name of a node's publication and slot, and of the source's subscription to them."""
    return f"{taker.name}_back"


def _early_name(taker: Taker) -> str:
    """Return the name of the slot that is made before writes stop, since that may take long."""
    return f"{back_name(taker)}_early"


def logs_too_little(there: Definition, here: Definition) -> bool:
    """Return whether a shard's table logs less of a changed row than the source finds it by."""
    return here.identity is not None and not set(identity_of(there)) <= set(here.identity)


def prepare(sides: Sides, taker: Taker, there: Mapping[str, Definition], on_event: OnEvent) -> None:
    """Publish the changes of a node's shards, and keep its log for the source from now on. Idempotent."""
    name = back_name(taker)
    parts = {
        table.name: [sides.in_shard(there[table.name], shard) for shard in taker.shards]
        for table in sides.split
    }
    with taker.side.engine.connect() as connection:
        here = read_definitions(connection, chain.from_iterable(parts.values()))
    sent = [_sent(table, here[parts[table.name][0]]) for table in sides.split]
    if taker is sides.takers[0]:
        sent += [table.name for table in sides.reference]
    with sides.source.autocommit() as source:
        timeline = source_timeline(source)
    with taker.side.begin() as connection:
        if not has_publication(connection, name):
            require_no_slot(connection, name)
            connection.exec_driver_sql(
                f'create publication "{name}" for table {", ".join(sent)}'
                " with (publish = 'insert, update, delete', publish_via_partition_root = true)",
                execution_options=AS_IS,
            )
            note_source(connection, name, timeline)
        require_own_replication(connection, "publication", name)
    for table in sides.split:
        parent = table.name.replace(":", r"\:")
        _retry(taker, f"alter table only {parent} replica identity full", {}, on_event)
        _retry(
            taker, _CLOSE, {"name": table.name, "message": _NO_CLIENTS[0], "hint": _NO_CLIENTS[1]}, on_event
        )
        for part in parts[table.name]:
            # Of each by itself: one that an interrupted attempt has guarded logs whole rows already.
            logs_all = logs_too_little(there[table.name], here[part])
            _retry(taker, _GUARD, {"part": part, "all": logs_all}, on_event)
    for table in sides.reference:
        _retry(taker, _GUARD, {"part": table.name, "all": False}, on_event)
    _make_slot(taker, _early_name(taker), on_event)
    # In the place of that which begins at the switch: a server may have no room for one more by then.
    _make_slot(taker, back_name(taker), on_event)


def _sent(table: TablePlan, here: Definition) -> str:
    """Return a table with the columns that are published: not that which has brought its rows here."""
    if table.kind is not Kind.DERIVED:
        return table.name
    columns = (quoted(column.name) for column in here.stored if column.name != ROUTE)
    return f"{table.name} ({', '.join(columns)})"


def _retry(taker: Taker, statement: str, parameters: Mapping[str, object], on_event: OnEvent) -> None:
    with_locks(
        taker.side,
        statement,
        parameters,
        on_wait=lambda attempt: on_event(
            Waiting(attempt=attempt, reason=f'rows arrive on node "{taker.side.name}"')
        ),
    )


def _make_slot(taker: Taker, name: str, on_event: OnEvent) -> None:
    """Make a slot, or make it again if the node has given it up; it begins now."""
    with taker.side.autocommit() as connection:
        if connection.scalar(_IS_LOST, {"name": name}):
            connection.execute(text("select pg_drop_replication_slot(:name)"), {"name": name})
    await_slot(taker.side, name, f'node "{taker.side.name}"', on_event)


def advance(taker: Taker, on_event: OnEvent) -> None:
    """Let the early slot pass over all changes that a node has applied so far. Idempotent."""
    _make_slot(taker, _early_name(taker), on_event)
    with taker.side.autocommit() as connection:
        connection.execute(_ADVANCE, {"name": _early_name(taker), "position": flush(connection)})


def begin(taker: Taker, on_event: OnEvent) -> None:
    """Let the way back begin now: changes that a node has applied so far are not sent. Idempotent.

    Right only as long as no client can have written to the shards. A server that crashes forgets how far a
    slot was advanced, and not where one was made: the slot is a copy of the early one.
    """
    advance(taker, on_event)
    names = {"early": _early_name(taker), "name": back_name(taker)}
    with taker.side.autocommit() as connection:
        drop_slot(connection, taker.side, back_name(taker))
        connection.execute(text("select pg_copy_logical_replication_slot(:early, :name)"), names)


def follow_back(sides: Sides, taker: Taker) -> None:
    """Let the source follow a node. Idempotent.

    Call it when the node no longer follows the source: changes would go round and round.
    """
    with taker.side.autocommit() as connection:
        drop_slot(connection, taker.side, _early_name(taker))
    with sides.source.autocommit() as source:
        if has_subscription(source, back_name(taker)):
            require_own_replication(source, "subscription", back_name(taker), is_node=False)
            return
    with sides.source.begin() as source:
        create_subscription(source, back_name(taker), taker.side, "copy_data = false")


def unfollow(sides: Sides, taker: Taker) -> None:
    """Drop the source's subscription to a node. Idempotent; the node need not answer."""
    drop_subscription(sides.source, back_name(taker))


def dismantle(taker: Taker) -> None:
    """Drop what sends a node's changes: slot, publication, and what guards the tables. Idempotent."""
    unpublish(taker.side, back_name(taker))
    with taker.side.autocommit() as connection:
        drop_slot(connection, taker.side, _early_name(taker))
        parts = connection.scalars(text("select name::text from shardids.guarded() name")).all()
    for part in parts:
        with_locks(taker.side, "select shardids.unguard_part(cast(:part as regclass))", {"part": part})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """How a node's changes come back to the source.

    Attributes:
        lag_bytes: the part of the node's log that the source has not confirmed; ``None`` if the slot is gone.
        is_same_source: the source is the server that has confirmed changes; otherwise it may lack some.
        is_applying: the source is connected, and takes changes in.
        failures: how often the source has failed to take a change in, since the way back began.
    """

    lag_bytes: int | None
    is_same_source: bool
    is_applying: bool
    failures: int

    @property
    def is_lost(self) -> bool:
        """Returns whether the way back from the node is gone."""
        return self.lag_bytes is None or not self.is_same_source

    @property
    def is_stopped(self) -> bool:
        """Returns whether changes do not come back; the source tries again every few seconds."""
        return not self.is_applying

    def told(self) -> str:
        """Return it in words."""
        if self.lag_bytes is None:
            return "lost: the node no longer keeps its log for the source"
        if not self.is_same_source:
            return f"lost: {ANOTHER_SOURCE}"
        behind = f"{self.lag_bytes:,} bytes behind"
        if self.is_applying:
            return behind
        failed = f"; it has failed {self.failures} times" if self.failures else ""
        return f"stopped, {behind}{failed}"


def kept_bytes(sides: Sides) -> dict[str, int]:
    """Return how much of its log each node keeps for the way back, of those that keep any."""
    found = {}
    for taker in sides.takers:
        names = {"names": [back_name(taker), _early_name(taker)]}
        with taker.side.autocommit() as node:
            kept = node.scalar(_KEPT, names)
        if kept is not None:
            found[taker.side.name] = int(kept)
    return found


def states(sides: Sides) -> dict[str, NodeBack]:
    """Return how the way back is, by node.

    Raises:
        ConnectionFailed: the source or a node does not answer.
    """
    with sides.source.autocommit() as source:
        return {taker.side.name: _state(taker, source) for taker in sides.takers}


def states_without_source(sides: Sides) -> dict[str, NodeBack]:
    """Return how the way back is, by node, as far as the nodes know: the source does not answer.

    Raises:
        ConnectionFailed: a node does not answer.
    """
    return {taker.side.name: _state(taker, None) for taker in sides.takers}


def _state(taker: Taker, source: Connection | None) -> NodeBack:
    name = {"name": back_name(taker)}
    with taker.side.autocommit() as node:
        slot = node.execute(_SLOT, name).one_or_none()
        is_same = source is None or is_noted_source(node, back_name(taker), source_timeline(source))
    return NodeBack(
        lag_bytes=None if slot is None or slot.is_lost else slot.lag_bytes,
        is_same_source=is_same,
        is_applying=source is not None
        and bool(source.scalar(_IS_APPLYING, name))
        and slot is not None
        and slot.active,
        failures=0 if source is None else count_failures(source, back_name(taker)),
    )


_GUARD = "select shardids.guard_part(cast(:part as regclass), :all)"
_CLOSE = "select shardids.close_back(cast(:name as regclass), :message, :hint)"
_IS_LOST = text("select wal_status = 'lost' from pg_replication_slots where slot_name = :name")
_ADVANCE = text("select pg_replication_slot_advance(:name, cast(:position as pg_lsn))")
_IS_APPLYING = text("select bool_or(pid is not null) from pg_stat_subscription where subname = :name")
_KEPT = text("""
    select max(pg_current_wal_lsn() - restart_lsn)::bigint from pg_replication_slots
    where slot_name = any(:names)""")
_SLOT = text("""
    select active, coalesce(wal_status = 'lost', false) as is_lost,
           greatest(pg_current_wal_lsn() - confirmed_flush_lsn, 0)::bigint as lag_bytes
    from pg_replication_slots where slot_name = :name""")
