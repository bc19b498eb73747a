"""Runs a plan: canaries first and alone, then all nodes at once, a bounded number of workers on each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from sqlalchemy import Engine
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_any,
    stop_when_event_set,
    wait_random_exponential,
)
from tenacity.nap import sleep_using_event

from shardids.errors import ConnectionFailed, RevisionChanged, ShardBusy, ShardidsError
from shardids.migrate.compiled import Compiled
from shardids.migrate.plan import Plan, Position, Route, Start
from shardids.migrate.player import Player
from shardids.migrate.report import Outcome, Report
from shardids.migrate.statements import Limits

TRANSIENT = frozenset({"55P03", "40P01", "40001"})
"""Lock timeout, deadlock, serialization failure: another attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run goes about it.

    ``jobs`` are workers a node; ``retries`` the further attempts after a lock timeout, a deadlock or a lost
    connection; ``first_pause_s`` the longest pause before the first of them, doubled for each that follows.
    """

    jobs: int = 1
    retries: int = 5
    first_pause_s: float = 0.5
    longest_pause_s: float = 15.0
    continue_on_error: bool = False
    limits: Limits = field(default_factory=Limits)


class Observer:
    """Is told how a run goes, from several threads. This one does nothing with it."""

    def planned(self, counts: Mapping[str, int]) -> None:
        """``counts`` shards are to be changed on each node."""

    def started(self, position: Position) -> None:
        """A shard's turn has come."""

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Attempt number ``attempt`` has failed, another will follow."""

    def ended(self, outcome: Outcome) -> None:
        """A shard is done with, or has failed."""


class Run:
    """One run over all shards of a plan.

    Args:
        plan: what is to be done.
        compile_route: gives what is run for a route; called from several threads.
        route_from: the route to a target from a starting point that is not in the plan.
        player_of: opens a player on a node's engine.
        engines: the node's engines, by name.
        settings: how.
        observer: is told how it goes.
        stop: once set, shards that run are finished and no other is begun.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        compile_route: Callable[[Route], Compiled],
        route_from: Callable[[Start, str], Route],
        player_of: Callable[[Engine], Player],
        engines: Mapping[str, Engine],
        settings: Settings,
        observer: Observer,
        stop: Event,
    ) -> None:
        self._plan = plan
        self._compile_route = compile_route
        self._route_from = route_from
        self._player_of = player_of
        self._engines = engines
        self._settings = settings
        self._observer = observer
        self._interrupted = stop
        self._stop = Event()
        self._down: dict[str, ConnectionFailed] = {}
        self._lock = Lock()
        self._outcomes: dict[int, Outcome] = {}

    def go(self) -> Report:
        """Runs it to its end. A failure is an outcome, never an exception."""
        began = time.monotonic()
        self._observer.planned(_count(self._plan.pending))
        for canary in self._plan.canaries:
            if self._is_over():
                break
            self._work(canary.node, deque([canary]))
            if self._outcomes[canary.shard].status == "failed":
                # Whatever the choice for the rest: a canary is there to be believed.
                self._stop.set()
        if not self._is_over():
            self._run_queues()
        for position in self._plan.pending:
            self._outcomes.setdefault(position.shard, _not_started(position))
        return Report(
            outcomes=tuple(self._outcomes[shard] for shard in sorted(self._outcomes)),
            seconds=time.monotonic() - began,
            interrupted=self._interrupted.is_set(),
        )

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._interrupted.is_set()

    def _run_queues(self) -> None:
        queues = {node: deque(positions) for node, positions in self._plan.queues.items()}
        workers = [
            (node, queue)
            for node, queue in queues.items()
            for _ in range(min(self._settings.jobs, len(queue)))
        ]
        if not workers:
            return
        with ThreadPoolExecutor(len(workers)) as pool:
            for done in [pool.submit(self._work, node, queue) for node, queue in workers]:
                done.result()

    def _work(self, node: str, queue: deque[Position]) -> None:
        with ExitStack() as stack:
            player = self._player_of(self._engines[node])
            stack.callback(player.close)
            while not self._is_over():
                try:
                    position = queue.popleft()
                except IndexError:
                    return
                self._observer.started(position)
                outcome = self._take(player, position)
                with self._lock:
                    self._outcomes[position.shard] = outcome
                if outcome.status == "failed" and not self._settings.continue_on_error:
                    self._stop.set()
                self._observer.ended(outcome)

    def _take(self, player: Player, position: Position) -> Outcome:
        """Takes one shard to the target, with retries."""
        began = time.monotonic()
        attempts, now = 0, position
        planned = self._plan.routes[position.heads]
        compiled = self._compile_route(planned)

        def attempt() -> None:
            nonlocal attempts, now, compiled
            attempts += 1
            if position.node in self._down:
                raise self._down[position.node]
            if attempts > 1:
                now = player.reread(now)
                compiled = self._compile_route(self._route_from(now.heads, planned.target))
            if not compiled.route.is_empty:
                player.play(now, compiled)

        outcome: dict[str, Any] = {"shard": position.shard, "node": position.node, "start": position.heads}
        try:
            self._retrying(position)(attempt)
        except Exception as error:  # noqa: BLE001 -- a revision that runs through Alembic can raise anything
            if isinstance(error, ConnectionFailed):
                self._down[position.node] = error
            if compiled.way != "sql":
                # Revisions before the one that failed may have been committed.
                with suppress(Exception):
                    now = player.reread(now)
            outcome |= {"status": "failed", "end": now.heads, "error": _told(error)}
        else:
            outcome |= {"status": "done", "end": compiled.route.end}
        seconds = time.monotonic() - began
        return Outcome(**outcome, seconds=seconds, way=compiled.way, attempts=attempts)

    def _retrying(self, position: Position) -> Retrying:
        settings = self._settings

        def report(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            self._observer.retried(position, state.attempt_number, _told(error) if error else "")

        return Retrying(
            retry=retry_if_exception(self._may_be_repeated),
            stop=stop_any(stop_after_attempt(settings.retries + 1), stop_when_event_set(self._interrupted)),
            wait=wait_random_exponential(multiplier=settings.first_pause_s, max=settings.longest_pause_s),
            sleep=sleep_using_event(self._interrupted),
            before_sleep=report,
            reraise=True,
        )

    def _may_be_repeated(self, error: BaseException) -> bool:
        if isinstance(error, ConnectionFailed):
            return not any(error is known for known in self._down.values())
        if isinstance(error, ShardBusy | RevisionChanged):
            return True
        return isinstance(error, ShardidsError) and error.sqlstate in TRANSIENT


def _told(error: BaseException) -> str:
    if not isinstance(error, ShardidsError):
        return f"{type(error).__name__}: {error}"
    diag = getattr(error.__cause__, "diag", None)
    detail = getattr(diag, "message_detail", None)
    return f"{error.message} ({detail})" if detail else error.message


def _count(positions: tuple[Position, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for position in positions:
        counts[position.node] = counts.get(position.node, 0) + 1
    return dict(sorted(counts.items()))


def _not_started(position: Position) -> Outcome:
    return Outcome(
        shard=position.shard,
        node=position.node,
        start=position.heads,
        end=position.heads,
        status="not started",
    )
