"""Runs a plan: canaries one at a time, then all nodes at once, a bounded number of workers on each."""

from __future__ import annotations

import getpass
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event, Lock
from typing import Any, Final

from sqlalchemy import Connection, text
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

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, ConnectionFailed, RevisionChanged, ShardBusy, ShardidsError
from shardids.logs import shown_error
from shardids.migrate.compiled import Compiled
from shardids.migrate.plan import MigrationPlan, Outcome, Position, Route, RunReport, Start
from shardids.migrate.player import Limits, Player

TRANSIENT: Final = frozenset({"55P03", "40P01", "40001"})
"""Lock timeout, deadlock, serialization failure: another attempt may succeed."""
MOST_JOBS: Final = 64
"""The most shards of a node that a run migrates at once."""
MOST_FAILED_CANARIES: Final = 3
"""How many canaries may fail in a row before even a run with ``continue_on_error`` begins no other shard."""
_LONGEST_NAME: Final = 63
"""How many characters of ``application_name`` a server keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a run proceeds.

    ``jobs`` is the number of workers per node; ``retries`` how many more attempts follow a lock timeout, a
    deadlock or a lost connection; ``first_pause_s`` the longest pause before the first of them, doubled for
    each that follows.
    """

    jobs: int = 1
    retries: int = 5
    first_pause_s: float = 0.5
    longest_pause_s: float = 15.0
    continue_on_error: bool = False
    limits: Limits = field(default_factory=Limits)


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


@contextmanager
def one_run(catalog: Catalog, what: str) -> Iterator[None]:
    """Holds the cluster's run lock; a second run is told ``what`` holds it.

    The server releases the lock with the session, so a run that is killed holds it no longer than its
    connection.

    Raises:
        ClusterConflict: another run holds the lock; the message says which and since when.
    """
    engine = open_engine(
        catalog.url,
        what="the catalog",
        administrative=True,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        pool_size=1,
    )
    try:
        # A transaction's lock, not a session's: it stays on one server connection behind PgBouncer, too.
        with engine.connect() as connection, connection.begin():
            # The server ends the session, and with it the lock, of a run that is out of reach.
            connection.execute(
                text("""select set_config('application_name', :name, true),
                               set_config('tcp_keepalives_idle', '10', true),
                               set_config('tcp_keepalives_interval', '3', true),
                               set_config('tcp_keepalives_count', '3', true)"""),
                {"name": _session_name(what)},
            )
            if not connection.scalar(
                text("select pg_try_advisory_xact_lock(:key)"), {"key": AdvisoryLock.MIGRATE_RUN}
            ):
                raise _held_by_another(connection)
            # Runs last, without parameters: the portal of the statement before would keep its snapshot, and a
            # CREATE INDEX CONCURRENTLY in this database would wait for it until the end of the run.
            connection.exec_driver_sql("set local idle_in_transaction_session_timeout = 0")
            yield
    finally:
        engine.dispose()


def _session_name(what: str) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    since = f" since {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}"
    return f"shardids {what} by {user}@{socket.gethostname()}"[: _LONGEST_NAME - len(since)] + since


def _held_by_another(connection: Connection) -> ClusterConflict:
    holder = connection.execute(
        text("""
            select a.application_name, a.pid, a.client_addr
            from pg_locks l join pg_stat_activity a using (pid)
            where l.locktype = 'advisory' and l.granted
              and l.classid = 0 and l.objid = :key and l.objsubid = 1
              and l.database = (select oid from pg_database where datname = current_database())"""),
        {"key": AdvisoryLock.MIGRATE_RUN},
    ).first()
    who = "another session" if holder is None else f"{holder.application_name} (process {holder.pid})"
    return ClusterConflict(
        f"another run is changing the shards of this cluster: {who}",
        hint="Wait until it has ended. Its connection to the catalog holds the lock: if it hangs, end that"
        " session with pg_terminate_backend.",
    )


class Run:
    """One run over all shards of a plan.

    Args:
        plan: what the run does.
        compile_route: returns what to run for a route; called from several threads.
        route_from: returns the route to a target from a starting point that is not in the plan.
        check_free: raises ShardBusy if a shard is being moved; called from several threads.
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
        check_free: Callable[[int], None],
        player_on: Callable[[str], Player],
        settings: RunSettings,
        failed_nodes: Mapping[str, ShardidsError],
        observer: Observer,
        stop: Event,
    ) -> None:
        self._plan = plan
        self._compile_route = compile_route
        self._route_from = route_from
        self._check_free = check_free
        self._player_on = player_on
        self._settings = settings
        self._observer = observer
        self._interrupted = stop
        self._stop = Event()
        self._down: dict[str, ShardidsError] = dict(failed_nodes)
        self._lock = Lock()
        self._outcomes: dict[int, Outcome] = {}

    def go(self) -> RunReport:
        """Runs the plan to its end. A failure is an outcome, never an exception."""
        began = time.monotonic()
        self._observer.planned(dict(sorted(Counter(p.node for p in self._plan.pending).items())))
        queues = {node: deque(positions) for node, positions in self._plan.queues.items()}
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

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._interrupted.is_set()

    def _run_canaries(self, queues: Mapping[str, deque[Position]]) -> None:
        """Migrates the canaries; with ``continue_on_error`` one that fails is replaced, from ``queues``.

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
            for done in [pool.submit(self._work, node, queue) for node, queue in workers]:
                done.result()

    def _work(self, node: str, queue: deque[Position]) -> None:
        with closing(self._player_on(node)) as player:
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
        """Brings one shard to the target, with retries."""
        began = time.monotonic()
        attempts, now = 0, position
        planned = self._plan.routes[position.heads]
        compiled = self._compile_route(planned)

        def attempt() -> None:
            nonlocal attempts, now, compiled
            attempts += 1
            if position.node in self._down:
                raise self._down[position.node]
            self._check_free(position.shard)
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
                # Revisions before the failed one may have been committed.
                with suppress(Exception):
                    now = player.reread(now)
            outcome |= {"status": "failed", "end": now.heads, "error": _message_of(error)}
            outcome["cause"] = shown_error(error)
        else:
            outcome |= {"status": "done", "end": compiled.route.end}
        seconds = time.monotonic() - began
        return Outcome(**outcome, seconds=seconds, way=compiled.way, attempts=attempts)

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


def _not_started(position: Position) -> Outcome:
    return Outcome(
        shard=position.shard,
        node=position.node,
        start=position.heads,
        end=position.heads,
        status="not started",
    )
