"""Brings rows from the source to the nodes: publications with filters, and a subscription a node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.definitions import Definition
from shardids.adopt.events import Copying, OnEvent
from shardids.adopt.sides import Relay, Sides, Taker
from shardids.catalog.connections import keep_out_of_logs
from shardids.catalog.schemas import require_no_slot, require_own_replication
from shardids.errors import AdoptionFailed
from shardids.mover.cutover import flush
from shardids.mover.replication import PATIENCE_S, count_failures, has_publication, make_slot, play
from shardids.mover.sides import Side

_OWN = (
    "s.subname = :name and s.subdbid = (select d.oid from pg_database d where d.datname = current_database())"
)
_POLL_S = 0.1
_QUICK_POLL_S = 0.003
_FAILURES_TOLERATED = 3
"""Each worker may report one from before a resume."""


Follower = Taker | Relay
"""What subscribes to a publication; both have its name."""


def publish(sides: Sides, taker: Taker, there: Mapping[str, Definition]) -> None:
    """Publishes the rows of a node's shards where it fetches them, from now on. Idempotent."""
    tables = [
        f"{table.name} where ({sides.row_filter(table, there[table.name], taker)})" for table in sides.split
    ]
    tables += [table.name for table in sides.reference]
    publish_tables(sides.feed, taker.name, tables)


def publish_tables(side: Side, name: str, tables: Sequence[str]) -> None:
    """Publishes tables, each with its row filter, if any, and keeps the log from now on. Idempotent.

    Raises:
        MissingPrivilege, ClusterConflict: another role made a publication or a slot of this name.
    """
    with side.begin() as connection:
        if not has_publication(connection, name):
            require_no_slot(connection, name)
            play(
                connection,
                f'create publication "{name}" for table {", ".join(tables)}'
                " with (publish_via_partition_root = true)",
            )
        require_own_replication(connection, "publication", name, is_node=False)
    with side.autocommit() as connection:
        make_slot(connection, name)


def subscribe(sides: Sides, taker: Taker) -> None:
    """Subscribes a node: it fetches the existing rows of its shards, and all changes since. Idempotent.

    Raises:
        MissingPrivilege: another role made a subscription of this name.
    """
    conninfo = make_conninfo("", **sides.feed.parameters())
    with taker.side.begin() as connection:
        keep_out_of_logs(connection)
        connection.execute(
            text("select shardids.follow(:name, :conninfo)"), {"name": taker.name, "conninfo": conninfo}
        )
        require_own_replication(connection, "subscription", taker.name)


def let_follow(follower: Follower, *, is_enabled: bool) -> None:
    """Lets a node or the relay apply changes, or stops it; what it follows keeps its log meanwhile."""
    with follower.side.autocommit() as connection:
        found = connection.execute(
            text(f"select s.subenabled from pg_subscription s where {_OWN}"),  # noqa: S608 -- a constant
            {"name": follower.name},
        ).scalar_one_or_none()
        if found is not None and found != is_enabled:
            connection.exec_driver_sql(
                f'alter subscription "{follower.name}" {"enable" if is_enabled else "disable"}'
            )


_COPIED = text(f"""
    select count(*) filter (where sr.srsubstate not in ('r', 's')) as tables_left,
           (select coalesce(sum(p.tuples_processed), 0)::bigint from pg_stat_progress_copy p
            where p.relid = any (array_agg(sr.srrelid))) as rows
    from pg_subscription s join pg_subscription_rel sr on sr.srsubid = s.oid
    where {_OWN}""")  # noqa: S608 -- a constant


def await_copy(sides: Sides, publisher: Side, followers: Sequence[Follower], on_event: OnEvent) -> None:
    """Waits until each follower has the rows of each table, as they were when that table was copied.

    Raises:
        AdoptionFailed: workers keep failing, no rows arrive for a long time, or a slot is lost.
    """
    total = sum(table.rows for table in (*sides.split, *sides.reference))
    started, seen, changed = time.monotonic(), (sys.maxsize, -1), time.monotonic()
    with ExitStack() as kept:
        nodes = [(taker, kept.enter_context(taker.side.autocommit())) for taker in followers]
        source = kept.enter_context(publisher.autocommit())
        before = {taker.name: count_failures(node, taker.name) for taker, node in nodes}
        while True:
            states = [node.execute(_COPIED, {"name": taker.name}).one() for taker, node in nodes]
            now = (sum(state.tables_left for state in states), sum(state.rows or 0 for state in states))
            if now[0] == 0:
                return
            for taker, node in nodes:
                if count_failures(node, taker.name) - before[taker.name] > _FAILURES_TOLERATED:
                    raise AdoptionFailed(
                        f"{_named(taker)} failed repeatedly to take rows in; its log says why",
                        hint="Remove the reason, then shardids adopt resume; or shardids adopt abort.",
                    )
            require_slots(source, publisher, followers)
            if now[0] < seen[0] or now[1] > seen[1]:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed > PATIENCE_S:
                raise AdoptionFailed(
                    f"no more rows have come for {PATIENCE_S:.0f} s, and {now[0]} tables are not copied",
                    hint="The nodes' logs may say why. Then: shardids adopt resume, or shardids adopt abort.",
                )
            on_event(Copying(tables_left=now[0], rows_done=now[1], rows_total=total))
            time.sleep(min(_POLL_S, (time.monotonic() - started) / 50 + 0.005))


def _named(follower: Follower) -> str:
    return "the relay" if isinstance(follower, Relay) else f'node "{follower.side.name}"'


