"""Brings rows from the source to the relay, and from there to the nodes, by publications and subscriptions.

A subscription has the timeline of its server as comment, which a promotion changes: a standby may lack what
the server before it had confirmed, and the source sends that to nobody again. On the way back the source is
such a server. A node keeps its timeline, as comment of the publication.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import psycopg
from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.run.sides import Follower, Relay, Sides, Taker
from shardids.adopt.run.slots import copy_slots, require_slots
from shardids.errors import AdoptionFailed
from shardids.pg.connections import driver_connection, keep_out_of_logs
from shardids.pg.definitions import Definition
from shardids.pg.locks import holders_of_tables
from shardids.pg.queries import AS_IS, comment_on
from shardids.pg.schemas import require_no_slot, require_own_replication
from shardids.replication.barrier import with_locks
from shardids.replication.sides import Side
from shardids.replication.steps import Event, OnEvent, Waiting, ignore
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
_SHOWN_S = 1.0
"""How often a reason to wait is reported."""
_FAILURES_TOLERATED = 3
"""Each worker may report one from before a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(Event):
    """Progress of the copy: tables that are not copied yet, counted once per node, and rows that arrived."""

    tables_left: int
    rows_done: int
    rows_total: int


def publish(sides: Sides, taker: Taker, there: Mapping[str, Definition], on_event: OnEvent) -> None:
    """Publish the rows of a node's shards on the relay, from now on. Idempotent."""
    tables = [
        f"{table.name} where ({sides.row_filter(table, there[table.name], taker)})" for table in sides.split
    ]
    tables += [table.name for table in sides.reference]
    publish_tables(sides.relay.side, taker.name, tables, changes="insert, update, delete", on_event=on_event)


def publish_tables(
    side: Side,
    name: str,
    tables: Sequence[str],
    *,
    changes: str = "insert, update, delete, truncate",
    on_event: OnEvent = ignore,
) -> None:
    """Publish changes of tables, each with its row filter, and keep the log from now on. Idempotent.

    Raises:
        MissingPrivilege, ClusterConflict: another role made a publication or a slot of this name.
    """
    with side.begin() as connection:
        if not has_publication(connection, name):
            require_no_slot(connection, name)
            named = f" for table {', '.join(tables)}" if tables else ""
            options = f"publish = '{changes}', publish_via_partition_root = true"
            play(connection, f'create publication "{name}"{named} with ({options})')
        require_own_replication(connection, "publication", name, is_node=False)
    await_slot(side, name, f"the {side.name}", on_event)


def await_slot(publisher: Side, name: str, who: str, on_event: OnEvent) -> None:
    """Make a slot, which begins when all transactions have ended that had written. Idempotent.

    Until then it reports every second which one it waits for: the server keeps its log from the first moment
    on. If ``on_event`` raises, the statement is ended. ``who``: the publisher, in messages.
    """
    with publisher.autocommit() as making:
        if making.scalar(_HAS_SLOT, {"name": name}):
            return
        with publisher.autocommit() as watching, ThreadPoolExecutor(1) as pool:
            made = pool.submit(make_slot, making, name)
            try:
                for attempt in count(1):
                    if wait([made], timeout=_SHOWN_S).done:
                        break
                    oldest = watching.scalar(_OLDEST) or "they have just ended"
                    reason = f"a slot begins when transactions of {who} that have written end: {oldest}"
                    on_event(Waiting(attempt=attempt, reason=reason))
            except BaseException:
                # A statement that has not begun yet misses its end.
                while not wait([made], timeout=_CANCEL_AGAIN_S).done:
                    with suppress(psycopg.Error):
                        driver_connection(making).cancel_safe(timeout=_CANCEL_S)
                # An end that comes late would meet the next statement.
                making.invalidate()
                raise
            made.result()


_HAS_SLOT = text("select exists (select from pg_replication_slots where slot_name = :name)")
_CANCEL_AGAIN_S = 0.2
_CANCEL_S = 5.0


