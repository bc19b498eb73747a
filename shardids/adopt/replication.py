"""Brings rows from the source to the nodes: publications with filters, and a subscription a node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.adopt.definitions import Definition
from shardids.adopt.events import Copying, OnEvent
from shardids.adopt.sides import Sides, Taker
from shardids.catalog.connections import keep_out_of_logs
from shardids.errors import AdoptionFailed
from shardids.mover.cutover import flush
from shardids.mover.replication import PATIENCE_S, count_failures, play

_POLL_S = 0.1
_QUICK_POLL_S = 0.003
_FAILURES_TOLERATED = 3
"""Each worker may report one from before a resume."""


def publish(sides: Sides, taker: Taker, there: Mapping[str, Definition]) -> None:
    """Publishes on the source the rows of a node's shards, from now on. Idempotent."""
    tables = [
        f"{table.name} where ({sides.row_filter(table, there[table.name], taker)})" for table in sides.split
    ]
    tables += [table.name for table in sides.reference]
    with sides.source.begin() as connection:
        is_there = connection.scalar(
            text("select exists (select from pg_publication where pubname = :name)"), {"name": taker.name}
        )
        if not is_there:
            play(
                connection,
                f'create publication "{taker.name}" for table {", ".join(tables)}'
                " with (publish_via_partition_root = true)",
            )
    with sides.source.autocommit() as connection:
        connection.execute(
            text("""
                select pg_create_logical_replication_slot(:name, 'pgoutput')
                where not exists (select from pg_replication_slots where slot_name = :name)"""),
            {"name": taker.name},
        )


def subscribe(sides: Sides, taker: Taker) -> None:
    """Subscribes a node: it fetches the existing rows of its shards, and all changes since. Idempotent."""
    conninfo = make_conninfo("", **sides.source.parameters())
    with taker.side.begin() as connection:
        keep_out_of_logs(connection)
        connection.execute(
            text("select shardids.follow(:name, :conninfo)"), {"name": taker.name, "conninfo": conninfo}
        )


def let_follow(taker: Taker, *, is_enabled: bool) -> None:
    """Lets a node apply changes, or stops it; the source keeps its log for it meanwhile."""
    with taker.side.autocommit() as connection:
        found = connection.execute(
            text("""
                select s.subenabled from pg_subscription s
                where s.subname = :name and s.subdbid = shardids.database()"""),
            {"name": taker.name},
        ).scalar_one_or_none()
        if found is not None and found != is_enabled:
            connection.exec_driver_sql(
                f'alter subscription "{taker.name}" {"enable" if is_enabled else "disable"}'
            )


_COPIED = text("""
    select count(*) filter (where sr.srsubstate not in ('r', 's')) as tables_left,
           (select coalesce(sum(p.tuples_processed), 0)::bigint from pg_stat_progress_copy p
            where p.relid = any (array_agg(sr.srrelid))) as rows
    from pg_subscription s join pg_subscription_rel sr on sr.srsubid = s.oid
    where s.subname = :name and s.subdbid = shardids.database()""")


def await_copy(sides: Sides, on_event: OnEvent) -> None:
    """Waits until each node has the rows of each table, as they were when that table was copied.

    Raises:
        AdoptionFailed: workers keep failing, no rows arrive for a long time, or a slot is lost.
    """
    total = sum(table.rows for table in (*sides.split, *sides.reference))
    started, seen, changed = time.monotonic(), (sys.maxsize, -1), time.monotonic()
    with ExitStack() as kept:
        nodes = [(taker, kept.enter_context(taker.side.autocommit())) for taker in sides.takers]
        source = kept.enter_context(sides.source.autocommit())
        before = {taker.name: count_failures(node, taker.name) for taker, node in nodes}
        while True:
            states = [node.execute(_COPIED, {"name": taker.name}).one() for taker, node in nodes]
            now = (sum(state.tables_left for state in states), sum(state.rows or 0 for state in states))
            if now[0] == 0:
                return
            for taker, node in nodes:
                if count_failures(node, taker.name) - before[taker.name] > _FAILURES_TOLERATED:
                    raise AdoptionFailed(
                        f'node "{taker.side.name}" failed repeatedly to take rows in; its log says why',
                        hint="Remove the reason, then shardids adopt resume; or shardids adopt abort.",
                    )
            require_slots(source, sides)
            if now[0] < seen[0] or now[1] > seen[1]:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed > PATIENCE_S:
                raise AdoptionFailed(
                    f"no more rows have come for {PATIENCE_S:.0f} s, and {now[0]} tables are not copied",
                    hint="The nodes' logs may say why. Then: shardids adopt resume, or shardids adopt abort.",
                )
            on_event(Copying(tables_left=now[0], rows_done=now[1], rows_total=total))
            time.sleep(min(_POLL_S, (time.monotonic() - started) / 50 + 0.005))


def require_slots(source: Connection, sides: Sides) -> None:
    """Requires the slots: a promoted standby lacks them, and the nodes would wait for ever.

    Raises:
        AdoptionFailed: one is missing, or the source has given it up.
    """
    rows = source.execute(
        text("select slot_name::text, wal_status from pg_replication_slots where slot_name = any(:names)"),
        {"names": [taker.name for taker in sides.takers]},
    )
    found = {row.slot_name: row.wal_status for row in rows}
    for taker in sides.takers:
        if found.get(taker.name, "lost") == "lost":
            raise AdoptionFailed(
                f'the source has no replication slot "{taker.name}" any more, or has given it up',
                hint="shardids adopt abort; see max_slot_wal_keep_size there; then start it again.",
            )


_LAG = text("""
    select max(greatest(cast(:wanted as pg_lsn) - confirmed_flush_lsn, 0))::bigint as bytes, count(*) as slots
    from pg_replication_slots where slot_name = any(:names)""")


class Drain:
    """Waits until all nodes have on disk what the source has written. Connections are opened beforehand."""

    def __init__(self, sides: Sides, kept: ExitStack) -> None:
        self._sides = sides
        self._names = [taker.name for taker in sides.takers]
        self._source = kept.enter_context(sides.source.autocommit())
        self._nodes = [kept.enter_context(taker.side.autocommit()) for taker in sides.takers]
        for connection in (self._source, *self._nodes):
            flush(connection)

    def position(self) -> str:
        """Returns a position in the source's log past everything written so far, flushed or not."""
        return flush(self._source)

    def confirmed(self, wanted: str, *, seconds: float, on_lag: Callable[[int], None]) -> bool:
        """Waits until every node has confirmed the position; false if time runs out.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            # The nodes confirm only what they have flushed.
            for node in self._nodes:
                flush(node)
            lag = self._source.execute(_LAG, {"wanted": wanted, "names": self._names}).one()
            if lag.slots != len(self._names):
                require_slots(self._source, self._sides)
            if lag.bytes == 0:
                return True
            on_lag(lag.bytes)
            if time.monotonic() > deadline:
                return False
            # New log wakes the senders, which ask the nodes for their positions.
            flush(self._source)
            time.sleep(_QUICK_POLL_S)


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
    """Returns how many bytes of the source's log each node has not confirmed; ``None`` without a slot."""
    with sides.source.autocommit() as source:
        rows = source.execute(
            text("""
                select slot_name::text as name, (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint as bytes
                from pg_replication_slots where slot_name = any(:names)"""),
            {"names": [taker.name for taker in sides.takers]},
        )
        found = {row.name: row.bytes for row in rows}
    return {taker.side.name: found.get(taker.name) for taker in sides.takers}
