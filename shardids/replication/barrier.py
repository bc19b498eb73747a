"""The write barrier of a shard, and the lock of the catalog that a process holds while it lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, Self, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed, ShardidsError, StatementFailed
from shardids.pg.connections import keep_commits, keep_settings
from shardids.pg.locks import AdvisoryLock
from shardids.replication.sides import SESSION, Side, Sides
from shardids.replication.subscriptions import LOCK_FAILURES, PATIENCE_S

_BEAT_S = 5.0
_LOST_AFTER = "25s"
"""How long the catalog keeps the lock of a process that it no longer hears from."""
_SETTLE_S: Final = 20.0
"""How long to ask the catalog about a COMMIT that it did not answer."""
_PAUSE_S: Final = 0.5

T = TypeVar("T")


class HeldLock:
    """An advisory lock of the catalog, and the connection that holds it.

    :meth:`transaction` writes under the lock: a connection that was lost, and the lock with it, is not
    replaced.

    Attributes:
        process: the process of the catalog's server that holds the lock.
    """

    def __init__(self, connection: Connection, lost: ShardidsError) -> None:
        self._connection = connection
        self._lost = lost
        self._is_free = threading.Lock()
        self._closed = threading.Event()
        self._is_lost = False
        self.process: int = connection.scalar(text("select pg_backend_pid()"))
        connection.rollback()

    @classmethod
    @contextmanager
    def taken(
        cls,
        catalog: Catalog,
        lock: AdvisoryLock,
        key: int,
        *,
        taken: ShardidsError,
        lost: ShardidsError,
        name: str = "shardids_journal",
    ) -> Iterator[Self]:
        """Take the lock (lock, key), and release it at the end of the block.

        ``taken`` is raised if another process has it, ``lost`` by transactions after the connection was lost.
        ``name`` is the session's.
        """
        with connected_alone(catalog, name) as connection:
            with connection.begin():
                is_mine = connection.execute(
                    text("select pg_try_advisory_lock(:class, :key)"), {"class": lock, "key": key}
                ).scalar_one()
            if not is_mine:
                raise taken
            held = cls(connection, lost)
            beating = threading.Thread(target=held._beat, name="shardids_journal", daemon=True)
            beating.start()
            try:
                yield held
            finally:
                held._closed.set()
                beating.join()
                # The server notices a closed connection later: the next process would not get the lock.
                with suppress(ShardidsError, SQLAlchemyError), held.transaction():
                    connection.execute(
                        text("select pg_advisory_unlock(:class, :key)"), {"class": lock, "key": key}
                    )

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield the connection in a transaction, which is committed at the end of the block."""
        with self._is_free:
            if self._is_lost or self._connection.invalidated:
                # A new connection would not have the lock.
                raise self._lost
            with self._connection.begin():
                yield self._connection

    def require(self) -> None:
        """Require that the lock is still held.

        Raises:
            ShardidsError: ``lost``, or that the catalog does not answer.
        """
        with self.transaction() as connection:
            connection.execute(text("select 1"))

    def settled(self, catalog: Catalog, ask: Callable[[Connection], T]) -> T:
        """Return what ``ask`` reads once nothing is committed under the lock any more.

        After a COMMIT that got no answer: asks in its own session. If that does not answer any more, it is
        ended first, for it may still be committing, and with it the lock.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        with suppress(ShardidsError), self.transaction() as connection:
            return ask(connection)
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                with connected_alone(catalog) as connection:
                    connection.execute(
                        text("select pg_terminate_backend(:process, 5000)"), {"process": self.process}
                    )
                    return ask(connection)
            except ConnectionFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def _beat(self) -> None:
        """Keep the session alive: the catalog ends the session, and the lock, of a silent process.

        A process that was lost and wakes up can no longer write on this connection.
        """
        while not self._closed.wait(_BEAT_S):
            if self._is_free.acquire(blocking=False):
                try:
                    self._connection.execute(text("select 1"))
                    self._connection.rollback()
                except (ShardidsError, SQLAlchemyError):
                    self._is_lost = True
                    return
                finally:
                    self._is_free.release()


@contextmanager
def connected_alone(catalog: Catalog, name: str = "shardids_journal") -> Iterator[Connection]:
    """Yield a connection to the catalog that is closed, not pooled, so that its locks end with it."""
    engine = administrative_engine(catalog.url, what="the catalog", application_name=name)
    keep_commits(engine)
    keep_settings(engine, SESSION | {"idle_session_timeout": _LOST_AFTER})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


LOCK_MS = 100
"""How long writers may queue behind one attempt to lock a table or the barrier."""
PAUSE_BETWEEN_S = 0.25
"""How long to wait between two attempts."""

OnWait = Callable[[int, str], None]
"""Called with the number of the attempt that failed, and why."""


class PutOff(Exception):
    """The cutover can't happen now, and nothing was changed; the text says why."""


