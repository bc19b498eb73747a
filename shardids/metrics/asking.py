"""Asks the catalog and all nodes at once, over connections that stay open, within a bounded time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from shardids.catalog.clock import LocalClock
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.notation import named_shards
from shardids.catalog.queries import BATCH, DROPPED_MEANWHILE, prepare, read, rows
from shardids.catalog.sqlfiles import read_sql
from shardids.catalog.urls import parse_url, with_login_of
from shardids.errors import ClusterConflict, ConnectionFailed, MissingPrivilege, ShardidsError
from shardids.metrics.facts import CatalogState, NodeAnswer, NodeState, Reading, Shard

TIMEOUT_S: Final = 5.0
"""How long a reading may take; Prometheus waits 10 s unless it is told otherwise."""
_ATTEMPTS: Final = 3
_NAME: Final = "shardids metrics"

T = TypeVar("T")


class Asker:
    """Asks a cluster again and again; for one thread at a time.

    It logs in to the nodes as the user of the catalog's URL. Its transactions are read-only. Who does not
    answer in time is not asked again before the answer has come, or the connection was given up.

    Args:
        catalog_url: the catalog.
        timeout_s: how long a reading may take, in seconds; half of it is for the catalog.
    """

    def __init__(self, catalog_url: str | URL, *, timeout_s: float = TIMEOUT_S) -> None:
        self._login = parse_url(catalog_url)
        self._timeout_s = timeout_s
        self._catalog = _Respondent(
            "the catalog", lambda: self._engine(self._login, "the catalog"), _ask_catalog
        )
        self._nodes: dict[tuple[str, str], _Respondent[NodeAnswer]] = {}
        self._known: CatalogState | None = None

    def read(self) -> Reading:
        """Returns what the catalog and the nodes answer now. Whoever does not answer is part of it."""
        begun = time.monotonic()
        error = self._ask_catalog()
        answers = {} if self._known is None else self._ask_nodes(self._known, begun)
        return Reading(
            known=self._known, catalog_error=error, nodes=answers, seconds=time.monotonic() - begun
        )

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self._catalog.close()
        for node in self._nodes.values():
            node.close()

    def _ask_catalog(self) -> ShardidsError | None:
        question = self._catalog.asked()
        wait([question], self._timeout_s / 2)
        answer = question.result() if question.done() else _silent("the catalog", self._timeout_s / 2)
        if isinstance(answer, ShardidsError):
            return answer
        self._known = answer
        return None

    def _ask_nodes(self, known: CatalogState, begun: float) -> Mapping[str, NodeAnswer]:
        there = {(name, url) for name, url in known.nodes.items()}
        for gone in self._nodes.keys() - there:
            self._nodes.pop(gone).close()
        clock = LocalClock()
        for name, url in there - self._nodes.keys():
            self._nodes[name, url] = _Respondent(
                f'node "{name}"',
                partial(self._engine_of_node, name, url),
                partial(_ask_node, name, known.cluster),
            )
        questions = {name: self._nodes[name, url].asked(clock) for name, url in sorted(there)}
        wait(questions.values(), max(0.0, begun + self._timeout_s - time.monotonic()))
        waited_s = time.monotonic() - begun
        answers: dict[str, NodeAnswer] = {}
        for name, question in questions.items():
            answer = question.result() if question.done() else _silent(f'node "{name}"', waited_s)
            if isinstance(answer, ShardidsError):
                answer = NodeAnswer(seconds=waited_s, error=answer)
            answers[name] = answer
        return answers

    def _engine_of_node(self, name: str, url: str) -> Engine:
        return self._engine(with_login_of(parse_url(url), self._login), f'node "{name}"')

    def _engine(self, url: URL, what: str) -> Engine:
        engine = administrative_engine(
            url, what=what, application_name=_NAME, connect_timeout_s=max(2, math.ceil(self._timeout_s))
        )
        return engine.execution_options(postgresql_readonly=True)


def _silent(what: str, seconds: float) -> ConnectionFailed:
    return ConnectionFailed(f"{what} has not answered within {seconds:.1f} s")


class _Respondent(Generic[T]):
    """A server that is asked one question at a time: while it has not answered, the same question stands.

    Whatever goes wrong is its answer, so that the others' are not lost.
    """

    def __init__(self, what: str, make_engine: Callable[[], Engine], ask: Callable[..., T]) -> None:
        self._what = what
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._ask = ask
        self._question: Future[T | ShardidsError] | None = None

    def asked(self, *arguments: object) -> Future[T | ShardidsError]:
        if self._question is None or self._question.done():
            self._question = Future()
            Thread(
                target=self._answer,
                args=(self._question, *arguments),
                name="shardids metrics",
                # One that waits for a silent server does not keep the process from ending.
                daemon=True,
            ).start()
        return self._question

    def _answer(self, question: Future[T | ShardidsError], *arguments: object) -> None:
        answer: T | ShardidsError
        try:
            self._engine = self._engine or self._make_engine()
            answer = self._ask(self._engine, *arguments)
        except ShardidsError as error:
            answer = error
        except BaseException as error:  # noqa: BLE001 -- passed on to who asks
            answer = ShardidsError(f"{self._what} can't be asked: {type(error).__name__}: {error}")
        question.set_result(answer)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()


def _ask_catalog(engine: Engine) -> CatalogState:
    with engine.connect() as connection, connection.begin():
        prepare(connection)
        found = rows(connection, read_sql("metrics/catalog.v1"), CatalogState.from_row)
    if not found:
        raise ClusterConflict("the catalog has no cluster", hint="Restore it from a backup.")
    return found[0]


def _ask_node(name: str, cluster: UUID, engine: Engine, clock: LocalClock) -> NodeAnswer:
    begun = time.monotonic()
    for attempt in range(_ATTEMPTS):
        known: dict[str, Any] = {}
        try:
            with engine.connect() as connection:
                known["clock"] = clock.compare(connection)
                known["state"] = state = _read_state(connection, name, cluster)
                if not state.is_standby:
                    for batch in _batches_of_shards(connection):
                        known.setdefault("shards", []).extend(batch)
                        known["read_at"] = time.monotonic()
                    known["has_all_shards"] = True
                    _require_readable(name, known["shards"])
        except ShardidsError as error:
            known["error"] = error
            if error.sqlstate in DROPPED_MEANWHILE and attempt < _ATTEMPTS - 1:
                continue
        break
    return NodeAnswer(seconds=time.monotonic() - begun, **known)


def _read_state(connection: Connection, name: str, cluster: UUID) -> NodeState:
    found = read(connection, "metrics/node.v1", NodeState)
    if len(found) != 1 or (found[0].name, found[0].cluster) != (name, cluster):
        there = f'node "{found[0].name}" of cluster {found[0].cluster}' if found else "no node"
        raise ClusterConflict(
            f'the database at the URL of node "{name}" is {there}',
            hint="Correct the node's URL, or restore the right database there.",
        )
    return found[0]


def _require_readable(name: str, shards: Sequence[Shard]) -> None:
    hidden = [shard.shard for shard in shards if shard.state == "unreadable"]
    if hidden:
        raise MissingPrivilege(
            f'node "{name}": the role may not read the sequences of {named_shards(hidden)}',
            hint="It needs SELECT on them, as members of pg_read_all_data have it.",
        )


def _batches_of_shards(connection: Connection) -> Iterator[list[Shard]]:
    query = read_sql("metrics/shards.v1")
    first = 0
    while True:
        with connection.begin():
            prepare(connection, first_shard=first, count=BATCH)
            found = connection.execution_options(no_parameters=True).exec_driver_sql(query)
            batch = [Shard._make(row) for row in found.all()]
        yield batch
        if len(batch) < BATCH:
            return
        first = batch[-1].shard + 1
