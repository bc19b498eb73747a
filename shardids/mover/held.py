"""A lock of the catalog that a process holds for as long as it lives and is heard from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from shardids.catalog.connections import keep_commits, keep_settings
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog
from shardids.errors import ConnectionFailed, ShardidsError
from shardids.mover.sides import SESSION

_BEAT_S = 5.0
_LOST_AFTER = "25s"
"""How long the catalog keeps the lock of a process that it no longer hears from."""
_SETTLE_S: Final = 20.0
"""How long to ask the catalog about a COMMIT that it did not answer."""
_PAUSE_S: Final = 0.5

T = TypeVar("T")


class HeldLock:
    """An advisory lock of the catalog, and the connection that holds it.

    What is written by :meth:`transaction` is written under the lock: a connection that was lost, and the lock
    with it, is not replaced.

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
    ) -> Iterator[Self]:
        """Takes the lock (lock, key), and releases it at the end of the block.

        ``taken`` is raised if another process has it, ``lost`` by transactions after the connection was lost.
        """
        with connected_alone(catalog) as connection:
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
        """Yields the connection in a transaction, which is committed at the end of the block."""
        with self._is_free:
            if self._is_lost or self._connection.invalidated:
                # A new connection would not have the lock.
                raise self._lost
            with self._connection.begin():
                yield self._connection

    def require(self) -> None:
        """Requires that the lock is still held.

        Raises:
            ShardidsError: ``lost``, or that the catalog does not answer.
        """
        with self.transaction() as connection:
            connection.execute(text("select 1"))

    def settled(self, catalog: Catalog, ask: Callable[[Connection], T]) -> T:
        """Returns what ``ask`` reads once nothing is committed under the lock any more.

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
        """Keeps the session alive: the catalog ends the session, and the lock, of a silent process.

        A process that was lost and wakes up finds a connection on which it can no longer write.
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
def connected_alone(catalog: Catalog) -> Iterator[Connection]:
    """Yields a connection to the catalog that is closed, not pooled, so that its locks end with it."""
    engine = administrative_engine(catalog.url, what="the catalog", application_name="shardids_journal")
    keep_commits(engine)
    keep_settings(engine, SESSION | {"idle_session_timeout": _LOST_AFTER})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
