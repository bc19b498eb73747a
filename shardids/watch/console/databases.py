"""Questions to the catalog and to nodes beside the readings, and expensive facts, which are read seldom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from shardids.catalog.revisions import revisions_of_shards
from shardids.catalog.rows import unknown_node
from shardids.errors import ConnectionFailed, MissingPrivilege, ShardidsError
from shardids.logs import logger
from shardids.migrate.environment import VERSION_TABLE
from shardids.pg.locks import bounded_wait
from shardids.pg.queries import prepare
from shardids.pg.reader import Refused
from shardids.watch.console.figures import told
from shardids.watch.console.watching import Seen, Watcher
from shardids.watch.facts.asking import Question, Server, Servers, T

ANSWER_S: Final = 4.0
"""How long an answer of a server is waited for."""
STATEMENT: Final = "2s"
"""How long a statement may take."""
_AT_ONCE: Final = 2
_CONNECT_TIMEOUT_S: Final = 3

log = logger("console")


class Databases:
    """Access to the catalog and the nodes that the watcher saw, in read-only transactions with short limits.

    Args:
        catalog_url: the catalog; its user also logs in to the nodes.
        watcher: knows the nodes.
    """

    def __init__(self, catalog_url: str | URL, watcher: Watcher) -> None:
        self._watcher = watcher
        self._servers = Servers(
            catalog_url, name="shardids console", at_once=_AT_ONCE, connect_timeout_s=_CONNECT_TIMEOUT_S
        )
        watcher.listen(
            lambda seen: self._servers.keep({(node.name, node.url) for node in seen.nodes.values()})
        )

    def of_catalog(self, question: Question[T]) -> T:
        """Return the catalog's answer.

        Raises:
            ConnectionFailed: it does not answer, or not in time.
        """
        server = self._servers.catalog
        return _raised(_answer(server, server.asked(_limited(question)), ANSWER_S))

    def of_node(self, name: str, question: Question[T]) -> T:
        """Return a node's answer.

        Raises:
            ConnectionFailed: it does not answer, or not in time.
            ClusterConflict: the node does not exist.
        """
        (answer,) = self.of_nodes({name: question}).values()
        return _raised(answer)

    def of_nodes(
        self, questions: Mapping[str, Question[T]], *, seconds: float = ANSWER_S
    ) -> dict[str, T | ShardidsError]:
        """Ask several nodes at once; return the answer of each, or the reason for none within ``seconds``."""
        servers = {name: self._server(name) for name in questions}
        asked = {
            name: server.asked(_limited(questions[name]))
            for name, server in servers.items()
            if isinstance(server, Server)
        }
        wait(asked.values(), seconds)
        return {
            name: _answer(server, asked[name], 0) if isinstance(server, Server) else server
            for name, server in servers.items()
        }

    def close(self) -> None:
        """Close the connections."""
        self._servers.close()

    def _server(self, name: str) -> Server | ShardidsError:
        node = self._watcher.seen().nodes.get(name)
        if node is None:
            return unknown_node(name, self._watcher.seen().nodes)
        if not node.up:
            # To ask it again would take as long as the reading did.
            return node.error or ConnectionFailed(f'node "{name}" does not answer')
        return self._servers.node(name, node.url)


def _answer(server: Server, asked: Future[T | ShardidsError], seconds: float) -> T | ShardidsError:
    wait([asked], seconds)
    if not asked.done():
        return ConnectionFailed(f"{server.what} has not answered within {ANSWER_S:g} s")
    return asked.result()


def _raised(answer: T | ShardidsError) -> T:
    if isinstance(answer, ShardidsError):
        raise answer
    return answer


def _limited(question: Question[T]) -> Question[T]:
    def ask(connection: Connection) -> T:
        with connection.begin():
            prepare(connection)
            connection.exec_driver_sql(f"set local statement_timeout = '{STATEMENT}'")
            return question(connection)

    return ask


EVERY_S: Final = 600.0
"""How old they may be before they are read again, unless somebody asks for it."""
_AGAIN_S: Final = 60.0
"""The same after a reading that did not get all."""
_SOONEST_S: Final = 5.0
_PATIENCE_S: Final = 30.0
_STATEMENT: Final = "25s"
LOCK_WAIT: Final = "1s"
"""How long a question waits for a table's lock: less than its statement may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """Bytes of tables and indexes by shard, and revisions of the application's migrations by shard.

    An unfinished revision has a ``+`` after it. A shard that was not read is in neither.

    Attributes:
        at: when a node last answered, in seconds since 1970; ``None`` if never.
        tried_at: when they were last asked for.
        errors: why the last reading did not get all, by node.
    """

    at: float | None = None
    tried_at: float | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    revisions: Mapping[int, str | None] = field(default_factory=dict)
    errors: Mapping[str, ShardidsError] = field(default_factory=dict)

    @property
    def sentences(self) -> list[str]:
        """Returns the errors in words."""
        return [f'node "{name}": {told(error)}' for name, error in sorted(self.errors.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A node's answer; if ``revisions`` lacks a shard, the ``error`` says why."""

    sizes: Mapping[int, int]
    revisions: Mapping[int, str | None]
    error: ShardidsError | None


