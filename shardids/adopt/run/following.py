"""Brings rows from the source to the nodes: publications with filters, and one subscription per node.

A subscription has the timeline of its server as comment, which a promotion changes: a standby may lack what
the server before it had confirmed, and the source sends that to nobody again. On the way back the source is
such a server. A node keeps its timeline, as comment of the publication.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.run.sides import Relay, Sides, Taker
from shardids.errors import AdoptionFailed
from shardids.pg.connections import keep_out_of_logs
from shardids.pg.definitions import Definition
from shardids.pg.queries import comment_on
from shardids.pg.schemas import require_no_slot, require_own_replication
from shardids.replication.sides import Side
from shardids.replication.steps import Event, OnEvent
from shardids.replication.subscriptions import (
    PATIENCE_S,
    count_failures,
    flush,
    has_publication,
    make_slot,
    play,
)

_OWN = (
    "s.subname = :name and s.subdbid = (select d.oid from pg_database d where d.datname = current_database())"
)
_POLL_S = 0.1
_QUICK_POLL_S = 0.003
_FAILURES_TOLERATED = 3
"""Each worker may report one from before a resume."""


Follower = Taker | Relay
"""What subscribes to a publication; both have its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Event):
    """Progress of the copy: tables that are not copied yet, counted once per node, and rows that arrived."""

    tables_left: int
    rows_done: int
    rows_total: int


def publish(sides: Sides, taker: Taker, there: Mapping[str, Definition]) -> None:
    """Publish the rows of a node's shards where it fetches them, from now on. Idempotent."""
    tables = [
        f"{table.name} where ({sides.row_filter(table, there[table.name], taker)})" for table in sides.split
    ]
    tables += [table.name for table in sides.reference]
    publish_tables(sides.feed, taker.name, tables)


def publish_tables(side: Side, name: str, tables: Sequence[str]) -> None:
    """Publish tables, each with its row filter, if any, and keep the log from now on. Idempotent.

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
    """Subscribe a node: it fetches the existing rows of its shards, and all changes since. Idempotent.

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
    """Let a node or the relay apply changes, or stop it; its publisher keeps the log meanwhile."""
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
    """Wait until each follower has the rows of each table, as they were when that table was copied.

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
                        hint="Remove the reason, then shardids adopt run --resume; or shardids adopt abort.",
                    )
            require_slots(source, publisher, followers)
            if now[0] < seen[0] or now[1] > seen[1]:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed > PATIENCE_S:
                raise AdoptionFailed(
                    f"no more rows have come for {PATIENCE_S:.0f} s, and {now[0]} tables are not copied",
                    hint="The nodes' logs may say why. Then: shardids adopt run --resume, or adopt abort.",
                )
            on_event(Copying(tables_left=now[0], rows_done=now[1], rows_total=total))
            time.sleep(min(_POLL_S, (time.monotonic() - started) / 50 + 0.005))


def _named(follower: Follower) -> str:
    return "the relay" if isinstance(follower, Relay) else f'node "{follower.side.name}"'


def require_slots(source: Connection, publisher: Side, followers: Sequence[Follower]) -> None:
    """Require the slots: a promoted standby lacks them, and the followers would wait for ever.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A server's slot for another, which follows it."""

    publisher: Side
    slot: str
    follower: Side