def add_tables(publisher: Side, follower: Follower, names: Sequence[str], on_event: OnEvent) -> bool:
    """Publish further tables, and let a follower copy them; false if none is new. Idempotent.

    They are locked one after the other, each only if its lock comes quickly: while one waits behind a VACUUM,
    changes of the others would wait too, and all traffic behind these.
    """
    with publisher.autocommit() as connection:
        missing = unpublished(connection, follower, names)
        for name in missing:
            with_locks(
                publisher,
                f'alter publication "{follower.name}" add table {name}'.replace(":", r"\:"),
                {},
                on_wait=partial(_note_wait, connection, name, on_event),
            )
    with follower.side.autocommit() as connection:
        connection.exec_driver_sql(f'alter subscription "{follower.name}" refresh publication')
    return bool(missing)


_EXCLUDING = (
    "ShareUpdateExclusiveLock",
    "ShareLock",
    "ShareRowExclusiveLock",
    "ExclusiveLock",
    "AccessExclusiveLock",
)
"""Locks that keep a table from being published."""


def _note_wait(publisher: Connection, name: str, on_event: OnEvent, attempt: int) -> None:
    holder = next(map(str, holders_of_tables(publisher, [name], _EXCLUDING)), "somebody else")
    reason = f"table {name} can't be published yet: {holder} has a lock on it"
    on_event(Waiting(attempt=attempt, reason=reason))


def unpublished(publisher: Connection, follower: Follower, names: Sequence[str]) -> Sequence[str]:
    """Return those of the tables that the publication for a follower has not."""
    return publisher.scalars(_UNPUBLISHED, {"names": list(names), "name": follower.name}).all()


_UNPUBLISHED = text("""
    select name from unnest(cast(:names as text[])) with ordinality n (name, number)
    where not exists (
      select from pg_publication_rel r join pg_publication p on p.oid = r.prpubid and p.pubname = :name
      where r.prrelid = to_regclass(n.name))
    order by number""")


def subscribe(sides: Sides, taker: Taker) -> None:
    """Subscribe a node: it fetches the existing rows of its shards, and all changes since. Idempotent.

    Raises:
        MissingPrivilege: another role made a subscription of this name.
    """
    conninfo = make_conninfo("", **sides.relay.side.parameters())
    with taker.side.begin() as connection:
        keep_out_of_logs(connection)
        connection.execute(
            text("select shardids.follow(:name, :conninfo)"), {"name": taker.name, "conninfo": conninfo}
        )
        require_own_replication(connection, "subscription", taker.name)


_HAS_SUBSCRIPTION = text(f"select exists (select from pg_subscription s where {_OWN})")  # noqa: S608 -- a constant


def has_subscription(connection: Connection, name: str) -> bool:
    """Return whether a database other than a node has a subscription."""
    return bool(connection.scalar(_HAS_SUBSCRIPTION, {"name": name}))


def create_subscription(connection: Connection, name: str, publisher: Side, options: str) -> None:
    """Subscribe a database other than a node, without a trace of the password in errors or log.

    Transactions are applied one after the other: a row refers to that which it referred to at the publisher.
    """
    keep_out_of_logs(connection)
    connection.execute(
        text("""
            select set_config('shardids.conninfo', :conninfo, true), set_config('shardids.name', :name, true),
                   set_config('shardids.options', :options, true)"""),
        {
            "conninfo": make_conninfo("", **publisher.parameters()),
            "name": name,
            "options": f"create_slot = false, binary = false, streaming = off, {options}",
        },
    )
    # Errors are raised again: the context of the original holds the whole statement, and that a password.
    connection.exec_driver_sql(
        """
        do $$ begin
          execute format('create subscription %1$I connection %2$L publication %1$I with (%3$s)',
                         current_setting('shardids.name'), current_setting('shardids.conninfo'),
                         current_setting('shardids.options'));
        exception when others then
          raise exception using errcode = sqlstate, message = sqlerrm;
        end $$""",
        execution_options=AS_IS,
    )
    connection.execute(text("select set_config('shardids.conninfo', '', true)"))


