"""A run of migrations over many shards: its order, threads, retries and log."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Event, Lock
from typing import Any, Final

from sqlalchemy import Connection, Engine, text
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

from shardids.catalog.alive import alive
from shardids.catalog.leases import Lease, Leases, OnBusy, Standing, read_leases, session_name
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import (
    ClusterConflict,
    ConnectionFailed,
    MissingPrivilege,
    RevisionChanged,
    ShardBusy,
    ShardidsError,
    StatementFailed,
)
from shardids.logs import logger, shown_error
from shardids.migrate.compiled import Compiled
from shardids.migrate.plan import MigrationPlan, Outcome, Position, Route, RunReport, Start, shown_heads
from shardids.migrate.player import Limits, Player
from shardids.pg.locks import AdvisoryLock, holders_of_key, locked
from shardids.traces import span

log = logger("migrate")


_LOCK_TIMEOUT: Final = "55P03"
TRANSIENT: Final = frozenset({_LOCK_TIMEOUT, "40P01", "40001"})
"""Lock timeout, deadlock, serialization failure: another attempt may succeed."""
MOST_JOBS: Final = 64
"""The most shards of a node that a run migrates at once."""
MOST_FAILED_CANARIES: Final = 3
"""How many canaries may fail in a row before even a run with ``continue_on_error`` begins no other shard."""
_LOOK_S: Final = 0.5
"""How often to look whether the leases of others were returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a run proceeds.

    ``jobs`` is the number of workers per node; ``retries`` how many more attempts follow a lock timeout, a
    deadlock or a lost connection; ``first_pause_s`` the longest pause before the first of them, doubled for
    each that follows; ``on_busy`` says how shards are treated whose lease another command has.
    """

    jobs: int = 1
    retries: int = 5
    first_pause_s: float = 0.5
    longest_pause_s: float = 15.0
    continue_on_error: bool = False
    limits: Limits = field(default_factory=Limits)
    on_busy: OnBusy = OnBusy.WAIT


class Observer:
    """Receives the events of a run, from several threads. This one ignores them."""

    def planned(self, counts: Mapping[str, int]) -> None:
        """Is told that the run will change ``counts`` shards on each node."""

    def started(self, position: Position) -> None:
        """Is told that a worker has begun a shard."""

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Is told that attempt number ``attempt`` has failed and another follows."""

    def ended(self, outcome: Outcome) -> None:
        """Is told that a shard has reached the target or has failed."""

    def waiting(self, lease: Lease) -> None:
        """Receive a lease of another command; the run waits until it is returned."""