class SlowReader:
    """A reader of slow facts, in a thread, when a viewer asks for them and they are old.

    Args:
        databases: where they are asked for.
        version_table: the table of Alembic in each shard.
    """

    def __init__(self, databases: Databases, version_table: str = VERSION_TABLE) -> None:
        self._databases = databases
        self._version_table = version_table
        self._facts = SlowFacts()
        self._begun = float("-inf")
        self._lock = Lock()

    @property
    def known(self) -> SlowFacts:
        """The facts that are known now, without a reading."""
        return self._facts

    def facts(self, seen: Seen, *, again: bool = False) -> SlowFacts:
        """Return the facts known now; if they are old, or with ``again``, read new ones for later calls."""
        patience_s = _SOONEST_S if again else _AGAIN_S if self._facts.errors else EVERY_S
        is_old = time.monotonic() - self._begun > patience_s
        if is_old and seen.known is not None and self._lock.acquire(blocking=False):
            self._begun = time.monotonic()
            Thread(target=self._run, args=(seen,), name="shardids console", daemon=True).start()
        return self._facts

    def _run(self, seen: Seen) -> None:
        try:
            self._facts = self._read(seen)
        except Exception:
            log.exception("sizes and revisions could not be read")
        finally:
            self._lock.release()

    def _read(self, seen: Seen) -> SlowFacts:
        before = self._facts
        sizes, revisions = dict(before.sizes), dict(before.revisions)
        answers = self._databases.of_nodes(
            {name: partial(self._ask, name) for name in seen.nodes}, seconds=_PATIENCE_S
        )
        errors: dict[str, ShardidsError] = {}
        now = time.time()
        # Where a node does not answer, what was known of its shards stays.
        for name, answer in answers.items():
            error = answer if isinstance(answer, ShardidsError) else answer.error
            if error is not None:
                errors[name] = error
            if not isinstance(answer, ShardidsError):
                owned = _owned(seen, name)
                sizes |= {shard: size for shard, size in answer.sizes.items() if shard in owned}
                revisions |= {shard: there for shard, there in answer.revisions.items() if shard in owned}
        at = now if any(isinstance(answer, _Answer) for answer in answers.values()) else before.at
        return SlowFacts(at=at, tried_at=now, sizes=sizes, revisions=revisions, errors=errors)

    def _ask(self, node: str, connection: Connection) -> _Answer:
        connection.exec_driver_sql(f"set local statement_timeout = '{_STATEMENT}'")
        schemas = connection.scalars(text("select schema::text from shardids.shard")).all()
        with bounded_wait(connection, f'node "{node}"', schemas, ["AccessExclusiveLock"], patience=LOCK_WAIT):
            sizes = {row.id: row.size_bytes for row in connection.execute(_SIZES)}
        revisions: dict[int, str | None] = {}
        error: ShardidsError | None = None
        try:
            there = revisions_of_shards(
                connection, f'node "{node}"', self._version_table, statement_timeout=_STATEMENT
            )
        except ConnectionFailed:
            raise
        except ShardidsError as raised:
            return _Answer(sizes=sizes, revisions={}, error=raised)
        for shard, (found, unfinished) in there.items():
            if not isinstance(found, Refused):
                revisions[shard] = _shown(found, unfinished)
            elif error is None:
                error = MissingPrivilege(
                    f"{self._version_table} of shard {shard} was not looked at: {found.reason}"
                )
        return _Answer(sizes=sizes, revisions=revisions, error=error)


def _shown(revisions: Sequence[str] | None, unfinished: str | None) -> str | None:
    if not revisions and unfinished is None:
        return None
    return ", ".join(sorted(revisions or [])) + (f" +{unfinished}" if unfinished else "")


def _owned(seen: Seen, node: str) -> frozenset[int]:
    return seen.known.placed.get((node, "active"), frozenset()) if seen.known else frozenset()


_SIZES: Final = text("""
    select s.id, coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size_bytes
    from shardids.shard s
    left join pg_namespace n on n.nspname = s.schema
    left join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'm')
    where s.state <> 'moved' group by s.id""")
