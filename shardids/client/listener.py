"""Keeps the known placement current by LISTEN on the catalog, without polling."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Lock, Thread, current_thread
from typing import cast
from weakref import WeakMethod, finalize

import psycopg
from sqlalchemy import exc
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool
from tenacity import RetryCallState, Retrying
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set
from tenacity.wait import wait_random_exponential

from shardids.catalog.connections import open_engine
from shardids.catalog.forks import in_child
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import OldIdRules, Placement
from shardids.errors import ShardidsError
from shardids.logs import logger

log = logger("client")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
"""Upper bounds of the random wait before the first attempt to reconnect, and before late ones."""

_CLOSING_S = 1.0
"""How long :meth:`PlacementListener.close` waits for a thread that is connecting."""

_LONGEST_READ_S = 10.0
"""How long a read of the placement waits for the previous one before it overtakes it."""

_CONNECT_ARGS = {
    "application_name": "shardids listener",
    "connect_timeout": 10,
    # A server or a firewall that vanished silently is noticed within a minute.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


class FollowedPlacement:
    """The placement as last read. From its first use on, a thread keeps it current.

    Args:
        catalog: where it is read.
        listen: whether to follow it; otherwise only :meth:`refresh` reads it again.
        on_retry: is called with the error for each transaction that is run again because of it.
    """

    _next: Future[None] | None
    _running: Future[None]

    def __init__(
        self,
        catalog: Catalog,
        *,
        listen: bool,
        on_retry: Callable[[ShardidsError | exc.DBAPIError], object] | None = None,
    ) -> None:
        self._catalog = catalog
        self.on_retry = on_retry
        self._placement = catalog.placement()
        self._reset()
        in_child(self, FollowedPlacement._reset)
        self._listener = PlacementListener(catalog.url, self.refresh) if listen else None
        if self._listener:
            finalize(self, self._listener.close)

    @property
    def current(self) -> Placement:
        """The placement as last read."""
        if self._listener:
            self._listener.start()
        return self._placement

    @property
    def old_ids(self) -> OldIdRules | None:
        """The rules for old IDs as last read: the same object until they change. It starts no thread."""
        return self._placement.old_ids

    def refresh(self) -> None:
        """Reads it again. Raises ShardidsError if that fails; the last placement stays."""
        placement = self._catalog.placement()
        with self._lock:
            if placement.old_ids is not None and placement.old_ids == self._placement.old_ids:
                placement = replace(placement, old_ids=self._placement.old_ids)
            is_newer = placement.version > self._placement.version
            # Two readers may return in the opposite order.
            if placement.version >= self._placement.version:
                self._placement = placement
            watchers = list(self._watchers) if is_newer else []
        for tell in watchers:
            tell()

    def try_refresh(self, patience_s: float | None = None) -> bool:
        """Reads it again within ``patience_s`` seconds; returns whether it could, and logs a warning if not.

        However many threads ask at once, one read runs, and one more is queued for all that asked since.
        """
        try:
            self._next_read().result(patience_s)
        except ShardidsError as error:
            reason = error.message
        except exc.TimeoutError as error:
            reason = str(error)
        except TimeoutError:
            reason = "the catalog has not answered in time"
        else:
            return True
        log.warning("shardids: routing continues with the known placement: %s", reason)
        return False

    def _next_read(self) -> Future[None]:
        """Returns a read that has not begun yet: it finds all that was committed before this call."""
        with self._lock:
            if self._next is not None:
                return self._next
            self._next = read = Future[None]()
        reading = Thread(target=self._read, args=(read,), name="shardids placement", daemon=True)
        try:
            reading.start()
        except RuntimeError:
            # The interpreter is exiting.
            self._read(read)
        return read

    def _read(self, read: Future[None]) -> None:
        wait([self._running], _LONGEST_READ_S)
        with self._lock:
            self._running, self._next = read, None
        try:
            self.refresh()
        except BaseException as error:  # noqa: BLE001 -- passed on to the caller
            read.set_exception(error)
        else:
            read.set_result(None)

    @contextmanager
    def watched(self, on_change: Callable[[], object]) -> Iterator[None]:
        """Calls ``on_change`` for each newer placement read during the block, in the thread that read it."""
        with self._lock:
            self._watchers.append(on_change)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(on_change)

    def close(self) -> None:
        """Stops the thread."""
        if self._listener:
            self._listener.close()

    def _reset(self) -> None:
        # Also in the child of a fork, where a thread that does not exist there may hold the old lock.
        self._lock = Lock()
        self._watchers: list[Callable[[], object]] = []
        self._next = None
        self._running = Future()
        self._running.set_result(None)


class PlacementListener:
    """A daemon thread with one connection to the catalog, which sleeps until it is notified of a change.

    It calls ``on_change`` whenever it has connected and after every notification. When the connection is
    lost or ``on_change`` raises, it reconnects after random waits that grow to 30 s.

    Args:
        catalog_url: the catalog, not through a pooler in transaction mode: LISTEN needs its own session.
        on_change: a bound method, called in the thread. Its object is held weakly.
    """

    def __init__(self, catalog_url: URL, on_change: Callable[[], object]) -> None:
        self._on_change = WeakMethod(on_change)
        connect_args = {name: arg for name, arg in _CONNECT_ARGS.items() if name not in catalog_url.query}
        self._engine = open_engine(
            catalog_url,
            what="the catalog",
            administrative=True,
            poolclass=NullPool,
            pool_reset_on_return=None,
            connect_args=connect_args,
        )
        self._thread: Thread | None = None
        self._bell: socket.socket | None = None
        self._reset()
        in_child(self, PlacementListener._reset)

    def _reset(self) -> None:
        # Also in the child of a fork, which does not have the thread.
        self._lock = Lock()
        self._closing = Event()
        self._thread = None
        if self._bell is not None:
            self._bell.close()
        self._bell = None

    def start(self) -> None:
        """Starts the thread unless it was started before. Returns at once."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    ear, self._bell = socket.socketpair()
                    self._thread = Thread(
                        target=self._run, args=(ear,), name="shardids listener", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Stops the thread and its connection for good, within a second even while it is connecting."""
        self._closing.set()
        with self._lock:
            thread, bell, self._bell = self._thread, self._bell, None
        if bell is not None:
            # Closing alone has no effect while the child of a fork holds a copy.
            bell.shutdown(socket.SHUT_RDWR)
            bell.close()
        if thread is not None and thread is not current_thread():
            thread.join(_CLOSING_S)

    def _run(self, ear: socket.socket) -> None:
        attempts = Retrying(
            wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            sleep=sleep_using_event(self._closing),
            stop=stop_when_event_set(self._closing),
            before_sleep=_log_loss,
            retry_error_callback=lambda _state: None,
        )
        with ear:
            for attempt in attempts:
                with attempt, self._listening() as connection:
                    if self._tell():
                        # The waits grow with this number: start over.
                        attempt.retry_state.attempt_number = 1
                        self._follow(connection, ear)

    @contextmanager
    def _listening(self) -> Iterator[psycopg.Connection]:
        with self._engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql("listen shardids_placement")
            # Outside a transaction, nothing is rolled back when the connection is lost.
            connection.commit()
            yield cast(psycopg.Connection, connection.connection.driver_connection)

    def _follow(self, connection: psycopg.Connection, ear: socket.socket) -> None:
        """Passes notifications on until ``ear`` is closed or the object of ``on_change`` is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(ear, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while ear not in {key.fileobj for key, _ in selector.select()}:
                connection.pgconn.consume_input()
                notified = False
                while connection.pgconn.notifies():
                    notified = True
                if notified and not self._tell():
                    return

    def _tell(self) -> bool:
        """Calls ``on_change``; returns whether its object still exists."""
        # A reference in a sleeping frame would keep the object alive.
        on_change = self._on_change()
        if on_change is None:
            return False
        on_change()
        return True


def _log_loss(state: RetryCallState) -> None:
    reason, _, _ = str(state.outcome and state.outcome.exception()).partition("\n")
    level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
    log.log(level, "shardids: changes of the placement are missed until the catalog answers: %s", reason)