class RunLog(Observer):
    """Is told a run's events, logs them, and passes them on to ``observer``.

    Records of a shard have the fields ``shard`` and ``node``.
    """

    def __init__(self, observer: Observer, target: str) -> None:
        self._observer = observer
        self._target = target
        self._began = time.monotonic()

    def planned(self, counts: Mapping[str, int]) -> None:
        """Log that the run begins."""
        log.info("%s shards are brought to %s", sum(counts.values()), self._target, extra={"shards": counts})
        self._observer.planned(counts)

    def started(self, position: Position) -> None:
        """Pass it on."""
        self._observer.started(position)

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Log an attempt that failed. The error is a lock timeout or similar, without values."""
        fields = {"shard": position.shard, "node": position.node, "attempt": attempt}
        log.warning("shard %s: attempt %s failed: %s", position.shard, attempt, error, extra=fields)
        self._observer.retried(position, attempt, error)

    def ended(self, outcome: Outcome) -> None:
        """Log how a shard ended."""
        is_done = outcome.status == "done"
        log.log(
            logging.DEBUG if is_done else logging.WARNING,
            "shard %s: %s after %.3f s%s",
            outcome.shard,
            f"{shown_heads(outcome.start)} -> {shown_heads(outcome.end)}" if is_done else outcome.status,
            outcome.seconds,
            f": {outcome.cause}" if outcome.cause else "",
            extra={
                "shard": outcome.shard,
                "node": outcome.node,
                "status": outcome.status,
                "revision": shown_heads(outcome.end),
                "seconds": outcome.seconds,
                "attempts": outcome.attempts,
            },
        )
        self._observer.ended(outcome)

    def waiting(self, lease: Lease) -> None:
        """Log that the run waits for another command."""
        fields = {"shard": lease.shard, "node": lease.node}
        log.info("shard %s: the run waits for a %s", lease.shard, lease, extra=fields)
        self._observer.waiting(lease)

    def finished(self, report: RunReport) -> None:
        """Log how the run ended."""
        counts = {status: len(report.of(status)) for status in ("done", "failed", "not started")}
        log.log(
            logging.INFO if report.succeeded else logging.WARNING,
            "the run to %s ended after %.1f s: %s",
            self._target,
            time.monotonic() - self._began,
            ", ".join(f"{count} {status}" for status, count in counts.items()),
            extra={"shards": counts, "nodes": {node.node: node.status for node in report.nodes}},
        )


@contextmanager
def one_run(catalog: Catalog, what: str) -> Iterator[Leases]:
    """Hold the cluster's run lock, and yield the leases for the shards that the run changes.

    A second run is refused, with ``what``, which holds it. The server releases the lock with the session: it
    ends that of a process that was killed, or that it has not heard from for 25 seconds.

    Raises:
        ClusterConflict: another run holds the lock; the message says which and since when.
    """
    leases = Leases(catalog, "migration")

    def take(connection: Connection) -> None:
        if not connection.scalar(
            text("select pg_try_advisory_xact_lock(:key)"), {"key": AdvisoryLock.MIGRATE_RUN}
        ):
            raise _held_by_another(connection)
        key = {"class": int(AdvisoryLock.LEASE_HOLDER), "key": leases.key}
        connection.execute(text("select pg_advisory_xact_lock(:class, :key)"), key)

    with alive(catalog, session_name(what), take):
        yield leases


def _held_by_another(connection: Connection) -> ClusterConflict:
    holder = next(iter(holders_of_key(connection, AdvisoryLock.MIGRATE_RUN)), None)
    who = "another session" if holder is None else f"{holder.application} (process {holder.pid})"
    return ClusterConflict(
        f"another run is changing the shards of this cluster: {who}",
        hint="Wait until it has ended. Its connection to the catalog holds the lock: if it hangs, end that"
        " session with pg_terminate_backend.",
    )


class Run:
    """One run over all shards of a plan.

    Args:
        plan: the order of the run.
        compile_route: returns the compiled SQL of a route; called from several threads.
        route_from: returns the route to a target from a starting point that is not in the plan.
        leases: the run takes those of its shards, and returns them.
        engines: the nodes, by name.
        player_on: opens a player on a node, by name.
        settings: how the run proceeds.
        failed_nodes: what keeps nodes' shards from being run, by node.
        observer: receives the run's events.
        stop: once set, running shards are finished and no other is begun.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        *,
        compile_route: Callable[[Route], Compiled],
        route_from: Callable[[Start, str], Route],
        leases: Leases,
        engines: Mapping[str, Engine],
        player_on: Callable[[str], Player],
        settings: RunSettings,
        failed_nodes: Mapping[str, ShardidsError],
        observer: Observer,
        stop: Event,
    ) -> None:
        self._plan = plan
        self._compile_route = compile_route
        self._route_from = route_from
        self._leases = leases
        self._engines = engines
        self._player_on = player_on
        self._settings = settings
        self._observer = observer
        self._interrupted = stop
        self._stop = Event()
        self._down: dict[str, ShardidsError] = dict(failed_nodes)
        self._lock = Lock()
        self._outcomes: dict[int, Outcome] = {}
        self._others: dict[int, Lease] = {}

    def go(self) -> RunReport:
        """Run the plan to its end. A failure is an outcome, never an exception."""
        with span("shardids.migrate", shards=len(self._plan.pending)):
            return self._gone()

    def _gone(self) -> RunReport:
        began = time.monotonic()
        self._observer.planned(dict(sorted(Counter(p.node for p in self._plan.pending).items())))
        queues = {node: deque(positions) for node, positions in self._plan.queues.items()}
        with self._leased():
            self._run_canaries(queues)
            if not self._is_over():
                self._run_queues(queues)
        for position in self._plan.pending:
            self._outcomes.setdefault(position.shard, _not_started(position))
        return RunReport(
            outcomes=tuple(self._outcomes[shard] for shard in sorted(self._outcomes)),
            seconds=time.monotonic() - began,
            interrupted=self._interrupted.is_set(),
        )

    @contextmanager
    def _leased(self) -> Iterator[None]:
        """Take the leases of all shards before the first is changed; return those that are left.

        So a process that sleeps, and wakes when its leases were taken over, begins no other shard.
        """
        shards: dict[str, list[int]] = {}
        for position in self._plan.pending:
            shards.setdefault(position.node, []).append(position.shard)
        try:
            for node, there in shards.items():
                # A node that does not answer, or refuses the role, is the outcome of its shards.
                with suppress(ConnectionFailed, MissingPrivilege):
                    self._others |= self._leases.take(self._engines[node], node, there)
            yield
        finally:
            for node, there in shards.items():
                self._give_back(node, there)

    def _give_back(self, node: str, shards: list[int]) -> None:
        with suppress(ShardidsError):
            self._leases.give_back(self._engines[node], shards)

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._interrupted.is_set()

    def _run_canaries(self, queues: Mapping[str, deque[Position]]) -> None:
        """Migrate the canaries; with ``continue_on_error`` one that fails is replaced, from ``queues``.

        The replacement is the last of the longest queue: a repeated run begins with the same canaries, and
        neighbours often fail alike. Several failures in a row are taken to mean that every shard would fail.
        """
        canaries, failed = deque(self._plan.canaries), 0
        while canaries and not self._is_over():
            canary = canaries.popleft()
            self._work(canary.node, deque([canary]))
            outcome = self._outcomes.get(canary.shard)
            if outcome is None or outcome.status != "failed":
                failed = 0
                continue
            failed += 1
            longest = max(queues.values(), key=len, default=None)
            if not self._settings.continue_on_error or failed == MOST_FAILED_CANARIES or not longest:
                self._stop.set()
            else:
                canaries.append(longest.pop())

    def _run_queues(self, queues: Mapping[str, deque[Position]]) -> None:
        workers = [
            (node, queue)
            for node, queue in queues.items()
            for _ in range(min(self._settings.jobs, len(queue)))
        ]
        if not workers:
            return
        with ThreadPoolExecutor(len(workers)) as pool:
            for done in [pool.submit(copy_context().run, self._work, node, queue) for node, queue in workers]:
                done.result()

    def _work(self, node: str, queue: deque[Position]) -> None:
        with closing(self._player_on(node)) as player:
            while not self._is_over():
                try:
                    position = queue.popleft()
                except IndexError:
                    return
                if (other := self._others.get(position.shard)) is not None:
                    with self._lock:
                        self._outcomes[position.shard] = busy_outcome(node, other, position.heads)
                    continue
                self._observer.started(position)
                with span("shardids.migrate.shard", shard=position.shard, node=position.node) as opened:
                    outcome = self._take(player, position)
                    opened.set_attribute("shardids.attempts", outcome.attempts)
                    opened.set_attribute("shardids.status", outcome.status)
                if outcome.way != "sql" or outcome.status != "done":
                    self._give_back(node, [position.shard])
                with self._lock:
                    self._outcomes[position.shard] = outcome
                if outcome.status == "failed" and not self._settings.continue_on_error:
                    self._stop.set()
                self._observer.ended(outcome)

    def _take(self, player: Player, position: Position) -> Outcome:
        """Bring one shard to the target, with retries."""
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
                try:
                    player.play(now, compiled)
                except StatementFailed as error:
                    if error.sqlstate != _LOCK_TIMEOUT:
                        raise
                    raise self._locked(error, position) from error

        outcome: dict[str, Any] = {"shard": position.shard, "node": position.node, "start": position.heads}
        try:
            self._retrying(position)(attempt)
        except Exception as error:  # noqa: BLE001 -- a revision that runs through Alembic can raise anything
            if isinstance(error, ConnectionFailed):
                self._down[position.node] = error
            if compiled.way != "sql":
                # Revisions before the failed one may have been committed.
                with suppress(Exception):
                    now = player.reread(now)
            outcome |= {"status": "failed", "end": now.heads, "error": _message_of(error)}
            outcome["cause"] = shown_error(error)
        else:
            outcome |= {"status": "done", "end": compiled.route.end}
        seconds = time.monotonic() - began
        return Outcome(**outcome, seconds=seconds, way=compiled.way, attempts=attempts)

    def _locked(self, error: StatementFailed, position: Position) -> StatementFailed:
        """Return the error for a lock timeout, with the holders of the shard's and the reference tables."""
        engine = self._engines[position.node]
        schemas = [REFERENCE_SCHEMA]
        with suppress(ShardidsError), engine.connect() as connection:
            named = connection.scalar(text("select shardids.schema_of(:shard)"), {"shard": position.shard})
            schemas.append(str(named))
        return locked(error, f'node "{position.node}"', engine, schemas)

    def _retrying(self, position: Position) -> Retrying:
        settings = self._settings

        def report(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            self._observer.retried(position, state.attempt_number, _message_of(error) if error else "")

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


def _message_of(error: BaseException) -> str:
    if not isinstance(error, ShardidsError):
        return f"{type(error).__name__}: {error}"
    diag = getattr(error.__cause__, "diag", None)
    return error.in_a_line(getattr(diag, "message_detail", None))


def busy_outcome(node: str, lease: Lease, heads: Start = None) -> Outcome:
    """Return the outcome of a shard that was left out, because another command has its lease."""
    return Outcome(
        shard=lease.shard,
        node=node,
        start=heads,
        end=heads,
        status="not started",
        error=lease.error().in_a_line(),
        is_busy=lease.standing is not Standing.INTERRUPTED,
    )


def until_free(
    report: RunReport,
    *,
    again: Callable[[list[int]], RunReport],
    catalog: Catalog,
    nodes: Nodes,
    settings: RunSettings,
    observer: Observer,
    stop: Event,
) -> RunReport:
    """Repeat a run for shards that other commands kept it from, as they return their leases.

    ``again`` runs it for some shards, from where they are by then.
    """
    told = set[tuple[int, datetime]]()
    while settings.on_busy is OnBusy.WAIT and not stop.is_set():
        if report.of("failed") and not settings.continue_on_error:
            break
        busy = {outcome.shard for outcome in report.outcomes if outcome.is_busy}
        if not busy:
            break
        there = read_leases(catalog, nodes, all_must_answer=False)
        running = {one.shard: one for one in there if one.standing is Standing.RUNNING and one.shard in busy}
        for lease in running.values():
            if (lease.shard, lease.began_at) not in told:
                told.add((lease.shard, lease.began_at))
                observer.waiting(lease)
        if free := sorted(busy - running.keys()):
            try:
                more = again(free)
            except ShardidsError as error:
                # What the other shards have become is reported all the same.
                left = tuple(
                    replace(one, status="failed", error=error.in_a_line(), is_busy=False)
                    for one in report.outcomes
                    if one.shard in free
                )
                more = RunReport(outcomes=left, seconds=0.0)
            kept = [outcome for outcome in report.outcomes if outcome.shard not in free]
            outcomes = sorted((*kept, *more.outcomes), key=lambda outcome: outcome.shard)
            report = replace(
                report,
                outcomes=tuple(outcomes),
                seconds=report.seconds + more.seconds,
                interrupted=report.interrupted or more.interrupted,
            )
        stop.wait(_LOOK_S)
    return report


def _not_started(position: Position) -> Outcome:
    return Outcome(
        shard=position.shard,
        node=position.node,
        start=position.heads,
        end=position.heads,
        status="not started",
    )
