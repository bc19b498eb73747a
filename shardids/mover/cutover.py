"""The cutover: stop writes on the source, let the target catch up, make the target the owner.

No acknowledged write can be lost. By then every table has a barrier (``sql/mover/moving.v1.sql``), which
writers pass under a shared lock. The exclusive lock waits for every transaction that has written. Holding it,
the mover reads the position of the source's log. When the target has confirmed that this position is on its
disk, the mover fences the shard. Until then a rollback leaves the source as it was. The session that has the
lock keeps it until the target takes writes, so that writers who are refused find the target open.

Rows that refer to reference tables need those rows on the target first: it waits for them as well.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from sqlalchemy import Connection, Engine, text

from shardids.catalog.references import AWAIT, MARK, WITHIN_S, references_of, slot_of
from shardids.catalog.rows import Catalog
from shardids.errors import MoveFailed
from shardids.pg.connections import driver_connection
from shardids.replication.barrier import (
    BarrierSession,
    OnWait,
    PutOff,
    make_barrier,
    release_offset,
    require_closed,
    stop_in_a_quiet_moment,
)
from shardids.replication.sides import Directory, Side, Sides, move_nodes, refuse_partial_copy
from shardids.replication.subscriptions import PATIENCE_S, flush


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencesOfTarget:
    """The reference tables of the target: rows that arrive there are not checked against foreign keys.

    Attributes:
        target: the node's name.
        writer: the node that reference tables are written to on; ``None`` if the target follows nobody: it
            is the writer, or there are no reference tables.
        slot: the target's replication slot there.
    """

    target: str
    writer: Engine | None
    slot: str

    @classmethod
    @contextmanager
    def opened(
        cls, catalog: Catalog, directory: Directory, target: str, *, name: str
    ) -> Iterator[ReferencesOfTarget]:
        """Yield those of a move to a node; ``name`` is the name of its sessions."""
        known = references_of(catalog)
        slot = slot_of(directory.cluster, target)
        if known.writer in (None, target) or "active" not in known.states.values():
            yield cls(target=target, writer=None, slot=slot)
            return
        with move_nodes(directory.placement, directory.login, name=name) as nodes:
            yield cls(target=target, writer=nodes[str(known.writer)], slot=slot)

    def arrive(self, *, within_s: float) -> bool:
        """Wait until the target has all that the writer has committed; return false if time runs out."""
        if self.writer is None:
            return True
        with self.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wanted = connection.scalar(MARK)
            asked = {"slots": [self.slot], "wanted": wanted, "patience_s": within_s}
            return not connection.scalars(AWAIT, asked).all()

    def require(self) -> None:
        """Require that the target follows.

        Raises:
            MoveFailed: it has not in time.
        """
        if not self.arrive(within_s=WITHIN_S):
            raise MoveFailed(
                f'node "{self.target}" has not followed the writer of reference tables within {WITHIN_S:g} s:'
                " rows of the shard could refer to rows that it lacks",
                hint="See: shardids reference list. Then resume the move with --resume, or undo it with"
                " --abort.",
            )


_CANCEL_S = 10.0
"""How long to try to cancel a statement."""


class Beside:
    """One session on a node, in a thread; its last transaction is committed when the work ends."""

    def __init__(self, side: Side, work: Callable[[Connection], None]) -> None:
        self._side = side
        self._work = work
        self._error: BaseException | None = None
        self._session: psycopg.Connection[object] | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        # An interrupted process does not wait for it.
        self._thread = threading.Thread(target=self._run, name="shardids_beside", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the work.

        Raises:
            ShardidsError: it failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the work if it is still under way: its last transaction is rolled back."""
        with self._lock:
            self._is_cancelled = True
            if self._session is not None and self._thread.is_alive():
                with suppress(psycopg.Error):
                    self._session.cancel_safe(timeout=_CANCEL_S)
        self._thread.join(_CANCEL_S)

    def _run(self) -> None:
        try:
            with self._side.engine.connect() as connection:
                with self._lock:
                    if self._is_cancelled:
                        return
                    self._session = driver_connection(connection)
                try:
                    self._work(connection)
                    connection.commit()
                finally:
                    with self._lock:
                        self._session = None
        except BaseException as error:  # noqa: BLE001 -- raised by wait()
            self._error = error


_POLL_S = 0.005
_POLL_IN_PAUSE_S = 0.001
_WORTH_TRYING = 0.1
"""The target is close enough if it confirms the current position within this part of the longest pause…"""
_WORTH_TRYING_S = 0.05
"""…or within this."""


def await_applied(
    sides: Sides, name: str, *, seconds: float, on_lag: Callable[[int], None] = lambda _bytes: None
) -> bool:
    """Wait until the target has on disk all that the source has written so far; false if time runs out."""
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        return _await_confirmed(source, target, name, _position(source), seconds=seconds, on_lag=on_lag)


def _position(source: Connection) -> str:
    """Return a position in the source's log past everything written so far, flushed or not."""
    return flush(source)


