"""Connections to the catalog and the nodes that stay open between questions, with bounded patience."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from shardids.catalog.nodes import administrative_engine
from shardids.errors import BadArgument, ConnectionFailed, ShardidsError
from shardids.logs import logger
from shardids.pg.queries import DROPPED_MEANWHILE
from shardids.pg.urls import parse_url, with_login_of

ATTEMPTS: Final = 3
"""How often what changes while it is read is asked for."""

T = TypeVar("T")
Question = Callable[[Connection], T]

log = logger("facts")


def collect(read: Callable[[bool], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """Return the fields that ``read`` yields; with an ``error``, the rest may be missing.

    Where an object is dropped meanwhile, everything is read again; ``read`` is called with whether it would.

    Raises:
        BadArgument: as ``read`` does.
    """
    for attempt in range(ATTEMPTS):
        known: dict[str, Any] = {}
        is_last = attempt == ATTEMPTS - 1
        try:
            for fields in read(not is_last):
                known |= fields
        except BadArgument:
            raise
        except ShardidsError as error:
            known["error"] = error
            if error.sqlstate in DROPPED_MEANWHILE and not is_last:
                continue
        break
    return known


class Server:
    """A database that is asked few questions at once, each in a thread: a silent one keeps nobody waiting.

    Its transactions are read-only.
    """

    def __init__(
        self, what: str, url: str | URL, login: URL, *, name: str, at_once: int, connect_timeout_s: int
    ) -> None:
        self.what = what
        self._url = url
        self._login = login
        self._name = name
        self._at_once = at_once
        self._connect_timeout_s = connect_timeout_s
        self._engine: Engine | None = None
        self._is_closed = False
        self._lock = Lock()
        self._free = BoundedSemaphore(at_once)

    def asked(self, question: Question[T]) -> Future[T | ShardidsError]:
        """Ask, and return the answer as a future; a failure of any kind is an answer."""
        answer: Future[T | ShardidsError] = Future()
        if not self._free.acquire(timeout=1.0):
            answer.set_result(
                ConnectionFailed(f"{self.what} is still at work on other questions", hint="Ask again later.")
            )
            return answer
        # One that waits for a silent server does not keep the process from ending.
        Thread(target=self._answer, args=(question, answer), name=self._name, daemon=True).start()
        return answer

    def close(self) -> None:
        """Close the connections, those that are in use when they are given back."""
        with self._lock:
            self._is_closed = True
            if self._engine is not None:
                self._engine.dispose()

    def rest(self) -> None:
        """Close the connections that are not in use; the next question opens others."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()

    def _answer(self, question: Question[T], answer: Future[T | ShardidsError]) -> None:
        found: T | ShardidsError
        try:
            with self._connected() as connection:
                found = question(connection)
        except ShardidsError as error:
            found = error
        except Exception as error:
            log.exception("a question to %s failed", self.what)
            found = ShardidsError(f"{self.what} can't be asked: {type(error).__name__}")
        finally:
            self._free.release()
        answer.set_result(found)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        connection = self._opened().connect()
        try:
            yield connection
        finally:
            with self._lock:
                if self._is_closed:
                    # A pool that was disposed of would keep it open.
                    connection.invalidate()
                connection.close()

    def _opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                engine = administrative_engine(
                    with_login_of(parse_url(self._url), self._login),
                    what=self.what,
                    application_name=self._name,
                    # A question may have one of its own beside it, for what others own.
                    connections=2 * self._at_once,
                    connect_timeout_s=self._connect_timeout_s,
                )
                self._engine = engine.execution_options(postgresql_readonly=True)
            return self._engine


class Servers:
    """The catalog and the nodes of a cluster; the catalog's user also logs in to the nodes.

    Args:
        catalog_url: the catalog.
        name: of the sessions and threads.
        at_once: how many questions each server is asked at once.
        connect_timeout_s: how long each address of a server is tried, in seconds.
    """

    def __init__(
        self, catalog_url: str | URL, *, name: str, at_once: int = 1, connect_timeout_s: int
    ) -> None:
        self._login = parse_url(catalog_url)
        self._name = name
        self._at_once = at_once
        self._connect_timeout_s = connect_timeout_s
        self._nodes: dict[tuple[str, str], Server] = {}
        self._lock = Lock()
        self.catalog = self._server("the catalog", self._login)

    def node(self, name: str, url: str) -> Server:
        """Return a node's server."""
        with self._lock:
            if (name, url) not in self._nodes:
                self._nodes[name, url] = self._server(f'node "{name}"', url)
            return self._nodes[name, url]

    def keep(self, there: Collection[tuple[str, str]]) -> None:
        """Close the connections to databases that are nodes no more: nobody could drop these."""
        with self._lock:
            for gone in self._nodes.keys() - there:
                self._nodes.pop(gone).close()

    def close(self) -> None:
        """Close all connections."""
        self.catalog.close()
        self.keep(())

    def rest(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            nodes = list(self._nodes.values())
        for server in (self.catalog, *nodes):
            server.rest()

    def _server(self, what: str, url: str | URL) -> Server:
        return Server(
            what,
            url,
            self._login,
            name=self._name,
            at_once=self._at_once,
            connect_timeout_s=self._connect_timeout_s,
        )