def stop_in_a_quiet_moment(
    attempt: Callable[[], T],
    *,
    on_wait: OnWait,
    too_late: Callable[[str], ShardidsError],
    between: Callable[[], object],
) -> T:
    """Repeat an attempt to stop writes until it is not put off; live traffic waits at most 0.1 s for each.

    ``between`` brings barriers and the other side up to date before the next attempt.

    Raises:
        ShardidsError: the one that ``too_late`` makes of ``in N attempts: reason`` after :data:`PATIENCE_S`.
    """
    deadline, number = time.monotonic() + PATIENCE_S, 0
    while True:
        number += 1
        try:
            return attempt()
        except PutOff as reason:
            on_wait(number, str(reason))
            if time.monotonic() > deadline:
                raise too_late(f"in {number} attempts: {reason}") from reason
        time.sleep(PAUSE_BETWEEN_S)
        between()


def limit_pause(connection: Connection, max_pause_s: float) -> None:
    """Bound the open transaction, which makes writers wait, in case this process hangs or a lock is held."""
    connection.execute(
        text("""
            select set_config('idle_in_transaction_session_timeout', :pause_ms, true),
                   set_config('lock_timeout', :lock_ms, true)"""),
        {"pause_ms": str(round(max_pause_s * 1000)), "lock_ms": str(LOCK_MS)},
    )


class BarrierSession:
    """A session on the source that makes writers wait at the barrier, also after its COMMIT of the fence.

    Lock and fence are one session's: when it ends before the COMMIT, writers pass and the shard stays
    unfenced. Those that wait are refused when it is released, and the shard may be open elsewhere by then.
    The server releases it when it hears nothing for the longest pause.
    """

    def __init__(self, sides: Sides, max_pause_s: float) -> None:
        self._sides = sides
        self._max_pause_s = max_pause_s
        self.connection = sides.source.engine.connect()
        # Its lock and its settings end with it, and with no other.
        self.connection.detach()

    def close(self, watching: Connection) -> float:
        """Make writers wait; those that had passed the barrier have ended. Returns since when they wait.

        That is by the monotonic clock. ``watching`` is another connection to the source.

        Raises:
            PutOff: another session writes to the shard, or migrates it.
        """
        limit_pause(self.connection, self._max_pause_s)
        shard = {"shard": self._sides.shard}
        if not self.connection.scalar(
            text("select pg_try_advisory_xact_lock(:class, :shard)"),
            shard | {"class": AdvisoryLock.SHARD_SCHEMA},
        ):
            raise PutOff("a migration of the shard is running")
        since = time.monotonic()
        try:
            self.connection.execute(
                text("select pg_advisory_lock(:class, :shard)"), shard | {"class": AdvisoryLock.WRITE_BARRIER}
            )
        except StatementFailed as error:
            if error.sqlstate in LOCK_FAILURES:
                raise PutOff(who_writes(watching, self._sides)) from error
            raise
        return since

    def bound(self, seconds: float) -> None:
        """Let the server end the session when it hears nothing for so long after its COMMIT."""
        self.connection.execute(
            text("select set_config('idle_session_timeout', :ms, false)"), {"ms": str(round(seconds * 1000))}
        )

    def release(self) -> None:
        """Roll back an open transaction; let writers pass, or be refused if the shard is fenced."""
        with suppress(ShardidsError, SQLAlchemyError):
            self.connection.rollback()
            # Before the server has ended the session.
            self.connection.execute(text("select pg_advisory_unlock_all()"))
        self.connection.close()