def require_slots(source: Connection, publisher: Side, followers: Sequence[Follower]) -> None:
    """Requires the slots: a promoted standby lacks them, and the followers would wait for ever.

    Raises:
        AdoptionFailed: one is missing, or the server has given it up.
    """
    rows = source.execute(
        text("select slot_name::text, wal_status from pg_replication_slots where slot_name = any(:names)"),
        {"names": [taker.name for taker in followers]},
    )
    found = {row.slot_name: row.wal_status for row in rows}
    for taker in followers:
        if found.get(taker.name, "lost") == "lost":
            raise AdoptionFailed(
                f'the {publisher.name} has no replication slot "{taker.name}" any more, or has given it up',
                hint="shardids adopt abort; see max_slot_wal_keep_size there; then start it again.",
            )


_LAG = text("""
    select max(greatest(cast(:wanted as pg_lsn) - confirmed_flush_lsn, 0))::bigint as bytes, count(*) as slots
    from pg_replication_slots where slot_name = any(:names) and wal_status is distinct from 'lost'""")


class _Hop:
    """A server's log on the way to its followers. Connections are opened beforehand."""

    def __init__(self, publisher: Side, followers: Sequence[Follower], kept: ExitStack) -> None:
        self._side, self._followers = publisher, followers
        self._names = [follower.name for follower in followers]
        self._publisher = kept.enter_context(publisher.autocommit())
        self._theirs = [kept.enter_context(follower.side.autocommit()) for follower in followers]
        for connection in (self._publisher, *self._theirs):
            flush(connection)

    def position(self) -> str:
        return flush(self._publisher)

    def lag_bytes(self) -> int:
        return max((one.lag_bytes or 0 for one in slots(self._side, self._followers)), default=0)

    def confirmed(self, wanted: str, deadline: float, on_lag: Callable[[int], None]) -> bool:
        while True:
            # Followers confirm only what they have flushed.
            for connection in self._theirs:
                flush(connection)
            lag = self._publisher.execute(_LAG, {"wanted": wanted, "names": self._names}).one()
            if lag.slots != len(self._names):
                require_slots(self._publisher, self._side, self._followers)
            if lag.bytes == 0:
                return True
            on_lag(lag.bytes)
            if time.monotonic() > deadline:
                return False
            # New log wakes the senders, which ask the followers for their positions.
            flush(self._publisher)
            time.sleep(_QUICK_POLL_S)


class Drain:
    """Waits until all nodes have on disk what the source has written. Connections are opened beforehand."""

    def __init__(self, sides: Sides, kept: ExitStack) -> None:
        self.source = sides.source
        self._hops = [_Hop(sides.feed, sides.takers, kept)]
        if sides.relay:
            self._hops.insert(0, _Hop(sides.source, [sides.relay], kept))

    def position(self) -> str:
        """Returns a position in the source's log past everything written so far, flushed or not."""
        return self._hops[0].position()

    def confirmed(self, wanted: str, *, seconds: float, on_lag: Callable[[int], None]) -> bool:
        """Waits until every node has confirmed the source's position; false if time runs out.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        deadline = time.monotonic() + seconds
        *earlier, last = self._hops
        for hop in earlier:
            if not hop.confirmed(wanted, deadline, lambda lag: on_lag(lag + last.lag_bytes())):
                return False
            # What a relay has confirmed is in its own log, before the position that it is at afterwards.
            wanted = last.position()
        return last.confirmed(wanted, deadline, on_lag)


def await_confirmed(sides: Sides, on_lag: Callable[[int], None], *, within_s: float | None = None) -> None:
    """Waits until the nodes have all that the source has written up to now, however long it takes.

    With ``within_s``, until they have it within so many seconds of its writing: close enough for a switch.

    Raises:
        AdoptionFailed: they don't get closer for a long time.
    """
    least, changed = sys.maxsize, time.monotonic()

    def watch(lag_bytes: int) -> None:
        nonlocal least, changed
        on_lag(lag_bytes)
        if lag_bytes < least:
            least, changed = lag_bytes, time.monotonic()

    with ExitStack() as kept:
        drain = Drain(sides, kept)
        wanted = drain.position()
        while not drain.confirmed(wanted, seconds=within_s or 1.0, on_lag=watch):
            if time.monotonic() - changed > PATIENCE_S:
                raise AdoptionFailed(
                    f"the nodes stay {least} bytes behind the source; their logs may say why",
                    hint="shardids adopt resume when they have caught up, or shardids adopt abort.",
                )
            if within_s is not None:
                wanted = drain.position()


def lags(sides: Sides) -> dict[str, int | None]:
    """Returns how many bytes of log each node has not confirmed; ``None`` without a slot in use."""
    found = {one.name: one.lag_bytes for one in slots(sides.feed, sides.takers)}
    return {taker.side.name: found.get(taker.name) for taker in sides.takers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot: how much of the log is not confirmed, and how much the server keeps for it."""

    name: str
    lag_bytes: int | None
    kept_bytes: int | None


def slots(publisher: Side, followers: Sequence[Follower]) -> list[Slot]:
    """Returns the slots of followers that a server has."""
    with publisher.autocommit() as connection:
        rows = connection.execute(
            text("""
                select slot_name::text as name,
                       case when wal_status is distinct from 'lost'
                            then (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint end as lag_bytes,
                       (pg_current_wal_lsn() - restart_lsn)::bigint as kept_bytes
                from pg_replication_slots where slot_name = any(:names)"""),
            {"names": [follower.name for follower in followers]},
        )
        return [Slot(**row._asdict()) for row in rows]
