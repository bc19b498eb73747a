"""Tests that are rolled back: all clusters of the process, and Django, share one transaction per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Final
from weakref import WeakSet

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.pool import Pool

from shardids.client.engines import substitute_all
from shardids.testing.savepoints import SharedTransaction
from shardids.testing.seats import AsyncSeat, Seat

_OF_THE_SERVER: Final = ("service", "host", "hostaddr", "port", "dbname", "user")
_OF_SEATS: Final = ("autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory")


class HeldNodes:
    """A substitute for the connections to all nodes: :class:`shardids.client.engines.Substitute`.

    Its connections to nodes stay open from test to test while :meth:`kept` lasts.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, ...], SharedTransaction] = {}
        self._taken: list[tuple[Engine, Pool, Callable[..., Any]]] = []
        self._seats = WeakSet[Seat | AsyncSeat]()
        self._lock = Lock()
        self._depth = 0
        self._keepers = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep connections open between tests, to the end of the block."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1
            self._close_unless_kept()

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Undo all that is done on nodes in the block, committed or not."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin a test, or a part of one."""
        if not self._depth:
            substitute_all(self)
        for shared in self._nodes.values():
            shared.enter()
        self._depth += 1

    def end(self) -> None:
        """Let the sessions of the part end in any order: :meth:`leave` undoes their work, and comes next."""
        for shared in self._nodes.values():
            shared.is_ending = True

    def leave(self) -> None:
        """Undo the work since the last :meth:`enter`, and end its part."""
        self.end()
        self._depth -= 1
        for key, shared in list(self._nodes.items()):
            try:
                shared.leave()
            except psycopg.Error:
                # The server was stopped, or has ended the session: what was not committed is gone.
                shared.connection.close()
                del self._nodes[key]
        if not self._depth:
            self._give_back()

    def take(self, engine: Engine) -> None:
        """Give an engine's connections: see :class:`shardids.client.engines.Substitute`."""

        def connect(dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> Any:
            if not dialect.is_async:
                return self._seat(Seat, parameters)
            parameters["async_creator_fn"] = self._async_seat
            return None

        event.listen(engine, "do_connect", connect)
        self._taken.append((engine, engine.pool, connect))
        engine.pool = engine.pool.recreate()

    def pool(self, arguments: dict[str, Any], configure: Callable[[Any], object]) -> Any:
        """Return a pool: see :class:`shardids.client.engines.Substitute`."""
        return _HeldPool(lambda: self._seat(Seat, {**arguments, "autocommit": True}), configure)

    async def _async_seat(self, *_: Any, **parameters: Any) -> AsyncSeat:
        seat: AsyncSeat = self._seat(AsyncSeat, parameters)
        return seat

    def _seat(self, kind: type[Any], parameters: dict[str, Any]) -> Any:
        shared = self._shared(parameters)
        seat = kind(shared.connection.pgconn).sit(
            shared, parameters.get("context"), parameters.get("cursor_factory")
        )
        seat.autocommit = parameters.get("autocommit", False)
        self._seats.add(seat)
        return seat

    def _shared(self, parameters: dict[str, Any]) -> SharedTransaction:
        key = tuple(str(parameters.get(name, "")) for name in _OF_THE_SERVER)
        # Sessions over all shards, and claims of asyncio, connect in threads.
        with self._lock:
            if key not in self._nodes:
                to_server = {name: value for name, value in parameters.items() if name not in _OF_SEATS}
                connection = psycopg.connect(**to_server, autocommit=True, prepare_threshold=None)
                self._nodes[key] = SharedTransaction(connection, self._has_written)
            shared = self._nodes[key]
            while shared.depth < self._depth:
                shared.enter()
        return shared

    def _has_written(self) -> bool:
        return any(shared.has_written for shared in self._nodes.values())

    def _give_back(self) -> None:
        substitute_all(None)
        for engine, pool, connect in self._taken:
            event.remove(engine, "do_connect", connect)
            engine.pool = pool
        self._taken.clear()
        for seat in list(self._seats):
            seat.leave_behind()
        self._close_unless_kept()

    def _close_unless_kept(self) -> None:
        if not self._keepers and not self._depth:
            for shared in self._nodes.values():
                with suppress(psycopg.Error):
                    shared.connection.close()
            self._nodes.clear()


class _HeldPool:
    """The methods of psycopg's pool that Django's backend calls."""

    def __init__(self, connect: Callable[[], Any], configure: Callable[[Any], object]) -> None:
        self._connect = connect
        self._configure = configure

    def open(self) -> None:
        """Do nothing."""

    def getconn(self) -> Any:
        """Return a connection."""
        connection = self._connect()
        connection._pool = self
        self._configure(connection)
        return connection

    def putconn(self, connection: Any) -> None:
        """Give a connection up."""
        connection.close()


held_nodes: Final = HeldNodes()
"""The one of the process: clusters that the application makes itself are in it as well."""
