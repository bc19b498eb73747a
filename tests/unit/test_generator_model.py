"""Every order in which sessions can run the generator's steps: no tick twice, and all in order.

In each state that a scenario can reach:

- no tick is issued twice, draws and reservations together;
- a tick is above all ticks that were returned, on any session, before its draw started;
- it is above every high-water tick that a fence returned, or an activation was told, before its draw started;
- it is above every tick that this incarnation of the server was advanced past before its draw started;
- while a fence is in force, from its return to the COMMIT of an activation, no tick above its high-water tick
  is issued;
- some session can go on, and no shard refuses for ever because of what a clock once showed.

An operation under way is known by the values that it received so far, so two states are taken for one only if
everything that can follow is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import pytest

from tests.support.lengths import sampled
from tests.unit.generator_model import (
    Action,
    Ending,
    Flaw,
    HighWater,
    Past,
    Rules,
    Shared,
    Step,
    Ticks,
    activate,
    activate_and_draw,
    advance_past,
    copy_files,
    crash,
    draw,
    fence,
    flush,
    move_and_return,
    published_draw,
    replace_by_copy,
    reserve,
    reset,
    restart,
)

Program: TypeAlias = tuple[Step, ...]


class Session(NamedTuple):
    """What a session has to do, how far it is in the first of it, and what that must be above."""

    todo: Program
    step: Step | None = None
    received: tuple[Any, ...] = ()
    floor: int = -1


class State(NamedTuple):
    """A state of everything."""

    shared: Shared
    sessions: tuple[Session, ...]


class Act(NamedTuple):
    """One action of one session with all that follows at once, and what each gave."""

    told: tuple[tuple[str, Any], ...]
    session: Session
    shared: Shared
    ending: Ending | None


class Move(NamedTuple):
    """An act as a step from one state to the next."""

    number: int
    act: Act
    after: State
    violation: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What came of exploring; ``trace`` leads to the violation in as few actions as can be."""

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.states} states", *self.trace, str(self.violation)))