def _await_confirmed(
    source: Connection,
    target: Connection,
    name: str,
    wanted: str,
    *,
    seconds: float,
    poll_s: float = _POLL_S,
    on_lag: Callable[[int], None] = lambda _bytes: None,
) -> bool:
    deadline = time.monotonic() + seconds
    lag = text("""
        select greatest(cast(:wanted as pg_lsn) - confirmed_flush_lsn, 0)::bigint
        from pg_replication_slots where slot_name = :name""")
    while True:
        # Flushes what was applied to disk: the target confirms only what it has flushed.
        flush(target)
        lag_bytes = source.execute(lag, {"wanted": wanted, "name": name}).scalar_one_or_none()
        if lag_bytes is None:
            raise MoveFailed(f'replication slot "{name}" is gone', hint="Undo the move with --abort.")
        if lag_bytes == 0:
            return True
        on_lag(lag_bytes)
        if time.monotonic() > deadline:
            return False
        # New log wakes the sender, which asks the target for its position.
        flush(source)
        time.sleep(poll_s)


def catch_up(sides: Sides, name: str, max_pause_s: float, on_lag: Callable[[int], None]) -> None:
    """Wait until the target is close enough for a short cutover.

    Raises:
        MoveFailed: the target does not get closer for a long time.
    """
    progress = _Progress(sides, on_lag)
    patience_s = max(max_pause_s * _WORTH_TRYING, _WORTH_TRYING_S)
    while not await_applied(sides, name, seconds=patience_s, on_lag=progress.watch):
        progress.refuse_none()


def await_one_moment(sides: Sides, name: str, on_lag: Callable[[int], None]) -> None:
    """Wait until all tables on the target are as they were on the source at one moment.

    Each table was copied at a different moment: until the target has applied the changes since the first
    copy, rows can refer to rows that are missing.

    Raises:
        MoveFailed: the target does not get closer for a long time.
    """
    progress = _Progress(sides, on_lag)
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        wanted = _position(source)
        while not _await_confirmed(source, target, name, wanted, seconds=1, on_lag=progress.watch):
            progress.refuse_none()


