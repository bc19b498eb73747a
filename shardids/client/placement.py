"""The placement as last read, kept current by LISTEN on the catalog; and attempts to reach a shard's owner.

Listening needs no polling. What runs on the owner of a shard is repeated, waits or gives up by
:class:`Attempts`, when its node refuses.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import TIMEOUT_MAX, Event, Lock, Thread, current_thread
from typing import NoReturn, TypeVar, cast
from weakref import WeakMethod, finalize

import psycopg
from sqlalchemy import exc
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet
from tenacity import RetryCallState, Retrying
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set
from tenacity.wait import wait_random_exponential

from shardids.catalog.keys.homes import read_known
from shardids.catalog.keys.known import NO_HOMES, KnownHomes
from shardids.catalog.moves import ARRIVALS
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, OldIdRules, Placement
from shardids.errors import BadArgument, KeyMoved, NodeDown, ShardFenced, ShardidsError, ShardMoved
from shardids.logs import logger, shown_error
from shardids.pg.connections import has_stale_plan, in_child, may_have_moved, open_engine

log = logger("client")

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long to wait for a shard that has moved. Its cutover takes less than ``--max-pause``, by default 2 s,
most of it before the old node refuses."""
_FENCED_PATIENCE_S = 0.25
"""How long to wait for a shard that is only fenced, as one in a cutover seems until that is committed."""
_LEAST_READ_S = 1.0
"""How long to wait for the catalog at least, even if the patience is shorter or used up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
"""Upper bounds of the random wait before the first attempt to reconnect, and before late ones."""

_CLOSING_S = 1.0
"""How long :meth:`PlacementListener.close` waits for a thread that is connecting."""

_FIRST_READ_S = 5.0
"""How long the first use waits for the placement that is read once the catalog is listened to."""

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


class MustBeAwaited(BadArgument):
    """A server would have to be asked, and the caller is an event loop's own code."""