class Hop:
    """Logs of servers on the way to those that follow them. Connections are opened beforehand.

    Args:
        links: the slots.
        require: raises AdoptionFailed if slots of a server are gone; called when some may be.
    """

    def __init__(
        self, links: Sequence[Link], kept: ExitStack, require: Callable[[Side, Connection], None]
    ) -> None:
        self._slots: dict[Side, list[str]] = defaultdict(list)
        for link in links:
            self._slots[link.publisher].append(link.slot)
        self._followers = list(dict.fromkeys(link.follower for link in links))
        self._require = require
        self.connections = {
            side: kept.enter_context(side.autocommit()) for side in (*self._slots, *self._followers)
        }
        for connection in self.connections.values():
            flush(connection)

    def positions(self) -> dict[Side, str]:
        """Return positions in the servers' logs past everything written so far, flushed or not."""
        return {side: flush(self.connections[side]) for side in self._slots}

    def lag_bytes(self, wanted: Mapping[Side, str]) -> int:
        """Return how far the farthest behind has not confirmed the positions.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        found = []
        for side, names in self._slots.items():
            lag = self.connections[side].execute(_LAG, {"wanted": wanted[side], "names": names}).one()
            if lag.slots != len(names):
                self._require(side, self.connections[side])
            found.append(lag.bytes or 0)
        return max(found)

    def confirmed(
        self, wanted: Mapping[Side, str], *, deadline: float, on_lag: Callable[[int], None]
    ) -> bool:
        """Wait until the positions are confirmed; false if time runs out. Raises as :meth:`lag_bytes`."""
        while True:
            # Followers confirm only what they have flushed.
            for side in self._followers:
                flush(self.connections[side])
            if (lag_bytes := self.lag_bytes(wanted)) == 0:
                return True
            on_lag(lag_bytes)
            if time.monotonic() > deadline:
                return False
            # New log wakes the senders, which ask the followers for their positions.
            self.positions()
            time.sleep(_QUICK_POLL_S)


class Drain:
    """Waits until all nodes have the source's writes on disk. Connections are opened beforehand."""

    def __init__(self, sides: Sides, kept: ExitStack) -> None:
        self.source = sides.source
        self._last = _hop(sides.feed, sides.takers, kept)
        self._first = _hop(sides.source, [sides.relay], kept) if sides.relay else None

    def position(self) -> dict[Side, str]:
        """Return a position in the source's log past everything written so far, flushed or not."""
        return (self._first or self._last).positions()

    def confirmed(self, wanted: Mapping[Side, str], *, seconds: float, on_lag: Callable[[int], None]) -> bool:
        """Wait until every node has confirmed the source's position; false if time runs out.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        deadline, last = time.monotonic() + seconds, self._last
        if self._first:

            def on_both(lag_bytes: int) -> None:
                on_lag(lag_bytes + last.lag_bytes(last.positions()))

            if not self._first.confirmed(wanted, deadline=deadline, on_lag=on_both):
                return False
            # What a relay has confirmed is in its own log, before the position that it is at afterwards.
            wanted = last.positions()
        return last.confirmed(wanted, deadline=deadline, on_lag=on_lag)


def _hop(publisher: Side, followers: Sequence[Follower], kept: ExitStack) -> Hop:
    links = [Link(publisher=publisher, slot=one.name, follower=one.side) for one in followers]
    return Hop(links, kept, lambda side, connection: require_slots(connection, side, followers))


class Nearing:
    """Receives lags, passes them on, and watches whether they get smaller."""

    def __init__(self, on_lag: Callable[[int], None]) -> None:
        self._on_lag = on_lag
        self._least, self._changed = sys.maxsize, time.monotonic()

    def __call__(self, lag_bytes: int) -> None:
        """Receive a lag."""
        self._on_lag(lag_bytes)
        if lag_bytes < self._least:
            self._least, self._changed = lag_bytes, time.monotonic()

    def require(self, who: str, whom: str, hint: str) -> None:
        """Require that a lag got smaller not long ago.

        Raises:
            AdoptionFailed: it has not.
        """
        if time.monotonic() - self._changed > PATIENCE_S:
            raise AdoptionFailed(
                f"{who} stay {self._least} bytes behind {whom}; the followers' logs may say why", hint=hint
            )


def await_confirmed(sides: Sides, on_lag: Callable[[int], None], *, within_s: float | None = None) -> None:
    """Wait until the nodes have all that the source has written up to now, however long it takes.

    With ``within_s``, until they have it within so many seconds of its writing: close enough for a switch.

    Raises:
        AdoptionFailed: they don't get closer for a long time.
    """
    nearing = Nearing(on_lag)
    with ExitStack() as kept:
        drain = Drain(sides, kept)
        wanted = drain.position()
        while not drain.confirmed(wanted, seconds=within_s or 1.0, on_lag=nearing):
            hint = "shardids adopt run --resume when they have caught up, or shardids adopt abort."
            nearing.require("the nodes", "the source", hint)
            if within_s is not None:
                wanted = drain.position()


def lags(sides: Sides) -> dict[str, int | None]:
    """Return how many bytes of log each node has not confirmed; ``None`` without a slot in use."""
    found = {one.name: one.lag_bytes for one in slots(sides.feed, sides.takers)}
    return {taker.side.name: found.get(taker.name) for taker in sides.takers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot: how much of the log is not confirmed, and how much the server keeps for it."""

    name: str
    lag_bytes: int | None
    kept_bytes: int | None


def slots(publisher: Side, followers: Sequence[Follower]) -> list[Slot]:
    """Return the slots of followers that a server has."""
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


_NOW = text("""
    select case when not pg_is_in_recovery()
           then substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) end""")
_NOTED = text("select obj_description(oid, 'pg_publication') from pg_publication where pubname = :name")
_FOUND = text("""
    select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as now,
           (select obj_description(s.oid, 'pg_subscription') from pg_subscription s
            join pg_database d on d.oid = s.subdbid and d.datname = current_database()
            where s.subname = :name) as noted""")


def _read(connection: Connection, name: str) -> tuple[str, str | None]:
    found = connection.execute(_FOUND, {"name": name}).one()
    return found.now, found.noted


def timelines(followers: Sequence[Taker | Relay]) -> str:
    """Return the present timelines of the servers, as a text that another server in a place changes."""
    found = []
    for follower in followers:
        with follower.side.autocommit() as connection:
            found.append(f"{follower.name} {_read(connection, follower.name)[0]}")
    return ", ".join(found)


def note_timelines(followers: Sequence[Taker | Relay]) -> None:
    """Record the timelines of the servers that have all rows up to now."""
    for follower in followers:
        with follower.side.autocommit() as connection:
            now, noted = _read(connection, follower.name)
            if now != noted:
                comment_on(connection, "subscription", follower.name, now)


def require_timelines(followers: Sequence[Taker | Relay]) -> None:
    """Require the servers that were recorded.

    Raises:
        AdoptionFailed: one was replaced by a standby, or restored.
    """
    for follower in followers:
        with follower.side.autocommit() as connection:
            now, noted = _read(connection, follower.name)
        if now != noted:
            raise AdoptionFailed(
                f'"{follower.side.name}" is another server than the one that took rows in: a promoted'
                " standby, or a restored backup. It may lack changes that the other had confirmed",
                hint="shardids adopt run --compare says whether it does; if so: shardids adopt abort.",
            )


def source_timeline(source: Connection) -> str | None:
    """Return the timeline that the source is on; ``None`` of a standby."""
    now: str | None = source.scalar(_NOW)
    return now


def note_source(node: Connection, publication: str, timeline: str | None) -> None:
    """Record the source's timeline on a node, with the publication of the way back."""
    comment_on(node, "publication", publication, timeline)


def is_noted_source(node: Connection, publication: str, timeline: str | None) -> bool:
    """Return whether a node has recorded this timeline as that of the source."""
    noted: str | None = node.scalar(_NOTED, {"name": publication})
    return noted is not None and noted == timeline