class _Progress:
    """Watches whether the target gets closer."""

    def __init__(self, sides: Sides, on_lag: Callable[[int], None]) -> None:
        self._node = sides.target.name
        self._on_lag = on_lag
        self._least, self._changed = sys.maxsize, time.monotonic()

    def watch(self, lag_bytes: int) -> None:
        self._on_lag(lag_bytes)
        if lag_bytes < self._least:
            self._least, self._changed = lag_bytes, time.monotonic()

    def refuse_none(self) -> None:
        if time.monotonic() - self._changed > PATIENCE_S:
            raise MoveFailed(
                f'node "{self._node}" stays {self._least} bytes behind; its log may say why',
                hint="Resume with --resume when it has caught up, or undo the move with --abort.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The state that the source hands over to the target.

    Attributes:
        since: when the source stopped taking writes, by the monotonic clock.
        high_water_tick: the tick above which the target issues IDs.
        sequences: name, last_value and is_called of each sequence of the application.
    """

    since: float
    high_water_tick: int
    sequences: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The facts that a cutover needs, and the functions that it calls.

    Attributes:
        name: the replication slot; ``None`` without replication: then nothing is waited for.
        max_pause_s: how long writes may be stopped.
        references: the reference tables of the target.
        version: called before each attempt; returns the version of the shard's schema on the source, which
            the target's copy has too, or raises.
        prepare: called before writers wait, with the session that makes them wait; opens a transaction on the
            target.
        take: called once the source is fenced, while writers wait and the source is looked at; prepares the
            target for them in that transaction, which stays open.
        give_back: called if the source goes on after all, when it is open again; ends both.
    """

    name: str | None
    max_pause_s: float
    references: ReferencesOfTarget
    version: Callable[[], str]
    prepare: Callable[[BarrierSession], object]
    take: Callable[[Handover], object]
    give_back: Callable[[], object]


def stop_writes(sides: Sides, terms: Terms, on_wait: OnWait) -> Handover:
    """Stop writes and IDs on the source once the target has all that was written before. Idempotent.

    Retries until writers finish soon enough: live traffic waits at most 0.1 s for any attempt to lock.

    Raises:
        MoveFailed: writes could not be stopped in time; the source takes them as before.
        ClusterConflict: the shard's schema was changed.
    """

    def again() -> None:
        # A barrier that was disabled meanwhile, or a table without one.
        make_barrier(sides, on_wait)
        if terms.name is not None:
            catch_up(sides, terms.name, terms.max_pause_s, lambda _bytes: None)

    return stop_in_a_quiet_moment(
        lambda: _try_stop(sides, terms),
        on_wait=on_wait,
        too_late=lambda reason: MoveFailed(
            f"shard {sides.shard} could not be cut over {reason}",
            hint="Resume it with --resume, perhaps with a longer --max-pause; undo it with --abort.",
        ),
        between=again,
    )


def _try_stop(sides: Sides, terms: Terms) -> Handover:
    with sides.source.autocommit() as watching, sides.target.autocommit() as target:
        schema_version = terms.version()
        if watching.execute(_IS_MOVED, {"shard": sides.shard}).scalar_one():
            handover = read_handover(watching, sides, time.monotonic())
        else:
            # Before anybody waits, and again when nothing can change any more. The rest is slower the first
            # time, and is not needed yet.
            require_closed(watching, sides, schema_version)
            flush(target)
            flush(watching)
            terms.references.arrive(within_s=0)
            barrier = BarrierSession(sides, terms.max_pause_s)
            try:
                terms.prepare(barrier)
                handover = _fence(sides, barrier, (watching, target), terms)
            except BaseException:
                terms.give_back()
                raise
        try:
            with ThreadPoolExecutor(1) as beside:
                taking = beside.submit(terms.take, handover)
                # Until the fence's COMMIT a transaction that looked found the shard active here.
                require_closed(watching, sides, schema_version)
            taking.result()
        except PutOff:
            reopen_source(sides)
            terms.give_back()
            raise
        return handover


def _fence(
    sides: Sides, barrier: BarrierSession, beside: tuple[Connection, Connection], terms: Terms
) -> Handover:
    """Fence the source in one transaction, whose roll-back before the fence leaves the source as it was.

    ``beside`` are connections to the source and to the target, in autocommit mode.
    """
    shard, source, (watching, target) = {"shard": sides.shard}, barrier.connection, beside
    with source.begin():
        source.execute(_IS_MOVED, shard)  # Locks the row.
        since = barrier.close(watching)
        wanted = _position(watching)
        remaining_s = max(terms.max_pause_s / 2 - (time.monotonic() - since), 0.05)
        if terms.name is not None and not _await_confirmed(
            watching, target, terms.name, wanted, seconds=remaining_s, poll_s=_POLL_IN_PAUSE_S
        ):
            raise PutOff("the target did not catch up in time")
        # Offline, foreign keys are made when all rows are there, and check them.
        if terms.name is not None and not terms.references.arrive(within_s=remaining_s):
            raise PutOff("the target's reference tables did not catch up in time")
        source.execute(text("select shardids.fence(:shard, :target)"), shard | {"target": sides.target.name})
        barrier.bound(max(terms.max_pause_s - (time.monotonic() - since), 0.05))
        # Before the COMMIT: afterwards the source may no longer answer.
        return read_handover(source, sides, since)


_IS_MOVED = text("select state = 'moved' from shardids.shard where id = :shard for update")


def read_handover(source: Connection, sides: Sides, since: float) -> Handover:
    """Read the state to hand over from a source that takes no writes since ``since``."""
    shard = {"shard": sides.shard}
    return Handover(
        since=since,
        high_water_tick=source.execute(
            text("select high_water_tick from shardids.shard where id = :shard and state = 'moved'"), shard
        ).scalar_one(),
        sequences=tuple(
            row._asdict()
            for row in source.execute(text("select * from shardids.sequences_of(:shard)"), shard)
        ),
    )


def open_activation(sides: Sides) -> Connection:
    """Open the transaction that :func:`complete_activation` completes.

    Raises:
        MoveRefused: the target lacks part of the copy because a standby of it was promoted.
    """
    target = sides.target.engine.connect()
    try:
        refuse_partial_copy(target, sides)
        target.execute(text("select shardids.tables_of(:shard)"), {"shard": sides.shard})
    except BaseException:
        target.close()
        raise
    return target


def complete_activation(target: Connection, sides: Sides, handover: Handover) -> None:
    """Let the target take writes, and issue IDs above all that the source issued, in an open transaction.

    The caller commits it once the placement names the target, and not before. Until then nobody can write
    there, whatever happens to the mover, so the source can be reopened without asking the target. Clients
    that follow the new placement before the COMMIT wait for its locks; those that wait at the source's
    barrier do so until after it.
    """
    for values in handover.sequences:
        target.execute(text("select setval(cast(:name as regclass), :last_value, :is_called)"), values)
    target.execute(
        text("select shardids.drop_barriers(:shard), shardids.activate(:shard, :tick)"),
        {"shard": sides.shard, "tick": handover.high_water_tick},
    )


def is_active(sides: Sides) -> bool:
    """Return whether the target takes writes."""
    with sides.target.autocommit() as target:
        state = target.execute(
            text("select state from shardids.shard where id = :shard"), {"shard": sides.shard}
        )
        return bool(state.scalar_one_or_none() == "active")


def reopen_source(sides: Sides) -> None:
    """Let the source take writes and issue IDs again. Idempotent.

    Safe only while the placement names the source: until the switch the target is never active.
    """
    with sides.source.begin() as source:
        source.execute(
            text("""
                select shardids.activate(id) from shardids.shard
                where id = :shard and (state <> 'active' or pg_sequence_last_value(id_offset) < 0)"""),
            {"shard": sides.shard},
        )
    with sides.source.autocommit() as source:
        release_offset(source, sides)
