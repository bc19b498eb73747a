"""Questions to the catalog and to nodes, beside the readings; a silent server keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock, Thread
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from shardids.catalog.nodes import administrative_engine
from shardids.catalog.queries import prepare
from shardids.catalog.rows import unknown_node
from shardids.catalog.urls import parse_url, with_login_of
from shardids.console.watching import Seen, Watcher
from shardids.errors import ConnectionFailed, ShardidsError
from shardids.logs import logger

ANSWER_S: Final = 4.0
"""How long an answer of a server is waited for."""
STATEMENT: Final = "2s"
"""How long a statement may take."""
_AT_ONCE: Final = 2
_NAME: Final = "shardids console"

T = TypeVar("T")
Question = Callable[[Connection], T]

log = logger("console")


class Databases:
    """Asks the catalog and the nodes that the watcher saw, in read-only transactions with short limits.

    Args:
        catalog_url: the catalog; its user logs in to the nodes, too.
        watcher: says which nodes there are.
    """

    def __init__(self, catalog_url: str | URL, watcher: Watcher) -> None:
        self._login = parse_url(catalog_url)
        self._watcher = watcher
        self._catalog = _Server("the catalog", self._login)
        self._nodes: dict[tuple[str, str], _Server] = {}
        self._lock = Lock()
        watcher.listen(self._follow)

    def of_catalog(self, question: Question[T]) -> T:
        """Returns the catalog's answer.

        Raises:
            ConnectionFailed: it does not answer, or not in time.
        """
        return _answer(self._catalog, self._catalog.asked(question))

    def of_node(self, name: str, question: Question[T]) -> T:
        """Returns a node's answer.

        Raises:
            ConnectionFailed: it does not answer, or not in time.
            ClusterConflict: there is no such node.
        """
        (answer,) = self.of_nodes({name: question}).values()
        if isinstance(answer, ShardidsError):
            raise answer
        return answer

    def of_nodes(
        self, questions: Mapping[str, Question[T]], *, seconds: float = ANSWER_S
    ) -> dict[str, T | ShardidsError]:
        """Asks several nodes at once; returns the answer of each, or why there is none within ``seconds``."""
        servers = {name: self._server(name) for name in questions}
        asked = {
            name: server.asked(questions[name])
            for name, server in servers.items()
            if isinstance(server, _Server)
        }
        wait(asked.values(), seconds)
        answers: dict[str, T | ShardidsError] = {}
        for name, server in servers.items():
            if not isinstance(server, _Server):
                answers[name] = server
                continue
            try:
                answers[name] = _answer(server, asked[name], 0)
            except ShardidsError as error:
                answers[name] = error
        return answers

    def close(self) -> None:
        """Closes the connections that are not in use."""
        for server in (self._catalog, *self._nodes.values()):
            server.close()

    def _server(self, name: str) -> _Server | ShardidsError:
        node = self._watcher.seen().nodes.get(name)
        if node is None:
            return unknown_node(name, self._watcher.seen().nodes)
        if not node.up:
            # To ask it again would take as long as the reading did.
            return node.error or ConnectionFailed(f'node "{name}" does not answer')
        with self._lock:
            if (name, node.url) not in self._nodes:
                url = with_login_of(parse_url(node.url), self._login)
                self._nodes[name, node.url] = _Server(f'node "{name}"', url)
            return self._nodes[name, node.url]

    def _follow(self, seen: Seen) -> None:
        """Closes the connections to databases that are nodes no more: nobody could drop these."""
        there = {(node.name, node.url) for node in seen.nodes.values()}
        with self._lock:
            for gone in self._nodes.keys() - there:
                self._nodes.pop(gone).close()


def _answer(server: _Server, asked: Future[T | ShardidsError], seconds: float = ANSWER_S) -> T:
    wait([asked], seconds)
    if not asked.done():
        raise ConnectionFailed(f"{server.what} has not answered within {ANSWER_S:g} s")
    answer = asked.result()
    if isinstance(answer, ShardidsError):
        raise answer
    return answer


class _Server:
    """A database that is asked few questions at once; who asks more is refused."""

    def __init__(self, what: str, url: URL) -> None:
        self.what = what
        self._url = url
        self._engine: Engine | None = None
        self._is_closed = False
        self._lock = Lock()
        self._free = BoundedSemaphore(_AT_ONCE)

    def asked(self, question: Question[T]) -> Future[T | ShardidsError]:
        answer: Future[T | ShardidsError] = Future()
        if not self._free.acquire(timeout=1.0):
            answer.set_result(
                ConnectionFailed(f"{self.what} is still at work on other questions", hint="Ask again later.")
            )
            return answer
        # One that waits for a silent server does not keep the process from ending.
        Thread(target=self._answer, args=(question, answer), name=_NAME, daemon=True).start()
        return answer

    def _answer(self, question: Question[T], answer: Future[T | ShardidsError]) -> None:
        found: T | ShardidsError
        try:
            with self._connected() as connection, connection.begin():
                prepare(connection)
                connection.exec_driver_sql(f"set local statement_timeout = '{STATEMENT}'")
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
                    self._url,
                    what=self.what,
                    application_name=_NAME,
                    # A question may have one of its own beside it, for what others own.
                    connections=2 * _AT_ONCE,
                    connect_timeout_s=3,
                )
                self._engine = engine.execution_options(postgresql_readonly=True)
            return self._engine

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._engine is not None:
                self._engine.dispose()
