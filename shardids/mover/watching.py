"""A rebalance that runs on: it measures, plans, and moves one shard after another, within limits.

It plans as ``rebalance`` does and moves as ``shard move`` does. A plan needs uneven loads in several readings
in a row, and stays away from shards that were moved lately, so that shards do not go back and forth.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event as Flag
from typing import Any, Final, Literal

from sqlalchemy import Engine

from shardids.catalog.leases import OnBusy, lives
from shardids.catalog.moves import Move, bytes_per_second, open_moves, shards_moved_within
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, StatementFailed
from shardids.logs import logger
from shardids.mover.balance import (
    MARGIN,
    Balance,
    By,
    Counts,
    Transfer,
    plan_balance,
    rates,
    weigh,
)
from shardids.mover.journal import Result
from shardids.mover.rebalance import NotMoved, carry_out, rebalancing, resume_open
from shardids.mover.steps import LIVE, Options
from shardids.mover.window import Window
from shardids.pg.notation import counted
from shardids.replication.barrier import HeldLock
from shardids.replication.pressure import answer_s, followers_behind
from shardids.replication.sides import move_nodes
from shardids.replication.steps import Event, StepBegun, Waiting

COMMAND: Final = "rebalance --watch"
AGREEING: Final = 3
"""So many readings in a row have to find the nodes uneven."""
OUTAGE_S: Final = 600.0
"""How long the catalog may be out of reach before the watch gives up."""
_STALE_S: Final = 1800.0
"""A plan that is older is dropped, and the load is measured anew."""
_AFTER_FAILURE_S: Final = 600.0
"""How long a shard that could not be moved, and may be busy, is not tried again, at most."""
_RETRY_S: Final = 5.0
_LEAST_LOAD: Final = 100.0
"""With a mean below so many pages per second and node, loads count as even."""
_BYTES_A_SECOND: Final = 10e6
_OVERHEAD_S: Final = 15.0
"""How fast a move is expected to be while the journal has none, and how long one takes without rows."""
_PAUSE: Final = "cutover"
_ENDED_AT: Final = frozenset(step.name for step in LIVE[: [step.name for step in LIVE].index(_PAUSE)])
"""The steps before the pause of writes, at which a move can be left to the next run."""

What = Literal[
    "started", "even", "uneven", "waiting", "moving", "moved", "failed", "resuming", "left", "stopped"
]

_FIGURES: Final = re.compile(r"[\d,.]+")

log = logger("mover")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a watch decides, and when it may move.

    Attributes:
        by: the measure of a shard's weight.
        margin: tolerated distance of a node from the mean, as a part of the mean.
        least_gain: a plan is carried out if it takes at least this part of the mean from a node.
        exclude: nodes that keep their shards, and get none.
        over_s: the time between readings; load is measured over it.
        rest_s: how long a shard stays where it is after a move.
        max_lag_s: standbys and subscribers that are further behind make the next move wait.
        max_latency_s: a node that takes longer for a statement that reads no table makes the next move wait.
        window: the time of day at which moves may begin; ``None``: always.
        options: how a shard is moved.
    """

    by: By = By.LOAD
    margin: float = MARGIN
    least_gain: float = 0.1
    exclude: tuple[str, ...] = ()
    over_s: float = 60.0
    rest_s: float = 3600.0
    max_lag_s: float = 30.0
    max_latency_s: float = 0.1
    window: Window | None = None
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        """Refuse a measure that counts the rows that moves copy.

        Raises:
            BadArgument: it is writes.
        """
        if self.by is By.WRITES:
            raise BadArgument(
                "a watch can't go by writes: they are counted since statistics were reset, moves' copies too",
                hint="Use --by load, which is measured between two readings.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of a watch, or the end of one.

    Attributes:
        at: when.
        what: the kind.
        says: it in words.
        shard: the shard that is moved, if any.
        source: the node that it leaves.
        target: the node that it goes to.
        weight: the weight of the shard.
        seconds: how long its move took.
        pause_ms: how long its writers waited.
    """

    at: datetime
    what: What
    says: str
    shard: int | None = None
    source: str | None = None
    target: str | None = None
    weight: float | None = None
    seconds: float | None = None
    pause_ms: float | None = None

    def __str__(self) -> str:
        """Return it as a line of the log."""
        return f"{self.at:%Y-%m-%dT%H:%M:%SZ} {self.what}: {self.says}"


OnDecision = Callable[[Decision], object]


class Watch:
    """A rebalance that runs until it is stopped, in one thread.

    Args:
        catalog: the catalog.
        terms: how it decides.
        on_decision: receives each decision.
        on_event: receives the events of moves.
    """

    def __init__(
        self,
        catalog: Catalog,
        terms: Terms,
        on_decision: OnDecision,
        on_event: Callable[[Event], object] = lambda _event: None,
    ) -> None:
        self._catalog = catalog
        self._terms = terms
        self._on_decision = on_decision
        self._on_event = on_event
        self._stop = Flag()
        self._step = ""
        self._before: Counts | None = None
        self._readings: deque[Mapping[int, float]] = deque(maxlen=AGREEING)
        self._failed: dict[int, float] = {}
        self._told: set[tuple[str, str]] = set()

    def stop(self) -> None:
        """End the watch: now, or after the step of a move that has to be brought to its end."""
        self._stop.set()

    def run(self) -> None:
        """Watch until :meth:`stop`.

        Raises:
            ClusterConflict: another rebalance is under way.
            ConnectionFailed: the catalog is out of reach at the start, or for ten minutes.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            if not self._stop.is_set():
                raise
            self._say("stopped", "the move that was under way is open, and the next run resumes it")
        else:
            self._say("stopped", "no move is open")

    def _run(self) -> None:
        self._catalog.describe()
        lost_at: float | None = None
        while not self._stop.is_set():
            try:
                with rebalancing(self._catalog, COMMAND) as held:
                    back = "the catalog answers again"
                    self._say("started", self._terms_in_words() if lost_at is None else back)
                    lost_at = None
                    while not self._stop.is_set():
                        self._turn(held)
                        self._stop.wait(self._terms.over_s)
            except (ConnectionFailed, ClusterConflict) as error:
                # For some seconds after an outage the catalog still has this process's former session.
                if isinstance(error, ClusterConflict) and lost_at is None:
                    raise
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if now - lost_at > OUTAGE_S:
                    raise
                self._forget()
                self._say("waiting", f"for the catalog: {error.in_a_line()}")
                self._stop.wait(_RETRY_S)

    def look(self) -> Balance:
        """Report the decisions of a run after readings like this one, and return its plan; change nothing.

        By load it measures over ``over_s`` seconds.

        Raises:
            ShardidsError: a node does not answer.
        """
        self._say_open(self._open()[1], "would resume")
        self._read()
        while not self._readings:
            self._stop.wait(self._terms.over_s)
            self._read()
        found = self._plan([*self._readings])
        self._tell_plan(found)
        if (hindrance := self._hindrance()) is not None:
            self._say("waiting", hindrance)
        for transfer in found.transfers:
            reason = self.not_now(transfer, datetime.now(UTC))
            self._say("waiting" if reason else "moving", reason or _words(transfer), transfer)
        return found

    def _turn(self, held: HeldLock) -> None:
        """Take one reading and carry out its plan, if it has one; wait for a node that does not answer."""
        try:
            held.require()
            running, interrupted = self._open()
            if running:
                self._forget()
                self._say("waiting", _behind_move(running))
                return
            if interrupted:
                self._forget()
                self._say_open(interrupted, "resuming")
                self._ended(resume_open(self._catalog, self._options, self._follow, interrupted))
            self._read()
            if len(self._readings) < AGREEING:
                return
            if self._terms.window is not None and self._terms.window.left_s(datetime.now(UTC)) is None:
                self._say("waiting", f"for the window {self._terms.window}")
                return
            found = self._plan([*self._readings])
            self._tell_plan(found)
            if found.transfers:
                self._carry_out(found, held)
                self._forget()
        except (ConnectionFailed, StatementFailed) as error:
            # Raises if it was the catalog.
            held.require()
            self._forget()
            self._say("waiting", error.in_a_line())

    @property
    def _options(self) -> Options:
        return _automatic(self._terms.options)

    def _open(self) -> tuple[list[Move], list[Move]]:
        """Return the moves that processes work at, and those of a watch that were interrupted.

        Not among these are moves that could not be ended just now, and those of shards that are lost.
        """
        found = open_moves(self._catalog)
        with self._catalog.engine.connect() as connection:
            running = [move for move in found if lives(connection, move.epoch)]
        left = self._catalog.placement().lost.keys() | self._failed_now()
        return running, [
            move for move in found if move.automatic and move not in running and move.shard not in left
        ]

    def _resting(self) -> set[int]:
        with self._catalog.engine.connect() as connection:
            return shards_moved_within(connection, self._terms.rest_s)

    def _failed_now(self) -> set[int]:
        now = time.monotonic()
        self._failed = {shard: until for shard, until in self._failed.items() if until > now}
        return set(self._failed)

    def _read(self) -> None:
        placement = self._catalog.placement()
        if self._terms.by is not By.LOAD:
            self._readings.append(weigh(placement, self._catalog.url, self._terms.by))
            return
        now = Counts.read(placement, self._catalog.url)
        found = None if self._before is None else rates(self._before, now)
        if found is None:
            self._readings.clear()
        else:
            self._readings.append(found)
        self._before = now

    def _forget(self) -> None:
        """Measure anew: the readings are of another placement, or of too long ago."""
        self._before = None
        self._readings.clear()

    def _plan(self, readings: Sequence[Mapping[int, float]]) -> Balance:
        """Return the plan of the readings' mean; without moves if one of them has none."""
        shards = frozenset.intersection(*(frozenset(one) for one in readings))
        mean = {shard: sum(one[shard] for one in readings) / len(readings) for shard in shards}
        if len(readings) > 1:
            for one in readings:
                found = self._plan_of({shard: one[shard] for shard in shards})
                if not found.transfers:
                    return found
        return self._plan_of(mean)

    def _plan_of(self, weights: Mapping[int, float]) -> Balance:
        terms = self._terms
        is_idle = terms.by is By.LOAD and sum(weights.values()) < _LEAST_LOAD * len(
            self._catalog.placement().nodes
        )
        return plan_balance(
            self._catalog,
            terms.by,
            margin=terms.margin,
            exclude=terms.exclude,
            weights=dict.fromkeys(weights, 0.0) if is_idle else weights,
            resting=self._resting() | self._failed_now(),
            least_gain=terms.least_gain,
        )

    def _carry_out(self, plan: Balance, held: HeldLock) -> None:
        """Move the shards of a plan, each when limits and window let it."""
        planned_at = time.monotonic()
        for transfer in plan.transfers:
            while not self._stop.is_set() and (hindrance := self._hindrance()) is not None:
                self._say("waiting", hindrance)
                self._stop.wait(_RETRY_S)
                held.require()
            if self._stop.is_set():
                return
            if time.monotonic() - planned_at > _STALE_S:
                self._say("left", "the rest of the plan is too old: the load is measured anew")
                return
            if (
                self._catalog.placement().node_of.get(transfer.shard) != transfer.source
                or transfer.shard in self._resting()
            ):
                says = f"shard {transfer.shard}: another command has moved it, or it was lost"
                self._say("left", says, transfer)
                continue
            if reason := self.not_now(transfer, datetime.now(UTC)):
                self._say("waiting", reason, transfer)
                continue
            held.require()
            self._say("moving", _words(transfer), transfer)
            self._ended(carry_out(self._catalog, [transfer], self._options, self._follow))

    def _hindrance(self) -> str | None:
        """Return why no move may begin now: another move, a slow node, or followers that are behind."""
        terms = self._terms
        if running := self._open()[0]:
            return _behind_move(running)

        def ask(name: str, engine: Engine) -> str | None:
            with engine.connect() as connection:
                there = connection.execution_options(isolation_level="AUTOCOMMIT")
                if (answer := answer_s(there)) > terms.max_latency_s:
                    return f'node "{name}" takes {answer * 1000:,.0f} ms for a statement'
                if late := followers_behind(there, terms.max_lag_s, self._stop.wait):
                    return f'{", ".join(late)} of node "{name}": more than {terms.max_lag_s:g} s behind'
            return None

        placement = self._catalog.placement()
        with move_nodes(placement, self._catalog.url, name="shardids_watch") as nodes:
            answers = nodes.each(ask).all()
        return next((why for _, why in sorted(answers.items()) if why is not None), None)

    def not_now(self, transfer: Transfer, now: datetime) -> str | None:
        """Return why a move may not begin now: outside of the window, or likely to end after it."""
        window = self._terms.window
        if window is None:
            return None
        if (left_s := window.left_s(now)) is None:
            return f"for the window {window}"
        expected_s = self._expected_s(transfer)
        if expected_s > left_s:
            return (
                f"for the next window {window}: shard {transfer.shard} would take about {expected_s:,.0f} s,"
                f" and {left_s:,.0f} s are left"
            )
        return None

    def _expected_s(self, transfer: Transfer) -> float:
        sizes = weigh(self._catalog.placement(), self._catalog.url, By.SIZE)
        with self._catalog.engine.connect() as connection:
            rate = bytes_per_second(connection, _BYTES_A_SECOND)
        return _OVERHEAD_S + sizes.get(transfer.shard, 0.0) / rate

    def _follow(self, event: Event) -> None:
        """Follow a move; end it where it can be left to the next run, if the watch is to stop."""
        if isinstance(event, StepBegun):
            self._step = event.step
        if self._stop.is_set() and (self._step in _ENDED_AT or isinstance(event, Waiting)):
            # Not an Exception, for which the move would be undone.
            raise KeyboardInterrupt
        self._on_event(event)

    def _ended(self, done: Sequence[Result | NotMoved]) -> None:
        for one in done:
            if isinstance(one, NotMoved):
                self._failed[one.shard] = time.monotonic() + min(self._terms.rest_s, _AFTER_FAILURE_S)
                self._say("failed", str(one), one)
            else:
                pause = "" if one.pause_ms is None else f", without writes for {one.pause_ms:.0f} ms"
                self._say("moved", f"shard {one.shard}: {one.outcome} in {one.seconds:.1f} s{pause}", one)
                for warning in one.stale_views:
                    self._say("failed", warning)

    def _say_open(self, moves: Sequence[Move], how: str) -> None:
        for one in moves:
            says = f'{how} the move of shard {one.shard} from node "{one.source}" to "{one.target}"'
            self._say("resuming", f"{says}, which was interrupted at step {one.step}", one)

    def _tell_plan(self, plan: Balance) -> None:
        loads = ", ".join(f'node "{name}" {load:,.0f}' for name, load in plan.before.items())
        if plan.transfers:
            after = ", ".join(f'node "{name}" {load:,.0f}' for name, load in plan.after.items())
            moves = counted(len(plan.transfers), "move")
            self._say("uneven", f"{moves}; {self._terms.by} now {loads}; then {after}")
        else:
            self._say("even", f"nothing to move; {self._terms.by} {loads}")

    def _terms_in_words(self) -> str:
        terms = self._terms
        window = "at any time" if terms.window is None else f"in the window {terms.window}"
        return (
            f"balances {terms.by}, read every {terms.over_s:g} s; moves begin {window}, while followers are"
            f" at most {terms.max_lag_s:g} s behind and nodes answer in {terms.max_latency_s * 1000:g} ms"
        )

    def _say(self, what: What, says: str, of: Any = None) -> None:
        """Pass a decision on; until the next move the same is said once, whatever its figures are."""
        key = (what, _FIGURES.sub("", says) if what == "waiting" else "")
        if what in ("even", "uneven"):
            self._told -= {("even", ""), ("uneven", "")} - {key}
        elif what != "waiting":
            self._told.clear()
        if what in ("even", "uneven", "waiting"):
            if key in self._told:
                return
            self._told.add(key)
        decision = Decision(
            at=datetime.now(UTC),
            what=what,
            says=says,
            **{
                name: getattr(of, name, None)
                for name in ("shard", "source", "target", "weight", "seconds", "pause_ms")
            },
        )
        log.info("watch: %s: %s", what, says, extra={"shard": decision.shard})
        self._on_decision(decision)


def _automatic(options: Options) -> Options:
    """Return options for moves that a watch begins: a shard that another command changes waits."""
    return Options(
        verify=options.verify,
        max_pause_s=options.max_pause_s,
        trusted=options.trusted,
        on_busy=OnBusy.SKIP,
        automatic=True,
    )


def _behind_move(running: Sequence[Move]) -> str:
    return f"for the move of shard {running[0].shard} by another command"


def _words(transfer: Transfer) -> str:
    return (
        f'shard {transfer.shard} from node "{transfer.source}" to node "{transfer.target}":'
        f" weighs {transfer.weight:,.0f}"
    )
