"""Connections of psycopg that share one connection to a node: each is a user of its one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import psycopg
from psycopg import waiting
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus

from shardids.testing.savepoints import SharedTransaction, User


class _Info(psycopg.ConnectionInfo):
    """Facts of a seat: the state of its user's transaction, and otherwise those of the shared connection."""

    def __init__(self, seat: _Seat) -> None:
        super().__init__(seat.shared.connection.pgconn)
        self._user = seat.user

    @property
    def transaction_status(self) -> TransactionStatus:
        if self._user.has_failed:
            return TransactionStatus.INERROR
        return TransactionStatus.INTRANS if self._user.is_begun else TransactionStatus.IDLE


class _Seat:
    """A part of both kinds of connection: settings that belong to a session are kept, and have no effect."""

    user: User
    shared: SharedTransaction
    isolation_level: Any = None
    deferrable: Any = None
    # Names of prepared statements are the session's, and several connections would give the same.
    prepare_threshold: int | None = None
    _is_given_up = False

    def sit(self, shared: SharedTransaction, context: Any, cursors: Any) -> Self:
        """Take part in a shared transaction; ``context`` has adapters, ``cursors`` is a class or ``None``."""
        this: Any = self
        self.shared, self.user = shared, User()
        # psycopg warns of a connection of its own that nobody closed.
        this._pool = None
        this._prepared.prepare_threshold = None
        if context is not None:
            this._adapters = AdaptersMap(context.adapters)
        this.cursor_factory = seated(cursors or this.cursor_factory)
        this.server_cursor_factory = seated(this.server_cursor_factory)
        return self

    @property
    def info(self) -> psycopg.ConnectionInfo:
        return _Info(self)

    @property
    def closed(self) -> bool:
        return self._is_given_up or self.shared.connection.closed

    @property
    def autocommit(self) -> bool:
        return self.user.is_autocommit

    @autocommit.setter
    def autocommit(self, value: bool) -> None:
        self.user.is_autocommit = bool(value)

    @property
    def read_only(self) -> bool:
        return self.user.reads_only

    @read_only.setter
    def read_only(self, value: bool | None) -> None:
        self.user.reads_only = bool(value)

    def leave_behind(self) -> None:
        """Be closed from now on: the test that it was of has ended."""
        self._is_given_up = True

    def _give_up(self) -> None:
        if not self.closed:
            self.shared.rollback(self.user)
        self._is_given_up = True


class Seat(_Seat, psycopg.Connection[Any]):  # type: ignore[misc]  # attributes in place of properties
    """A connection as psycopg's, whose transactions are savepoints."""

    def commit(self) -> None:
        """Keep the work."""
        self.shared.commit(self.user)

    def rollback(self) -> None:
        """Undo the work. Raises BadArgument where that of others would be undone."""
        self.shared.rollback(self.user)

    def close(self) -> None:
        """Undo uncommitted work; the connection to the node stays."""
        self._give_up()

    def set_autocommit(self, value: bool) -> None:
        """Set it."""
        self.autocommit = value

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait as psycopg does, while no other user waits."""
        with self.shared.lock:
            return super().wait(gen, *arguments, **options)


class AsyncSeat(_Seat, psycopg.AsyncConnection[Any]):  # type: ignore[misc]  # see Seat
    """A connection as psycopg's for asyncio. The event loop waits for each of its statements."""

    async def commit(self) -> None:
        """Keep the work."""
        self.shared.commit(self.user)

    async def rollback(self) -> None:
        """Undo the work. Raises BadArgument where that of others would be undone."""
        self.shared.rollback(self.user)

    async def close(self) -> None:
        """Undo uncommitted work; the connection to the node stays."""
        self._give_up()

    async def set_autocommit(self, value: bool) -> None:
        """Set it."""
        self.autocommit = value

    async def set_read_only(self, value: bool | None) -> None:
        """Set it for the transactions that begin after this."""
        self.read_only = value

    async def set_isolation_level(self, value: Any) -> None:
        """Keep it."""
        self.isolation_level = value

    async def set_deferrable(self, value: Any) -> None:
        """Keep it."""
        self.deferrable = value

    async def wait(self, gen: Any, *_arguments: Any, **_options: Any) -> Any:
        """Wait without the event loop: while a user waits, no other one may send."""
        with self.shared.lock:
            return waiting.wait(gen, self.pgconn.socket)


@cache
def seated(cursors: type[Any]) -> type[Any]:
    """Return a class of cursors whose statements are those of a seat."""
    is_async = issubclass(cursors, psycopg.AsyncCursor | psycopg.AsyncServerCursor)
    return type(cursors.__name__, (_AsyncCursor if is_async else _Cursor, cursors), {})


class _Cursor:
    """A part of psycopg's cursors."""

    connection: Any
    statusmessage: str | None

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        with self.connection.shared.statement(self.connection.user, query) as sent:
            if sent.statement is not None:
                super().execute(sent.statement, params, **options)  # type: ignore[misc]  # psycopg's
                sent.status = self.statusmessage
        return self

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        with self.connection.shared.statement(self.connection.user, query) as sent:
            super().executemany(sent.statement, params_seq, **options)  # type: ignore[misc]  # psycopg's
            sent.status = self.statusmessage

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        with self.connection.shared.statement(self.connection.user, statement) as sent:
            with super().copy(sent.statement, params, **options) as copy:  # type: ignore[misc]  # psycopg's
                yield copy
            sent.status = self.statusmessage

    def stream(self, *_: Any, **_options: Any) -> Any:
        raise psycopg.NotSupportedError("cursor.stream() can't be used in a test that is rolled back")


class _AsyncCursor:
    """A part of psycopg's cursors for asyncio."""

    connection: Any
    statusmessage: str | None

    async def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        with self.connection.shared.statement(self.connection.user, query) as sent:
            if sent.statement is not None:
                await super().execute(sent.statement, params, **options)  # type: ignore[misc]  # psycopg's
                sent.status = self.statusmessage
        return self

    async def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        with self.connection.shared.statement(self.connection.user, query) as sent:
            await super().executemany(sent.statement, params_seq, **options)  # type: ignore[misc]  # psycopg's
            sent.status = self.statusmessage

    def copy(self, *_: Any, **_options: Any) -> Any:
        raise psycopg.NotSupportedError("an async cursor can't COPY in a test that is rolled back")

    stream = copy