def try_subscribing(side: Side, publisher: Side) -> None:
    """Let a database other than a node connect to a publisher, and roll back.

    Raises:
        ShardidsError: it can't.
    """
    with side.engine.connect() as connection, connection.begin() as transaction:
        try:
            create_subscription(connection, "shardids_trial", publisher, "enabled = false, slot_name = none")
        finally:
            transaction.rollback()


def drop_subscription(side: Side, name: str) -> None:
    """Drop a subscription of a database other than a node. Idempotent; the publisher need not answer."""
    with side.autocommit() as connection:
        if has_subscription(connection, name):
            for change in ("disable", "set (slot_name = none)"):
                connection.exec_driver_sql(f'alter subscription "{name}" {change}')
            connection.exec_driver_sql(f'drop subscription "{name}"')


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
           string_agg(sr.srrelid || ' ' || sr.srsubstate::text, ', ' order by sr.srrelid) as states,
           (select coalesce(sum(p.tuples_processed), 0)::bigint from pg_stat_progress_copy p
            where p.relid = any (array_agg(sr.srrelid))) as rows
    from pg_subscription s join pg_subscription_rel sr on sr.srsubid = s.oid
    where {_OWN}""")  # noqa: S608 -- a constant
_COPY_SLOTS = text("""
    select string_agg(concat_ws(' ', slot_name, restart_lsn, confirmed_flush_lsn), ', '
                      order by slot_name) as now,
           coalesce(bool_or(confirmed_flush_lsn is null), false) as is_waiting
    from pg_replication_slots where slot_name ~ any (cast(:patterns as text[]))""")
_OLDEST = text("""
    select who from (
      select format('process %s%s, for %s s', pid, ' (' || nullif(application_name, '') || ')',
                    extract(epoch from clock_timestamp() - xact_start)::int) as who, age(backend_xid) as age
      from pg_stat_activity where backend_xid is not null and pid <> pg_backend_pid()
      union all
      select format('prepared transaction %L', gid), age(transaction) from pg_prepared_xacts) written
    order by age desc limit 1""")


class Arrival:
    """A watch on copies. Any change is progress; copies that start over are found by their failures."""

    def __init__(self) -> None:
        self._seen: object = None
        self._changed = self._shown = time.monotonic()
        self._attempts = 0

    def watch(self, seen: object) -> float:
        """Receive all that shows progress; return for how long it has been the same, in seconds."""
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        return time.monotonic() - self._changed

    def wait(self, publisher: Side, source: Connection, on_event: OnEvent) -> None:
        """Report which transaction a copy waits for: its slot begins when all have ended that had written."""
        if time.monotonic() - self._shown > _SHOWN_S:
            oldest = source.scalar(_OLDEST)
            if oldest is None:
                return  # They have just ended.
            self._shown, self._attempts = time.monotonic(), self._attempts + 1
            reason = (
                f"the copy of a table begins when transactions of the {publisher.name} that have written end:"
                f" {oldest}"
            )
            on_event(Waiting(attempt=self._attempts, reason=reason))


def await_copy(sides: Sides, publisher: Side, followers: Sequence[Follower], on_event: OnEvent) -> None:
    """Wait until each follower has the rows of each table, as they were when that table was copied.

    Raises:
        AdoptionFailed: workers keep failing, no rows arrive for a long time, or a slot is lost.
    """
    total = sum(table.rows for table in (*sides.split, *sides.reference))
    started, arrival = time.monotonic(), Arrival()
    patterns = [pattern for pattern in map(copy_slots, followers) if pattern is not None]
    with ExitStack() as kept:
        nodes = [(taker, kept.enter_context(taker.side.autocommit())) for taker in followers]
        source = kept.enter_context(publisher.autocommit())
        before = {taker.name: count_failures(node, taker.name) for taker, node in nodes}
        while True:
            states = [node.execute(_COPIED, {"name": taker.name}).one() for taker, node in nodes]
            left, rows = sum(state.tables_left for state in states), sum(state.rows or 0 for state in states)
            if left == 0:
                return
            for taker, node in nodes:
                if count_failures(node, taker.name) - before[taker.name] > _FAILURES_TOLERATED:
                    raise AdoptionFailed(
                        f"{_named(taker)} failed repeatedly to take rows in; its log says why",
                        hint="Remove the reason, then shardids adopt run --resume; or shardids adopt abort.",
                    )
            require_slots(source, publisher, followers)
            slots_now = source.execute(_COPY_SLOTS, {"patterns": patterns}).one()
            idle_s = arrival.watch((rows, [state.states for state in states], slots_now.now))
            if slots_now.is_waiting:
                arrival.wait(publisher, source, on_event)
            elif idle_s > PATIENCE_S:
                raise AdoptionFailed(
                    f"no more rows have come for {PATIENCE_S:.0f} s, and {left} tables are not copied",
                    hint="The nodes' logs may say why. Then: shardids adopt run --resume, or adopt abort.",
                )
            on_event(Copying(tables_left=left, rows_done=rows, rows_total=total))
            time.sleep(min(_POLL_S, (time.monotonic() - started) / 50 + 0.005))


def _named(follower: Follower) -> str:
    return "the relay" if isinstance(follower, Relay) else f'node "{follower.side.name}"'


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
        self, wanted: Mapping[Side, str], *, deadline: float, on_lag: Callable[[int], None] | None = None
    ) -> bool:
        """Wait until the positions are confirmed; false if time runs out. Raises as :meth:`lag_bytes`."""
        while True:
            # Followers confirm only what they have flushed.
            for side in self._followers:
                flush(self.connections[side])
            if (lag_bytes := self.lag_bytes(wanted)) == 0:
                return True
            if on_lag is not None:
                on_lag(lag_bytes)
            if time.monotonic() > deadline:
                return False
            # New log wakes the senders, which ask the followers for their positions.
            self.positions()
            time.sleep(_QUICK_POLL_S)


class Drain:
    """Waits until all nodes have the source's writes on disk, by the relay. Opens connections beforehand."""

    def __init__(self, sides: Sides, kept: ExitStack) -> None:
        self.source = sides.source
        self._first = _hop(sides.source, [sides.relay], kept)
        self._last = _hop(sides.relay.side, sides.takers, kept)

    def position(self) -> dict[Side, str]:
        """Return a position in the source's log past everything written so far, flushed or not."""
        return self._first.positions()

    def confirmed(
        self, wanted: Mapping[Side, str], *, seconds: float, on_lag: Callable[[int], None] | None = None
    ) -> bool:
        """Wait until every node has confirmed the source's position; false if time runs out.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        deadline, last = time.monotonic() + seconds, self._last

        def on_both(lag_bytes: int) -> None:
            if on_lag is not None:
                on_lag(lag_bytes + last.lag_bytes(last.positions()))

        if not self._first.confirmed(wanted, deadline=deadline, on_lag=on_both):
            return False
        # What the relay has confirmed is in its own log, before the position that it is at afterwards.
        return last.confirmed(last.positions(), deadline=deadline, on_lag=on_lag)


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


def timelines(followers: Sequence[Taker | Relay]) -> dict[str, str]:
    """Return the present timelines of the servers, by the followers' names: another server has another."""
    found = {}
    for follower in followers:
        with follower.side.autocommit() as connection:
            found[follower.name], _ = _read(connection, follower.name)
    return found


def note_timelines(followers: Sequence[Taker | Relay], found: Mapping[str, str]) -> None:
    """Record the timelines of the servers that had all rows, as they were before these were read."""
    for follower in followers:
        with follower.side.autocommit() as connection:
            if _read(connection, follower.name)[1] != found[follower.name]:
                comment_on(connection, "subscription", follower.name, found[follower.name])


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