def explore(programs: tuple[Program, ...], rules: Rules, looking_for: str = "") -> Exploration:
    """Visits all states that the sessions can reach, nearest first, up to the violation looked for."""
    pending.cache_clear()
    start = State(Shared(), tuple(map(Session, programs)))
    reached_from: dict[State, State | None] = {unordered(start): None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        violation = "no session can go on" if any(session.todo for session in state.sessions) else None
        for move in moves(rules, state):
            violation = None
            if move.violation and looking_for in move.violation:
                trace = (*path(rules, reached_from, state), line(state, move))
                return Exploration(states=len(reached_from), violation=move.violation, trace=trace)
            key = unordered(move.after)
            if key not in reached_from:
                reached_from[key] = state
                queue.append(move.after)
        if violation:
            trace = path(rules, reached_from, state)
            return Exploration(states=len(reached_from), violation=violation, trace=trace)
    return Exploration(states=len(reached_from))


def unordered(state: State) -> State:
    """The same for all states that differ only in which session is which."""
    return State(state.shared, tuple(sorted(state.sessions, key=hash)))


def moves(rules: Rules, state: State) -> Iterator[Move]:
    """What each session can do next, with each result that it can have."""
    rules = rules._replace(incarnation=state.shared.incarnation, timeline=state.shared.timeline)
    for number, waiting in enumerate(state.sessions):
        if not waiting.todo:
            continue
        session, shared = (waiting, state.shared) if waiting.step else started(waiting, state.shared)
        for act in acts(rules, session, shared):
            after, violation = recorded(act.shared, session.floor, act.ending)
            others = (
                state.sessions
                if after.incarnation == rules.incarnation
                else tuple(map(interrupted, state.sessions))
            )
            sessions = (*others[:number], act.session, *others[number + 1 :])
            yield Move(number, act, State(after, sessions), violation)


def started(session: Session, shared: Shared) -> tuple[Session, Shared]:
    floor = max(highest(shared.issued), shared.high_water, shared.past)
    return Session(session.todo, session.todo[0], (), floor), shared


def interrupted(session: Session) -> Session:
    return Session(session.todo[1:]) if session.step else session


def acts(rules: Rules, session: Session, shared: Shared) -> Iterator[Act]:
    assert session.step
    _, action = pending(rules, session.step, session.received)
    assert isinstance(action, Action)
    for result, after in action.results(shared):
        told = ((action.label, result),)
        (step, received), following = pending(rules, session.step, (*session.received, result))
        if not isinstance(following, Action):
            yield Act(told, Session(session.todo[1:]), after, following)
            continue
        going_on = Session(session.todo, step, received, session.floor)
        if not following.at_once:
            yield Act(told, going_on, after, None)
            continue
        for act in acts(rules, going_on, after):
            yield act._replace(told=told + act.told)


Position: TypeAlias = tuple[Step, tuple[Any, ...]]


@cache
def pending(rules: Rules, step: Step, received: tuple[Any, ...]) -> tuple[Position, Action | Ending]:
    """Where a step is after having received these values, and what comes next."""
    steps = step.run(rules, *step.arguments)
    try:
        action = next(steps)
        for value in received:
            action = steps.send(value)
    except StopIteration as stopped:
        following: Ending | Step = stopped.value
        return pending(rules, following, ()) if isinstance(following, Step) else ((step, received), following)
    return (step, received), action


def recorded(s: Shared, floor: int, ending: Ending | None) -> tuple[Shared, str | None]:
    """What the end of an operation leaves behind, and what is wrong with it."""
    violation = None
    if isinstance(ending, Ticks):
        first, last = ending
        ticks = ((1 << (last - first + 1)) - 1) << first
        if s.issued & ticks:
            violation = f"tick {highest(s.issued & ticks)} is issued twice"
        elif first <= floor and not s.was_reset:
            violation = f"tick {first} is issued out of order: its draw started when {floor} was taken"
        elif s.ceiling is not None and last > s.ceiling:
            violation = f"tick {last} is issued above the high-water tick {s.ceiling} of a fence in force"
        s = s._replace(issued=s.issued | ticks)
    elif isinstance(ending, HighWater):
        if highest(s.issued) > ending.tick:
            violation = f"tick {highest(s.issued)} had been issued above the high-water tick {ending.tick}"
        s = s._replace(ceiling=ending.tick, high_water=max(ending.tick, s.high_water))
    elif ending == "refused for ever":
        violation = "the shard is stopped for ever"
    elif isinstance(ending, Past):
        s = s._replace(past=max(ending.tick, s.past))
    return s, violation


def highest(ticks: int) -> int:
    return ticks.bit_length() - 1


def path(rules: Rules, reached_from: dict[State, State | None], state: State) -> tuple[str, ...]:
    lines: list[str] = []
    while (before := reached_from[unordered(state)]) is not None:
        lines.append(next(line(before, move) for move in moves(rules, before) if move.after == state))
        state = before
    return tuple(reversed(lines))


def line(before: State, move: Move) -> str:
    """Such as ``session 2: draw: nextval(id_counter) = 3, is current = False``."""
    operation = before.sessions[move.number].todo[0].run.__name__
    told = ", ".join(label if result is None else f"{label} = {result}" for label, result in move.act.told)
    ending = "" if move.act.ending is None else f" -> {move.act.ending}"
    return f"session {move.number + 1}: {operation}: {told}{ending}"


DRAW, RESERVE_1, RESERVE_2 = Step(draw), Step(reserve, (1,)), Step(reserve, (2,))
FENCE, ACTIVATE, ACTIVATE_ABOVE_5 = Step(fence), Step(activate), Step(activate, (5,))
ACTIVATE_ABOVE_81, RESERVE_8, RESERVE_16 = Step(activate, (81,)), Step(reserve, (8,)), Step(reserve, (16,))
ACTIVATE_AND_DRAW, COPY, REPLACE = map(Step, (activate_and_draw, copy_files, replace_by_copy))
PAST_3, PAST_5, PAST_8 = Step(advance_past, (3,)), Step(advance_past, (5,)), Step(advance_past, (8,))
MOVE_AND_RETURN, FLUSH, CRASH, PUBLISHED = map(Step, (move_and_return, flush, crash, published_draw))

SINGLE_DRAWS = ((DRAW,), (DRAW,), (DRAW,))
DRAWS = ((DRAW, DRAW), (DRAW,), (DRAW,))
RESERVATIONS = ((RESERVE_1,), (RESERVE_2,), (DRAW,))
RESERVATION_AND_DRAWS = ((RESERVE_2,), (DRAW, DRAW), (DRAW,))
FENCE_AND_DRAWS = ((FENCE, ACTIVATE, DRAW), (DRAW,), (DRAW,))
FENCE_AND_RESERVATION = ((FENCE, ACTIVATE), (DRAW,), (RESERVE_1,))
TWO_FENCES = ((FENCE, ACTIVATE), (FENCE, ACTIVATE), (DRAW,))
MOVE = ((FENCE, MOVE_AND_RETURN, DRAW), (DRAW,), (DRAW,))
LATE_AT_A_FENCE = ((FENCE, ACTIVATE), (DRAW,), (DRAW,))
ACTIVATION_ABOVE = ((ACTIVATE_ABOVE_5,), (DRAW, DRAW), (DRAW,))
CRASH_AND_DRAWS = ((DRAW, DRAW), (DRAW,), (FLUSH, CRASH, DRAW))
CRASH_AND_RESERVATION = ((DRAW,), (RESERVE_1,), (FLUSH, CRASH, DRAW))
CRASH_AND_FENCE = ((DRAW,), (DRAW,), (CRASH, FENCE))
FENCE_AND_CRASH = ((FENCE, ACTIVATE, DRAW), (DRAW,), (FLUSH, CRASH))
FENCE_CRASH_AND_FENCE = ((FENCE, ACTIVATE), (DRAW,), (CRASH, FENCE))
FENCE_CRASH_AND_ACTIVATION = ((FENCE, ACTIVATE), (DRAW,), (DRAW, CRASH, ACTIVATE))
CRASH_THEN_DRAW = ((DRAW,), (DRAW,), (CRASH, DRAW))
TWO_CRASHES = ((DRAW, DRAW), (CRASH, DRAW, CRASH, DRAW))
COPY_IN_PLACE = ((COPY, DRAW, DRAW), (REPLACE, DRAW))
LEAD_AND_COPY = ((COPY, RESERVE_8), (DRAW,), (REPLACE, RESERVE_1))
FENCE_AND_COPY = ((COPY, FENCE, ACTIVATE), (REPLACE, DRAW))
FENCED_COPY = ((FENCE, COPY, ACTIVATE, DRAW), (REPLACE, ACTIVATE, DRAW))
LOST_RELEASE = ((ACTIVATE_ABOVE_81, DRAW), (CRASH, DRAW))
LEADS_AND_CRASH = ((RESERVE_8, RESERVE_8), (CRASH, DRAW))
LEAD_AND_DRAW = ((RESERVE_16,), (DRAW,), (CRASH, RESERVE_8))
ROLLED_BACK_ACTIVATION = ((FENCE, ACTIVATE_AND_DRAW, DRAW), (DRAW,), (DRAW,))
ANSWER_AND_DRAW = ((PAST_3, DRAW), (DRAW,))
ANSWER_AT_A_FENCE = ((PAST_5, DRAW), (FENCE, ACTIVATE))
ANSWERS = ((PAST_3, DRAW), (DRAW,), (RESERVE_1,))
ANSWERS_OF_TWO = ((PAST_3, DRAW), (PAST_5, DRAW), (DRAW,))
ANSWER_AND_FENCE = ((PAST_5, DRAW), (FENCE, ACTIVATE), (DRAW,))
ANSWER_AND_CRASH = ((PAST_8, DRAW), (DRAW,), (CRASH, PAST_8, DRAW))
ANSWER_AND_COPY = ((COPY, PAST_8, DRAW), (REPLACE, PAST_8, DRAW))
RESTART, RESET = Step(restart), Step(reset, (40,))
WILD_CLOCK = ((DRAW, DRAW), (DRAW,))
WILD_CLOCK_AND_CRASH = ((DRAW, DRAW), (CRASH, DRAW, DRAW))
WILD_CLOCK_AND_FENCE = ((DRAW, DRAW), (FENCE, ACTIVATE))
RESTARTS = ((DRAW, COPY, RESTART, DRAW, RESTART, DRAW, RESTART, DRAW, RESTART, DRAW, REPLACE, DRAW),)
RESTARTS_AND_RESERVATION = (
    (COPY, RESTART, DRAW, RESTART, DRAW, RESTART, DRAW, RESERVE_8, REPLACE, RESERVE_2),
)
CRASHES_AND_PROMOTION = ((COPY, CRASH, DRAW, CRASH, DRAW, CRASH, DRAW), (REPLACE, DRAW, RESTART, DRAW))
RESET_AND_DRAWS = ((DRAW, RESET, DRAW), (DRAW,))
RESET_AND_RESERVATION = ((DRAW, RESET, RESERVE_2), (DRAW,))
RESERVATION_AND_RESET = ((RESERVE_8, RESET, DRAW),)
STEPS_AND_RESET = ((DRAW, DRAW, DRAW, RESET, DRAW),)
PUBLISHED_DRAWS = ((PUBLISHED, PUBLISHED), (PUBLISHED,), (PUBLISHED,))

STEADY, WIDE = Rules(times=(0,)), Rules(times=(0, 1, 2, 3))
IDLE = Rules(times=(0, 16), clock_is_honest=True)
"""Idle for longer than two margins, at any moment."""
WILD = Rules(times=(0, 511, 512, 1024))
"""Times of the layout and later ones, at which an offset of another incarnation reads as its first."""
WILD_LATER = Rules(times=(0, 512, 1024, -1024))
"""Of the layout the present only: across a crash the clock is assumed not to step back."""
AN_HOUR_AHEAD = Rules(times=(0, 300))
NEARLY_AN_HOUR_AHEAD = Rules(times=(0, 297, 300))
STEPPING = Rules(times=(0, 90, 300))
"""What is nearer is followed, and not noted."""
NEVER_FLUSHES = Rules(times=(0,), flushes=False)


SCENARIOS = [
    pytest.param(SINGLE_DRAWS, WIDE, 10_000, id="draws with a wide clock"),
    pytest.param(DRAWS, Rules(), 10_000, id="draws"),
    pytest.param(RESERVATIONS, Rules(), 5_000, id="reservations"),
    pytest.param(FENCE_AND_RESERVATION, Rules(), 10_000, id="a fence and a reservation"),
    pytest.param(TWO_FENCES, STEADY, 10_000, id="two fences"),
    pytest.param(MOVE, STEADY, 30_000, id="a move and return"),
    pytest.param(ACTIVATION_ABOVE, STEADY, 5_000, id="an activation above"),
    pytest.param(CRASH_AND_RESERVATION, Rules(), 5_000, id="a crash and a reservation"),
    pytest.param(CRASH_AND_FENCE, Rules(), 3_000, id="a crash, then a fence"),
    pytest.param(FENCE_AND_CRASH, STEADY, 10_000, id="a fence and a crash"),
    pytest.param(FENCE_CRASH_AND_FENCE, STEADY, 20_000, id="a fence, a crash and another fence"),
    pytest.param(FENCE_CRASH_AND_ACTIVATION, STEADY, 20_000, id="a fence, a crash and another activation"),
    pytest.param(ROLLED_BACK_ACTIVATION, STEADY, 5_000, id="draws in an activation's transaction"),
    pytest.param(CRASH_THEN_DRAW, IDLE, 8_000, id="a crash after idleness"),
    pytest.param(CRASH_AND_FENCE, IDLE, 7_000, id="a crash after idleness, then a fence"),
    pytest.param(CRASH_AND_DRAWS, NEVER_FLUSHES, 10_000, id="a crash, with nothing flushed"),
    pytest.param(TWO_CRASHES, Rules(), 8_000, id="two crashes"),
    pytest.param(COPY_IN_PLACE, IDLE, 6_000, id="a copy in the original's place"),
    pytest.param(LEAD_AND_COPY, NEVER_FLUSHES, 8_000, id="a copy in the place of an original that led"),
    pytest.param(FENCE_AND_COPY, IDLE, 8_000, id="a copy that has not heard of a fence"),
    pytest.param(LOST_RELEASE, NEVER_FLUSHES, 1_000, id="a release that is lost"),
    pytest.param(LEADS_AND_CRASH, Rules(), 4_000, id="leads, and a crash"),
    pytest.param(LEAD_AND_DRAW, Rules(), 15_000, id="a draw from a lead, and a crash"),
    pytest.param(ANSWER_AND_DRAW, WIDE, 1_000, id="an answer and a draw"),
    pytest.param(ANSWER_AT_A_FENCE, STEADY, 1_000, id="an answer at a fence"),
    pytest.param(WILD_CLOCK, WILD, 8_000, id="draws by a clock outside of the layout"),
    pytest.param(WILD_CLOCK_AND_CRASH, WILD_LATER, 5_000, id="a crash, by a clock outside of the layout"),
    pytest.param(WILD_CLOCK_AND_FENCE, WILD_LATER, 2_000, id="a fence, by a clock outside of the layout"),
    pytest.param(RESTARTS, STEADY, 10, id="restarts in a row, and a promotion"),
    pytest.param(RESTARTS_AND_RESERVATION, STEADY, 10, id="restarts, a reservation, and a promotion"),
    pytest.param(CRASHES_AND_PROMOTION, STEADY, 10, id="crashes, a promotion, and a restart"),
    pytest.param(ANSWER_AND_COPY, NEVER_FLUSHES, 1_000, id="an answer, and one of a copy"),
    pytest.param(RESERVATION_AND_RESET, NEARLY_AN_HOUR_AHEAD, 10, id="a reservation, taken back"),
    pytest.param(STEPS_AND_RESET, STEPPING, 10, id="steps of a clock, taken back"),
]
LARGE_SCENARIOS = [
    pytest.param(RESERVATION_AND_DRAWS, Rules(flushes=False), 50_000, id="a reservation that is overtaken"),
    pytest.param(FENCE_AND_DRAWS, STEADY, 30_000, id="a fence"),
    pytest.param(CRASH_AND_DRAWS, Rules(), 20_000, id="a crash"),
    pytest.param(FENCED_COPY, IDLE, 60_000, id="a fenced copy of a shard that was activated since"),
    pytest.param(ANSWERS, Rules(), 190_000, id="an answer, a draw and a reservation"),
    pytest.param(ANSWERS_OF_TWO, Rules(), 120_000, id="answers of two"),
    pytest.param(ANSWER_AND_FENCE, STEADY, 80_000, id="an answer and a fence"),
    pytest.param(ANSWER_AND_CRASH, STEADY, 80_000, id="an answer, and one after a crash"),
    pytest.param(RESET_AND_DRAWS, AN_HOUR_AHEAD, 30_000, id="a shard taken back from the future"),
    pytest.param(RESET_AND_RESERVATION, AN_HOUR_AHEAD, 30_000, id="a shard taken back, and reservations"),
]
"""Among the fault tests: tests/faults/test_generator_orders.py."""


@pytest.mark.parametrize(("programs", "rules", "least_states"), sampled(SCENARIOS, every=6))
def test_the_generator_keeps_its_promises_in_every_order(
    programs: tuple[Program, ...], rules: Rules, least_states: int
) -> None:
    require_promises(programs, rules, least_states)


def require_promises(programs: tuple[Program, ...], rules: Rules, least_states: int) -> None:
    explored = explore(programs, rules)
    assert explored.violation is None, str(explored)
    assert explored.states >= least_states


BROKEN = [
    (Flaw.NO_SECOND_READ_OF_OFFSET, SINGLE_DRAWS, Rules(), "twice"),
    (Flaw.SETVAL_WITHOUT_LOCK, SINGLE_DRAWS, WIDE, "out of order"),
    (Flaw.SETVAL_WITHOUT_LOCK, RESERVATIONS, Rules(), "twice"),
    (Flaw.RESERVE_OVER_LATE_DRAWS, RESERVATION_AND_DRAWS, STEADY, "twice"),
    (Flaw.WIDEN_OVER_DRAWS_BETWEEN, RESERVATION_AND_DRAWS, Rules(), "twice"),
    (Flaw.SAME_OFFSET_AFTER_FENCE, MOVE, STEADY, "twice"),
    (Flaw.RELEASE_OF_ANY_FENCE, TWO_FENCES, STEADY, "of a fence in force"),
    (Flaw.ACTIVATE_WITHOUT_STOP, ACTIVATION_ABOVE, STEADY, "out of order"),
    (Flaw.NO_MARGIN_AFTER_CRASH, CRASH_AND_DRAWS, Rules(), "twice"),
    (Flaw.NO_MARGIN_PAST_THE_CLOCK, CRASH_THEN_DRAW, IDLE, "twice"),
    (Flaw.NO_MARGIN_PAST_THE_CLOCK, COPY_IN_PLACE, IDLE, "twice"),
    (Flaw.NO_MARGIN_PAST_THE_CLOCK_IN_FENCE, CRASH_AND_FENCE, IDLE, "above the high-water tick"),
    (Flaw.NO_MARGIN_PAST_THE_HIGH_WATER_TICK, LOST_RELEASE, NEVER_FLUSHES, "twice"),
    (Flaw.LEAD_NOT_FLUSHED, LEADS_AND_CRASH, STEADY, "twice"),
    (Flaw.LEAD_DRAWN_BEFORE_FLUSHED, LEAD_AND_DRAW, STEADY, "twice"),
    (Flaw.CANCELLED_FLUSH_TRUSTED, LEAD_AND_DRAW, STEADY, "twice"),
    (Flaw.RELEASE_BY_OWN_TRANSACTION, ROLLED_BACK_ACTIVATION, STEADY, "of a fence in force"),
    (Flaw.NO_MARGIN_IN_RELEASE, FENCE_AND_CRASH, NEVER_FLUSHES, "twice"),
    (Flaw.NO_MARGIN_IN_FENCE, CRASH_AND_FENCE, Rules(), "above the high-water tick"),
    (
        Flaw.NO_MARGIN_IN_FENCE_AFTER_RELEASE,
        FENCE_CRASH_AND_FENCE,
        NEVER_FLUSHES,
        "above the high-water tick",
    ),
    (Flaw.INCARNATION_FORGOTTEN_IN_ACTIVATE, FENCE_CRASH_AND_ACTIVATION, NEVER_FLUSHES, "twice"),
    (Flaw.AHEAD_IN_ANY_INCARNATION, CRASH_AND_DRAWS, Rules(), "twice"),
    (Flaw.STEP_WITHOUT_LOCK, SINGLE_DRAWS, WIDE, "out of order"),
    (Flaw.STEP_UNSEEN, LATE_AT_A_FENCE, Rules(), "above the high-water tick"),
    (Flaw.RAISE_UNSEEN, SINGLE_DRAWS, WIDE, "out of order"),
    (Flaw.FOLLOW_IN_ANY_INCARNATION, CRASH_AND_DRAWS, Rules(), "twice"),
    (Flaw.LOCK_KEPT_ON_CANCEL, RESERVATIONS, Rules(), "no session can go on"),
    (Flaw.PAST_BY_THE_CLOCK, ANSWER_AND_DRAW, WIDE, "out of order"),
    (Flaw.CLOCK_STORED_PAST_THE_END, WILD_CLOCK, WILD, "for ever"),
    (Flaw.TIME_MASKED, WILD_CLOCK, WILD, "twice"),
    (Flaw.ANY_INCARNATION_BY_ITS_TIME, WILD_CLOCK_AND_CRASH, WILD_LATER, "twice"),
    (Flaw.RESTARTS_ADD_UP, RESTARTS, STEADY, "twice"),
    (Flaw.PROMOTION_LIKE_A_RESTART, RESTARTS, STEADY, "twice"),
    (Flaw.RESET_WITHOUT_PASSING_OVER, RESET_AND_DRAWS, AN_HOUR_AHEAD, "twice"),
    (Flaw.RESERVE_OVER_PASSED, RESET_AND_RESERVATION, AN_HOUR_AHEAD, "twice"),
    (Flaw.STEP_NOTED_ABOVE_WHAT_IS_SET_ASIDE, RESERVATION_AND_RESET, NEARLY_AN_HOUR_AHEAD, "twice"),
    (Flaw.RESET_FROM_A_LATER_STEP, STEPS_AND_RESET, STEPPING, "twice"),
]


def test_every_flaw_is_tried() -> None:
    assert {flaw for flaw, *_ in BROKEN} == set(Flaw)


@pytest.mark.parametrize(("flaw", "programs", "rules", "violation"), sampled(BROKEN, every=6))
def test_each_flaw_shows(flaw: Flaw, programs: tuple[Program, ...], rules: Rules, violation: str) -> None:
    explored = explore(programs, rules._replace(flaw=flaw), violation)
    assert explored.violation is not None, str(explored)
    assert violation in explored.violation
    assert explored.trace


def test_the_published_function_gives_duplicates_even_if_the_clock_never_goes_back() -> None:
    explored = explore(PUBLISHED_DRAWS, Rules(clock_is_honest=True), "twice")
    assert explored.violation is not None, str(explored)
    assert explored.trace


def test_a_counterexample_is_told_action_by_action() -> None:
    explored = explore(SINGLE_DRAWS, Rules(flaw=Flaw.NO_SECOND_READ_OF_OFFSET), "twice")
    assert str(explored).splitlines()[1:] == [
        "session 1: draw: offset = 0 ms",
        "session 1: draw: nextval(counter) = 1, is current = False, clock = 1, is passed over = False",
        "session 1: draw: try lock = True, offset = 0 ms",
        "session 2: draw: offset = 0 ms",
        "session 1: draw: nextval(offset) = 2 ms, unlock",
        "session 1: draw: offset = 2 ms",
        "session 1: draw: nextval(counter) = 2, is ahead = True, is passed over = False -> tick 6",
        "session 3: draw: offset = 2 ms",
        "session 3: draw: nextval(counter) = 3, is current = False, clock = 0",
        "session 3: draw: offset = 2 ms",
        "session 3: draw: nextval(counter) = 4, is ahead = False",
        "session 3: draw: take lock",
        "session 3: draw: row = (active, unfences None, high water -1, incarnation 0), offset = 2 ms",
        "session 3: draw: counter = 4, clock = 0, passed = (0, -1), unlock",
        "session 3: draw: nextval(counter) = 5, is passed over = False -> tick 9",
        "session 2: draw: nextval(counter) = 6, is current = True, is passed over = False -> tick 6",
        "tick 6 is issued twice",
    ]