def make_barrier(sides: Sides, on_wait: OnWait) -> None:
    """Create the barrier on each table of the source, open, so that it stops no writes yet. Idempotent.

    Retries each table until its lock comes quickly: live traffic waits at most 0.1 s for any attempt.
    """
    shard = {"shard": sides.shard}
    with sides.source.autocommit() as source:
        tables = source.scalars(
            text("select oid::bigint from shardids.without_barrier(:shard, true) oid"), shard
        ).all()
        release_offset(source, sides)
        for table in tables:
            with_locks(
                sides.source,
                "select shardids.add_barrier(:shard, cast(:table as oid), true)",
                shard | {"table": table},
                on_wait=lambda attempt: on_wait(attempt, who_writes(source, sides)),
            )


def drop_barrier(side: Side, shard: int) -> None:
    """Drop the barrier of each table. Waits for readers too; each attempt holds others up only briefly."""
    with_locks(side, "select shardids.drop_barriers(:shard)", {"shard": shard})


_WAYS_PAST = text("""
    select (select min(name::text) from shardids.without_barrier(:shard, true) name) as open_table,
           (select holder from shardids.barrier_holders(:shard, false) limit 1) as holder,
           shardids.schema_version(:shard) as version""")


def require_closed(source: Connection, sides: Sides, schema_version: str) -> None:
    """Make sure that the closed barrier stops all writers, and that the schema still has the given version.

    A transaction that the barrier does not stop can disable triggers, create tables or change the schema.
    What such a transaction has committed shows in the triggers and in the version; one that is still open
    holds locks.

    Raises:
        PutOff: a session can get past the barrier, or the schema has another version.
    """
    found = source.execute(_WAYS_PAST, {"shard": sides.shard}).one()
    if found.open_table is not None:
        raise PutOff(f"table {found.open_table} has no write barrier, or a disabled one")
    if found.holder is not None:
        raise PutOff(f"{found.holder} changes the shard without passing its write barrier")
    if found.version != schema_version:
        raise PutOff("the shard's schema was changed")


def release_offset(source: Connection, sides: Sides) -> None:
    """Draw an ID if none was drawn since the shard was activated: until then its offset is negative."""
    source.execute(text("select shardids.release(:shard)"), {"shard": sides.shard})


def who_writes(watching: Connection, sides: Sides) -> str:
    """Describe the transaction that keeps the shard's tables or barrier on the source from being locked."""
    oldest = watching.execute(
        text("select holder, seconds from shardids.barrier_holders(:shard, true) limit 1"),
        {"shard": sides.shard},
    ).one_or_none()
    if oldest is None:
        return "somebody else was writing to it"
    return f"{oldest.holder} has been in a writing transaction for {oldest.seconds} s"


def until_locked(
    take: Callable[[], None], on_wait: Callable[[int], None], *, patience_s: float = PATIENCE_S
) -> None:
    """Repeat a function that takes locks, each with a short timeout, until it gets them all.

    ``on_wait`` is called with the number of each failed attempt.

    Raises:
        StatementFailed: it did not get the locks in time, or failed for another reason.
    """
    deadline, attempt = time.monotonic() + patience_s, 0
    while True:
        attempt += 1
        try:
            take()
            return
        except StatementFailed as error:
            if error.sqlstate not in LOCK_FAILURES or time.monotonic() > deadline:
                raise
        on_wait(attempt)
        time.sleep(PAUSE_BETWEEN_S)


def with_locks(
    side: Side,
    statement: str,
    parameters: Mapping[str, object],
    *,
    on_wait: Callable[[int], None] = lambda _attempt: None,
) -> None:
    """Retry a statement that locks tables until it succeeds; no attempt keeps others waiting for long."""

    def take() -> None:
        with side.begin() as connection:
            connection.execute(text("select set_config('lock_timeout', :ms, true)"), {"ms": str(LOCK_MS)})
            connection.execute(text(statement), parameters)

    until_locked(take, on_wait)