class FollowedPlacement:
    """The placement as last read. From its first use on, a thread keeps it current.

    The first use waits until it is read again: changes since it was read first were not notified.

    Args:
        catalog: where it is read.
        listen: whether to follow it; otherwise only :meth:`refresh` reads it again.
        on_retry: is called with the error for each transaction that is run again because of it.

    Attributes:
        asks_in_threads: whether an event loop runs where questions come from: threads ask servers then.
        on_arrival: is called, in a thread, with the shard, the source and the target of a move that is about
            to end.
    """

    _next: Future[None] | None
    _running: Future[None]

    def __init__(
        self,
        catalog: Catalog,
        *,
        listen: bool,
        on_retry: Callable[[ShardidsError | DBAPIError], object] | None = None,
    ) -> None:
        self._catalog = catalog
        self.on_retry = on_retry
        self.asks_in_threads = False
        self.on_arrival: Callable[[int, Node, Node], object] = lambda _shard, _source, _target: None
        self._homes = NO_HOMES
        self._placement = catalog.placement()
        self._homes = self._homes_with(self._placement)
        self._listener = PlacementListener(catalog.url, self._heed, self._expect) if listen else None
        self._reset()
        in_child(self, FollowedPlacement._reset)
        if self._listener:
            finalize(self, self._listener.close)

    @property
    def current(self) -> Placement:
        """The placement as last read."""
        if not self._is_followed:
            self.follow()
        return self._placement

    @property
    def homes(self) -> KnownHomes:
        """The directory of keys as last read."""
        if not self._is_followed:
            self.follow()
        return self._homes

    def follow(self) -> None:
        """Start to listen, and wait until the placement is read once more, or can't be: see the class.

        An event loop's own code does not wait: :meth:`shardids.AsyncCluster.connect` has, in a thread.
        """
        if self._listener is not None:
            self._listener.start()
            with suppress(MustBeAwaited):
                self.asked(partial(self._await_listener, self._listener), "the placement is read")
                self._is_followed = True

    @staticmethod
    def _await_listener(listener: PlacementListener) -> None:
        if not listener.has_tried.wait(_FIRST_READ_S):
            _warn_of_known("the catalog has not answered in time")

    @property
    def last_read(self) -> Placement:
        """The placement as last read. It starts no thread."""
        return self._placement

    @property
    def old_ids(self) -> OldIdRules | None:
        """The rules for old IDs as last read: the same object until they change. It starts no thread."""
        return self._placement.old_ids

    def asked(self, ask: Callable[[], T], what: str) -> T:
        """Call ``ask``, which asks servers and blocks: in a thread, where an event loop runs.

        Raises:
            MustBeAwaited: the caller is the loop's own code; ``what`` names the call.
        """
        if not self.asks_in_threads:
            return ask()
        if in_greenlet():
            return await_only(asyncio.to_thread(ask))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return ask()
        raise MustBeAwaited(
            f"{what}, which has to be awaited",
            hint="await cluster.at(…) does; so do its run() and the statements of sharded_session().",
        )

    def refresh(self) -> None:
        """Read it again. Raises ShardidsError if that fails; the last placement stays."""
        placement = self._catalog.placement()
        homes = self._homes_with(placement)
        with self._lock:
            known = max(self._homes, homes, key=lambda one: one.version)
            is_newer = placement.version > self._placement.version
            # Two readers may return in the opposite order.
            if placement.version < self._placement.version:
                placement = self._placement
            if placement.old_ids is not None and placement.old_ids == self._placement.old_ids:
                placement = replace(placement, old_ids=self._placement.old_ids)
            # The directory was read later. Who routes by it can tell by the placement that it has changed.
            self._placement = replace(placement, homes_version=known.version)
            self._homes = known
            watchers = list(self._watchers) if is_newer else []
        for tell in watchers:
            tell()

    def _homes_with(self, placement: Placement) -> KnownHomes:
        """Return the directory of keys that belongs to a placement, or a newer one."""
        known = self._homes
        if placement.homes_version == known.version:
            return known
        return read_known(self._catalog.engine, known)

    def _heed(self) -> None:
        """Read it after a notification, for all that ask meanwhile. Raises as :meth:`refresh` does."""
        self._next_read().result()

    def try_refresh(
        self, patience_s: float | None = None, *, is_enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """Read it again within ``patience_s`` seconds; return whether it could, and logs a warning if not.

        However many threads ask at once, one read runs, and one more is queued for all that asked since. It
        is not queued if the read that runs brings what ``is_enough`` looks for.
        """
        until = None if patience_s is None else time.monotonic() + patience_s
        wait([self._running], patience_s)
        if is_enough():
            return True
        try:
            self._next_read().result(None if until is None else max(until - time.monotonic(), 0))
        except ShardidsError as error:
            reason = error.message
        except exc.TimeoutError as error:
            reason = str(error)
        except TimeoutError:
            reason = "the catalog has not answered in time"
        else:
            return True
        _warn_of_known(reason)
        return False

    def _next_read(self) -> Future[None]:
        """Return a read that has not begun yet: it finds all that was committed before this call."""
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

    def _expect(self, arrival: str) -> None:
        """Heed the notice of a move, ``shard node``; any role may have sent it."""
        shard, _, name = arrival.partition(" ")
        placement = self._placement
        source = placement.node_of.get(int(shard)) if shard.isdecimal() and len(shard) < 6 else None
        if (
            source not in (None, name)
            and name in placement.nodes
            and self._is_expecting.acquire(blocking=False)
        ):
            move = int(shard), placement.nodes[source], placement.nodes[name]
            try:
                Thread(target=self._prepare, args=move, name="shardids arrival", daemon=True).start()
            except RuntimeError:  # The interpreter is exiting.
                self._is_expecting.release()

    def _prepare(self, shard: int, source: Node, target: Node) -> None:
        try:
            self.on_arrival(shard, source, target)
        finally:
            self._is_expecting.release()

    @contextmanager
    def watched(self, on_change: Callable[[], object]) -> Iterator[None]:
        """Call ``on_change`` for each newer placement read during the block, in the thread that read it."""
        with self._lock:
            self._watchers.append(on_change)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(on_change)

    def close(self) -> None:
        """Stop the thread."""
        if self._listener:
            self._listener.close()
        # No other is begun.
        if self._is_expecting.acquire(timeout=_CLOSING_S):
            self._is_expecting.release()

    def _reset(self) -> None:
        # Also in the child of a fork, where a thread that does not exist there may hold the old lock.
        self._lock, self._is_expecting = Lock(), Lock()
        self._watchers: list[Callable[[], object]] = []
        self._is_followed = self._listener is None
        self._next = None
        self._running = Future()
        self._running.set_result(None)


def _warn_of_known(reason: str) -> None:
    log.warning("shardids: routing continues with the known placement: %s", reason)


class Attempts:
    """The attempts to run one transaction on the owner of a shard.

    For one thread or task, which calls :meth:`next_node` and, after a failure, :meth:`pause_after` in turn.

    Args:
        followed: the placement.
        shard: the shard.
        patience_s: how long to wait, from the first refusal on, for a shard or a key that has moved, and for
            a catalog that does not answer.
        locate: returns the shard as it is known now, where another one may have taken the key over.
        located_at: the version of the directory of keys that ``shard`` was found with.

    Attributes:
        made: how many attempts were begun.
        shard: the shard of the next attempt.
    """

    def __init__(
        self,
        followed: FollowedPlacement,
        shard: int,
        patience_s: float,
        locate: Callable[[], int] | None = None,
        located_at: int = 0,
    ) -> None:
        self._followed = followed
        self.shard = shard
        self._locate, self._located_at = locate, located_at
        self._patience_s = patience_s
        self._node: Node | None = None
        self._refused_at: float | None = None
        self._fenced_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._could_read = True
        self.made = 0

    def next_node(self) -> Node:
        """Return the node to try now; :attr:`shard` is found anew if the directory of keys has changed.

        Raises:
            UnknownShard: no node holds the shard.
        """
        self._node = None
        self.made += 1
        if self._locate is not None and self._has_newer_homes():
            self._located_at = self._followed.homes.version
            self.shard = self._locate()
        self._node = self._followed.current.locate(self.shard)
        return self._node

    def pause_after(self, error: ShardidsError | DBAPIError) -> float:
        """Return how many seconds to wait before the next attempt: 0 if the shard has a new owner.

        Reads the catalog, unless it is known already.

        Raises:
            ShardidsError, DBAPIError: ``error``, with the attempts so far, if another one cannot help.
        """
        is_stale = has_stale_plan(error)
        if not (is_stale or may_have_moved(error)):
            raise error
        if isinstance(error, NodeDown):
            # The attempts that failed before have read the catalog.
            if self._has_moved():
                return 0.0
            raise error
        is_first = self._refused_at is None
        self._refused_at = self._refused_at or time.monotonic()
        if is_stale and (is_first or time.monotonic() < self._refused_at + self._patience_s):
            return 0.0
        left_s = self._refused_at + self._patience_s - time.monotonic()
        patience_s = min(max(left_s, _LEAST_READ_S), TIMEOUT_MAX)
        self._could_read = self._followed.try_refresh(patience_s, is_enough=self._has_moved)
        left_s = self._refused_at + self._patience_s - time.monotonic()
        if self._has_moved() and (is_first or left_s > 0):
            self._tell(error, "")
            return 0.0
        if not isinstance(error, ShardFenced | KeyMoved) or (
            isinstance(error, KeyMoved) and self._locate is None
        ):
            raise error
        left_s = min(left_s, self._left_of_a_fence_s(error))
        if left_s <= 0:
            self._give_up(error)
        pause_s, self._pause_s = min(self._pause_s, left_s), min(self._pause_s * 2, _LONGEST_PAUSE_S)
        self._tell(error, f" in {pause_s:g} s")
        return pause_s

    def _tell(self, error: ShardidsError | DBAPIError, when: str) -> None:
        if log.isEnabledFor(logging.INFO):
            node = self._followed.current.node_of.get(self.shard)
            log.info(
                'shard %s: a transaction is run again on node "%s"%s: %s',
                self.shard,
                node,
                when,
                shown_error(error),
                extra={"shard": self.shard, "node": node, "error": type(error).__name__},
            )
        if self._followed.on_retry is not None:
            self._followed.on_retry(error)

    def repeat(self, transaction: Callable[[Node], T]) -> T:
        """Call ``transaction`` with the shard's owner until it succeeds or another attempt cannot help.

        In an event loop it is called in a greenlet, as SQLAlchemy's ``greenlet_spawn`` makes one, and blocks
        no thread while it waits.

        Raises:
            ShardidsError, DBAPIError: what :meth:`pause_after` raises.
        """
        in_loop = self._followed.asks_in_threads and in_greenlet()
        while True:
            try:
                return transaction(self.next_node())
            except (ShardidsError, DBAPIError) as error:
                reading = partial(self.pause_after, error)
                pause_s = await_only(asyncio.to_thread(reading)) if in_loop else reading()
            if in_loop:
                await_only(self._wait_in_loop(pause_s))
            else:
                self.wait(pause_s)

    def wait(self, seconds: float) -> None:
        """Wait until the shard has another node than the one that was tried, or the time has passed."""
        until, changed = time.monotonic() + seconds, Event()
        with self._followed.watched(changed.set):
            while not self._has_moved() and changed.wait(max(until - time.monotonic(), 0)):
                changed.clear()

    async def _wait_in_loop(self, seconds: float) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # The loop has been closed.
                loop.call_soon_threadsafe(changed.set)

        with self._followed.watched(tell), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._has_moved():
                    await changed.wait()
                    changed.clear()

    def _has_moved(self) -> bool:
        """Return whether the shard has another node than was tried last, or the directory has changed."""
        if self._has_newer_homes():
            return True
        placement = self._followed.current
        name = placement.node_of.get(self.shard)
        return name is not None and placement.nodes[name] != self._node

    def _has_newer_homes(self) -> bool:
        return self._locate is not None and self._followed.homes.version != self._located_at

    def _left_of_a_fence_s(self, error: ShardFenced | KeyMoved) -> float:
        now = time.monotonic()
        if isinstance(error, ShardMoved | KeyMoved):
            self._fenced_at = None
            return float("inf")
        self._fenced_at = self._fenced_at or now
        return self._fenced_at + _FENCED_PATIENCE_S - now

    def _give_up(self, error: ShardFenced | KeyMoved) -> NoReturn:
        if not isinstance(error, ShardMoved | KeyMoved) or self._patience_s <= 0:
            raise error
        if not self._could_read:
            raise type(error)(
                f"{error.message}, but the catalog, which names its new node, could not be read",
                hint="Check that the catalog's server is up and reachable, then run it again.",
            ) from error
        if isinstance(error, KeyMoved):
            raise KeyMoved(
                f"{error.message}, but the catalog did not record that within {self._patience_s:g} s",
                hint="Check whether its move was interrupted or takes longer: shardids tenant move --list",
            ) from error
        raise ShardMoved(
            f"{error.message}, but the catalog did not record that within {self._patience_s:g} s",
            hint="Check whether its move was interrupted or takes longer: shardids shard move --list",
        ) from error


class PlacementListener:
    """A daemon thread with one connection to the catalog, which sleeps until it is notified of a change.

    It calls ``on_change`` whenever it has connected and after every notification. When the connection is
    lost or ``on_change`` raises, it reconnects after random waits that grow to 30 s.

    Args:
        catalog_url: the catalog, not through a pooler in transaction mode: LISTEN needs its own session.
        on_change: a bound method, called in the thread. Its object is held weakly.
        on_arrival: likewise; called with the notice of a move that is about to end.

    Attributes:
        has_tried: set when ``on_change`` was called once, or the catalog could not be listened to.
    """

    def __init__(
        self, catalog_url: URL, on_change: Callable[[], object], on_arrival: Callable[[str], object]
    ) -> None:
        self._on_change = WeakMethod(on_change)
        self._on_arrival = WeakMethod(on_arrival)
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
        self.has_tried = Event()
        self._thread = None
        if self._bell is not None:
            self._bell.close()
        self._bell = None

    def start(self) -> None:
        """Start the thread unless it was started before. Returns at once."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    ear, self._bell = socket.socketpair()
                    self._thread = Thread(
                        target=self._run, args=(ear,), name="shardids listener", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Stop the thread and its connection for good, within a second even while it is connecting."""
        self._closing.set()
        self.has_tried.set()
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
            before_sleep=self._note_loss,
            retry_error_callback=lambda _state: None,
        )
        with ear:
            for attempt in attempts:
                with attempt, self._listening() as connection:
                    if self._tell():
                        self.has_tried.set()
                        # The waits grow with this number: start over.
                        attempt.retry_state.attempt_number = 1
                        self._follow(connection, ear)

    @contextmanager
    def _listening(self) -> Iterator[psycopg.Connection]:
        with self._engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql(f"listen shardids_placement; listen {ARRIVALS}")
            # Outside a transaction, nothing is rolled back when the connection is lost.
            connection.commit()
            yield cast(psycopg.Connection, connection.connection.driver_connection)

    def _follow(self, connection: psycopg.Connection, ear: socket.socket) -> None:
        """Pass notifications on until ``ear`` is closed or the object of ``on_change`` is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(ear, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while ear not in {key.fileobj for key, _ in selector.select()}:
                connection.pgconn.consume_input()
                notified = False
                while (notice := connection.pgconn.notifies()) is not None:
                    if notice.relname == ARRIVALS.encode():
                        self._announce(notice.extra.decode(errors="replace"))
                    else:
                        notified = True
                if notified and not self._tell():
                    return

    def _announce(self, arrival: str) -> None:
        on_arrival = self._on_arrival()
        if on_arrival is not None:
            on_arrival(arrival)

    def _tell(self) -> bool:
        """Call ``on_change``; return whether its object still exists."""
        # A reference in a sleeping frame would keep the object alive.
        on_change = self._on_change()
        if on_change is None:
            return False
        on_change()
        return True

    def _note_loss(self, state: RetryCallState) -> None:
        reason, _, _ = str(state.outcome and state.outcome.exception()).partition("\n")
        level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
        log.log(level, "shardids: changes of the placement are missed until the catalog answers: %s", reason)
        self.has_tried.set()
