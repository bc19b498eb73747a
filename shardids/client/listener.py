"""Keeps the placement that is known up with the catalog's, by LISTEN: no polling."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
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
from shardids.catalog.topology import Placement
from shardids.errors import ShardidsError

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
"""Upper ends of the random wait before the first and the last of the attempts to reconnect."""

_CLOSING_S = 1.0
"""How long :meth:`PlacementListener.close` waits for a thread that is just connecting."""

_LONGEST_READ_S = 10.0
"""How long the next read of the placement waits for one that hangs, before it goes on without it."""

_CONNECT_ARGS = {
    "application_name": "shardids listener",
    "connect_timeout": 10,
    # A server or a firewall that vanished silently is noticed within a minute.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


class FollowedPlacement:
    """The placement as last read. From the first time that it is asked for on, a thread keeps it current.

    Args:
        catalog: where it is read.
        listen: whether to follow it; if not, :meth:`refresh` alone reads it anew.
    """

    _next: Future[None] | None
    _running: Future[None]

    def __init__(self, catalog: Catalog, *, listen: bool) -> None:
        self._catalog = catalog
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

    def refresh(self) -> None:
        """Reads it anew. Raises ShardidsError if that can't be done; what was read last stays."""
        placement = self._catalog.placement()
        with self._lock:
            is_newer = placement.version > self._placement.version
            # Two readers may come back in the other order.
            if placement.version >= self._placement.version:
                self._placement = placement
            watchers = list(self._watchers) if is_newer else []
        for tell in watchers:
            tell()

    def try_refresh(self, patience_s: float | None = None) -> bool:
        """Reads it anew; returns whether it could, in ``patience_s`` seconds. If not, a warning is logged.

        However many threads ask at once, one read is under way, and one more waits for all who asked since.
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
        log.warning("shardids: routing goes on with what is known: %s", reason)
        return False

    def _next_read(self) -> Future[None]:
        """A read that has not begun yet: it finds all that was committed before this call."""
        with self._lock:
            if self._next is not None:
                return self._next
            self._next = read = Future[None]()
        reading = Thread(target=self._read, args=(read,), name="shardids placement", daemon=True)
        try:
            reading.start()
        except RuntimeError:
            # The interpreter is about to exit.
            self._read(read)
        return read

    def _read(self, read: Future[None]) -> None:
        wait([self._running], _LONGEST_READ_S)
        with self._lock:
            self._running, self._next = read, None
        try:
            self.refresh()
        except BaseException as error:  # noqa: BLE001 -- who asked gets it
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
        """Ends the thread."""
        if self._listener:
            self._listener.close()

    def _reset(self) -> None:
        # Again in the child of a fork, where the old lock may be held by a thread that is not there.
        self._lock = Lock()
        self._watchers: list[Callable[[], object]] = []
        self._next = None
        self._running = Future()
        self._running.set_result(None)


class PlacementListener:
    """A daemon thread with one connection to the catalog, asleep until a change is notified.

    It calls ``on_change`` whenever it has connected and after every notification. When the connection is
    lost, or ``on_change`` raises, it connects again, after waits that are random and grow up to 30 s.

    Args:
        catalog_url: the catalog, not through a pooler in transaction mode: LISTEN needs its own session.
        on_change: a bound method; it is called in the thread. Its object is held weakly.
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
        # Again in the child of a fork, where the thread is not.
        self._lock = Lock()
        self._closing = Event()
        self._thread = None
        if self._bell is not None:
            self._bell.close()
        self._bell = None

    def start(self) -> None:
        """Starts the thread if it was not started yet. Returns at once."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    ear, self._bell = socket.socketpair()
                    self._thread = Thread(
                        target=self._run, args=(ear,), name="shardids listener", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Ends the thread and its connection, for good; within a second, even if it is just connecting."""
        self._closing.set()
        with self._lock:
            thread, bell, self._bell = self._thread, self._bell, None
        if bell is not None:
            # Closing alone would not be heard while the child of a fork holds a copy.
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
                        # The waits grow with this number: they begin anew.
                        attempt.retry_state.attempt_number = 1
                        self._follow(connection, ear)

    @contextmanager
    def _listening(self) -> Iterator[psycopg.Connection]:
        with self._engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql("listen shardids_placement")
            # What is no transaction is not rolled back when the connection is lost.
            connection.commit()
            yield cast(psycopg.Connection, connection.connection.driver_connection)

    def _follow(self, connection: psycopg.Connection, ear: socket.socket) -> None:
        """Passes notifications on until ``ear`` or the last who could be told is closed."""
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
        """Returns whether there was somebody to be told."""
        # A reference in a frame that sleeps would keep the object alive.
        on_change = self._on_change()
        if on_change is None:
            return False
        on_change()
        return True


def _log_loss(state: RetryCallState) -> None:
    reason, _, _ = str(state.outcome and state.outcome.exception()).partition("\n")
    level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
    log.log(level, "shardids: changes of the placement are not heard until the catalog answers: %s", reason)
