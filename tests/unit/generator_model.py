"""The generator's algorithm in atomic actions, for ``test_generator_model.py`` to run in every order.

Each operation below is a Python generator that mirrors a function of ``sql/engine/engine.v1.sql`` and
``sql/engine/admin.v1.sql``. Each ``yield`` is one atomic action on what the sessions share, and any other
session may act between two of them.

=====================  ===============================================================================
here                   there
=====================  ===============================================================================
draw                   ``next_id``
catch_up               ``catch_up``, in which a cancel may end the statement
draw_once_more         ``lagging_id``, after ``catch_up``
draw_again             ``late_id``, after ``advance``
advance                ``advance``, up to its loop
raise_to, set_aside    the loop of ``advance``, without and with ``ticks``
log_offset             ``log_offset``; with it a cancel may end the statement
reserve                ``reserve``
advance_past           ``advance_past``: by what is stored, or by ``advance``
stop, fence, activate  of the same names; an ``advance`` after ``activate`` releases the fence
activate_and_draw      ``activate`` and ``next_id`` in one transaction
reset                  ``fence``, ``reset_clock`` and ``activate``
=====================  ===============================================================================

The clock shows any of a few times at each reading: it jumps, forth and back; an honest one never goes back.
It may show times before the layout's first and after its last, and those at which an offset of another
incarnation, or a fence, reads as a time of the present. A commit may be a rollback. A crash loses what was
not flushed; a sequence's log runs ahead of its values.
Small here and large there are the ticks of a ms (2, 1,024), the margin (6 ms, 10 s), a step of the offset
(2 ms, 16 ms), how far it follows the clock in steps (4 ms, 256 ms) and without ``advance`` (100 ms, an
hour), how far the log of a sequence runs ahead (1 value, 32), the window of ``is_current`` (from 2 ms ahead
of the clock to 1 ms behind it; a minute and 2 ms), the layout's time (512 ms, 69 years) and how far the
offsets of two incarnations are apart (1,024 ms, 139 years). Left out are ``max_ahead``, ``max_step``,
copies beside their original, the part of the margin that depends on the mark, the eighth of the margin
within which nothing is flushed again, and what ``catch_up`` asks of the shard's row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import StrEnum, auto
from typing import Any, NamedTuple, TypeAlias

SEQUENCE_BITS = 1
MARGIN_MS = 6
LOGGED_AHEAD = 1
AHEAD_MS, BEHIND_MS = 2, 1
STEP_MS, MOST_STEPPED_MS = 2, 4
LIMIT_MS, APART_MS = 512, 1024
MOST_FOLLOWED_MS = 100
FENCED = -1


class Flaw(StrEnum):
    """What can be got wrong in a line or two of the operations."""

    NO_SECOND_READ_OF_OFFSET = auto()
    SETVAL_WITHOUT_LOCK = auto()
    RESERVE_OVER_LATE_DRAWS = auto()
    WIDEN_OVER_DRAWS_BETWEEN = auto()
    SAME_OFFSET_AFTER_FENCE = auto()
    RELEASE_OF_ANY_FENCE = auto()
    RELEASE_BY_OWN_TRANSACTION = auto()
    ACTIVATE_WITHOUT_STOP = auto()
    NO_MARGIN_AFTER_CRASH = auto()
    NO_MARGIN_PAST_THE_CLOCK = auto()
    NO_MARGIN_PAST_THE_HIGH_WATER_TICK = auto()
    NO_MARGIN_IN_RELEASE = auto()
    NO_MARGIN_IN_FENCE = auto()
    NO_MARGIN_IN_FENCE_AFTER_RELEASE = auto()
    NO_MARGIN_PAST_THE_CLOCK_IN_FENCE = auto()
    INCARNATION_FORGOTTEN_IN_ACTIVATE = auto()
    AHEAD_IN_ANY_INCARNATION = auto()
    LEAD_NOT_FLUSHED = auto()
    LEAD_DRAWN_BEFORE_FLUSHED = auto()
    CANCELLED_FLUSH_TRUSTED = auto()
    STEP_WITHOUT_LOCK = auto()
    STEP_UNSEEN = auto()
    RAISE_UNSEEN = auto()
    FOLLOW_IN_ANY_INCARNATION = auto()
    LOCK_KEPT_ON_CANCEL = auto()
    PAST_BY_THE_CLOCK = auto()
    CLOCK_STORED_PAST_THE_END = auto()
    TIME_MASKED = auto()
    ANY_INCARNATION_BY_ITS_TIME = auto()
    RESTARTS_ADD_UP = auto()
    PROMOTION_LIKE_A_RESTART = auto()
    RESET_WITHOUT_PASSING_OVER = auto()
    RESERVE_OVER_PASSED = auto()
    STEP_NOTED_ABOVE_WHAT_IS_SET_ASIDE = auto()
    RESET_FROM_A_LATER_STEP = auto()


class Offset(NamedTuple):
    """A value of id_offset, which SQL packs into one bigint.

    ``incarnation`` is the server's that raised it; negative if fenced. Nobody draws from a pending one.
    ``timeline`` is that incarnation's; a fence has none.
    """

    ms: int
    incarnation: int = 0
    pending: bool = False
    timeline: int = 0

    @property
    def fenced(self) -> bool:
        return self.incarnation < 0

    def __str__(self) -> str:
        of = " fenced" if self.fenced else f" of incarnation {self.incarnation}" * (self.incarnation > 0)
        return f"{self.ms} ms{of}" + " pending" * self.pending


class Row(NamedTuple):
    """The shard's row in table ``shardids.shard``."""

    active: bool = True
    unfences: Offset | None = None
    high_water: int = -1
    incarnation: int = 0
    timeline: int = 0

    def __str__(self) -> str:
        state = "active" if self.active else "fenced"
        return (
            f"({state}, unfences {self.unfences}, high water {self.high_water},"
            f" incarnation {self.incarnation})"
        )


class Stored(NamedTuple):
    """What a server begins with: all that a crash leaves, or a copy holds."""

    counter: int = 0
    offset: Offset = Offset(0)
    row: Row = Row()


class Shared(NamedTuple):
    """What all sessions share; below the line, what the properties look back on."""

    counter: int = 0
    logged: int = 0  # the counter after a crash, once flushed: log records run ahead of the values
    offset: Offset = Offset(0)
    logged_offset: Offset = Offset(0)
    row: Row = Row()
    lock: bool = False
    row_lock: bool = False
    incarnation: int = 0
    timeline: int = 0
    clock_ms: int = 0
    passed: tuple[int, int] = (0, -1)  # the ticks that the shard passes over: the first and the last
    noted: tuple[int, int] | None = None  # to where a clock went ahead by far, and where the shard was then
    flushed: Stored = Stored()
    copy: Stored = Stored()
    # ----
    issued: int = 0  # bit t is set if tick t was issued
    high_water: int = -1  # the highest that a fence returned or the row had
    ceiling: int | None = None  # the high-water tick of the fence in force
    past: int = -1  # the highest that this incarnation was advanced past
    was_reset: bool = False  # ticks that were issued by the wrong clock are above later ones

    def stored(self) -> Stored:
        return Stored(self.logged, self.logged_offset, self.row)


class Rules(NamedTuple):
    """What an operation runs under. An honest clock never goes back.

    ``flushes``: as on PostgreSQL 17 and later, a lead is flushed before anybody draws from it.
    """

    flaw: Flaw | None = None
    times: tuple[int, ...] = (0, 1)
    clock_is_honest: bool = False
    flushes: bool = True
    incarnation: int = 0
    timeline: int = 0

    def own(self, ms: int) -> Offset:
        return Offset(ms, self.incarnation, timeline=self.timeline)


class Action(NamedTuple):
    """One atomic action, with all results that it can have: none while it must wait.

    One ``at_once`` joins the action before it, because no other session could tell the difference: it reads
    what nobody can change at the time, or gives the lock back.
    """

    label: str
    results: Callable[[Shared], list[tuple[Any, Shared]]]
    at_once: bool = False


class Ticks(NamedTuple):
    """An operation ended, and these ticks are the caller's."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"tick {self.first}" if self.first == self.last else f"ticks {self.first} to {self.last}"


class HighWater(NamedTuple):
    """A fence ended, and no tick above this one was issued."""

    tick: int

    def __str__(self) -> str:
        return f"high-water tick {self.tick}"


class Past(NamedTuple):
    """An operation ended, and this incarnation issues no tick from now on that is not above this one."""

    tick: int

    def __str__(self) -> str:
        return f"past tick {self.tick}"


class Step(NamedTuple):
    """An operation, or where one goes on, remembering nothing but these arguments."""

    run: Callable[..., Steps]
    arguments: tuple[Any, ...] = ()


Ending: TypeAlias = Ticks | HighWater | Past | str
Steps: TypeAlias = Generator[Action, Any, Ending | Step]


# Actions


def read(what: str, *, at_once: bool = False) -> Action:
    return Action(what, lambda s: [(getattr(s, what), s)], at_once)


def change(label: str, *, at_once: bool = False, **to: object) -> Action:
    return Action(label, lambda s: [(None, s._replace(**to))], at_once)


def take(lock: str) -> Action:
    taken = change(f"take {lock}", **{lock: True})
    return taken._replace(results=lambda s: [] if getattr(s, lock) else taken.results(s))


def try_lock() -> Action:
    return Action("try lock", lambda s: [(False, s)] if s.lock else [(True, s._replace(lock=True))])


def unlock() -> Action:
    return change("unlock", lock=False, at_once=True)


def setval(offset: Offset) -> Action:
    return change(f"setval(offset, {offset})", offset=offset, logged_offset=offset)


def step_or_cancel() -> Action:
    """A fence is below zero: a step lowers what it keeps."""

    def results(s: Shared) -> list[tuple[Offset | None, Shared]]:
        ms = -STEP_MS if s.offset.fenced else STEP_MS
        offset = s.offset._replace(ms=s.offset.ms + ms)
        logged = s.logged_offset
        if s.offset == logged or abs(logged.ms) < abs(offset.ms):
            logged = offset._replace(ms=offset.ms + ms * LOGGED_AHEAD)
        return [(offset, s._replace(offset=offset, logged_offset=logged)), (None, s)]

    return Action("nextval(offset)", results)


def nextval() -> Action:
    def results(s: Shared) -> list[tuple[int, Shared]]:
        counter = s.counter + 1
        logged = s.logged if counter <= s.logged else counter + LOGGED_AHEAD
        return [(counter, s._replace(counter=counter, logged=logged))]

    return Action("nextval(counter)", results)


def clock(rules: Rules) -> Action:
    if rules.clock_is_honest:
        times = rules.times
        return Action(
            "clock", lambda s: [(now, s._replace(clock_ms=now)) for now in times if now >= s.clock_ms]
        )
    return Action("clock", lambda s: [(now, s) for now in rules.times], at_once=True)


def reads_as(rules: Rules, seen: Offset, drawn: int) -> int:
    """The time of a tick, in ms, as this incarnation computes it from an offset of any, or from a fence."""
    counted = drawn >> SEQUENCE_BITS
    if seen.fenced:
        return -2 - seen.ms - (rules.incarnation + 1) * APART_MS + counted
    # A pending offset bears a mark that no incarnation has.
    mark = seen.incarnation + (0.5 if seen.pending else 0)
    return int((mark - rules.incarnation) * APART_MS) + seen.ms + counted


def is_current(rules: Rules, seen: Offset, drawn: int) -> Action:
    ms = reads_as(rules, seen, drawn)
    if rules.flaw is Flaw.TIME_MASKED:
        ms &= ~LIMIT_MS
    is_own = rules.flaw in (Flaw.ANY_INCARNATION_BY_ITS_TIME, Flaw.TIME_MASKED) or 0 <= ms < LIMIT_MS

    def results(s: Shared) -> list[tuple[bool, Shared]]:
        earliest = s.clock_ms if rules.clock_is_honest else min(rules.times)
        answers = {is_own and -AHEAD_MS <= now - ms < BEHIND_MS for now in rules.times if now >= earliest}
        return [(answer, s) for answer in sorted(answers)]

    return Action("is current", results, at_once=True)


def is_ahead(rules: Rules, seen: Offset) -> Action:
    """Or lags by little: any answer, as if the clock, ``max_ahead`` and the row were unknown."""
    may_be = not seen.pending and (
        seen.incarnation == rules.incarnation
        or (rules.flaw is Flaw.AHEAD_IN_ANY_INCARNATION and not seen.fenced)
    )
    answers = [False, True] if may_be and seen.ms < LIMIT_MS else [False]
    return Action("is ahead", lambda s: [(answer, s) for answer in answers], at_once=True)


def commit(row: Row) -> Action:
    def results(s: Shared) -> list[tuple[str, Shared]]:
        rolled_back = s._replace(row_lock=False)
        committed = rolled_back._replace(row=row, high_water=max(s.high_water, row.high_water))
        if row.active:
            committed = committed._replace(ceiling=None)
        return [("commit", committed._replace(flushed=committed.stored())), ("rollback", rolled_back)]

    return Action(f"row := {row}", results)


def roll_back() -> Action:
    return change("rollback", row_lock=False)


# Operations


def tick_of(offset_ms: int, counter: int) -> int:
    return (offset_ms << SEQUENCE_BITS) + counter


def draw(rules: Rules) -> Steps:
    seen = yield read("offset")
    drawn = yield nextval()
    if (yield is_current(rules, seen, drawn)) and (yield from is_unchanged(rules, seen)):
        # Past the layout's end the times would begin again.
        tick = tick_of(seen.ms, drawn) % (LIMIT_MS << SEQUENCE_BITS)
        if not (yield is_passed(rules, tick)):
            return Ticks(tick, tick)
    return Step(catch_up, (seen, drawn))


def is_passed(rules: Rules, tick: int, ticks: int = 1) -> Action:
    """Whether some of so many ticks up to this one are among those that the shard passes over."""

    def results(s: Shared) -> list[tuple[bool, Shared]]:
        return [(overlaps(s.passed, tick, ticks) and rules.flaw is not Flaw.RESET_WITHOUT_PASSING_OVER, s)]

    return Action("is passed over", results, at_once=True)


def overlaps(passed: tuple[int, int], tick: int, ticks: int) -> bool:
    first, last = passed
    return first <= last and first <= tick and tick - ticks < last


def catch_up(rules: Rules, seen: Offset, drawn: int) -> Steps:
    """The counter that is read there may be above what was drawn; so may the clock."""
    now = yield clock(rules)
    is_bounded = rules.flaw not in (Flaw.CLOCK_STORED_PAST_THE_END, Flaw.TIME_MASKED)
    if is_bounded:
        now = min(now, LIMIT_MS - 1 - STEP_MS)
    target = now - (drawn >> SEQUENCE_BITS)
    is_far = target - seen.ms > MOST_FOLLOWED_MS and is_bounded
    if (
        is_far
        or not is_late(rules, seen, target)
        or (yield is_passed(rules, tick_of(now + MOST_FOLLOWED_MS, 0), 1 << 20))
    ):
        return Step(draw_once_more)
    if rules.flaw is not Flaw.STEP_WITHOUT_LOCK and not (yield try_lock()):
        return Step(draw_once_more)
    raised = yield read("offset", at_once=rules.flaw is not Flaw.STEP_WITHOUT_LOCK)
    if rules.flaw is Flaw.RAISE_UNSEEN:
        yield setval(rules.own(target))
    elif rules.flaw is Flaw.STEP_UNSEEN:
        yield step_or_cancel()
    while is_late(rules, raised, target):
        if target - raised.ms > MOST_STEPPED_MS or raised.incarnation != rules.incarnation:
            raised = rules.own(target)
            yield setval(raised)
        elif (raised := (yield step_or_cancel())) is None:
            if rules.flaw is not Flaw.LOCK_KEPT_ON_CANCEL:
                yield unlock()
            return "cancelled"
    if rules.flaw is not Flaw.STEP_WITHOUT_LOCK:
        yield unlock()
    return Step(draw_once_more)


def is_late(rules: Rules, seen: Offset, target: int) -> bool:
    is_own = seen.incarnation == rules.incarnation and not seen.pending
    may_be = is_own or (rules.flaw is Flaw.FOLLOW_IN_ANY_INCARNATION and not seen.fenced)
    return may_be and target - seen.ms >= BEHIND_MS


def draw_once_more(rules: Rules) -> Steps:
    """At the clock or some way from it, as another session may have the lock: any lag may pass."""
    seen = yield read("offset")
    drawn = yield nextval()
    tick = tick_of(seen.ms, drawn)
    if (
        (yield is_ahead(rules, seen))
        and (yield from is_unchanged(rules, seen))
        and not (yield is_passed(rules, tick))
    ):
        return Ticks(tick, tick)
    return Step(advance)


def draw_again(rules: Rules, seen: Offset) -> Steps:
    tick = tick_of(seen.ms, (yield nextval()))
    if (yield from is_unchanged(rules, seen)) and not (yield is_passed(rules, tick)):
        return Ticks(tick, tick)
    return Step(advance)


def is_unchanged(rules: Rules, seen: Offset) -> Generator[Action, Any, bool]:
    return rules.flaw is Flaw.NO_SECOND_READ_OF_OFFSET or (yield read("offset")) == seen


def reserve(rules: Rules, ticks: int) -> Steps:
    yield nextval()
    return Step(advance, (ticks,))


def advance_past(rules: Rules, tick: int) -> Steps:
    seen = yield read("offset")
    drawn = yield read("counter")
    if rules.flaw is Flaw.PAST_BY_THE_CLOCK and (yield clock(rules)) << SEQUENCE_BITS > tick:
        return Past(tick)
    if seen == rules.own(seen.ms) and tick_of(seen.ms, drawn) >= tick:
        return Past(tick)
    return Step(advance, (0, None, tick))


def advance(rules: Rules, ticks: int = 0, own_row: Row | None = None, past_tick: int | None = None) -> Steps:
    """What raises the offset: to the clock, above a fence, past a crash or a tick, and by ``ticks``.

    ``own_row`` is the row's version that the caller's transaction wrote.
    """
    if rules.flaw is not Flaw.SETVAL_WITHOUT_LOCK:
        yield take("lock")
    row = own_row or (yield read("row"))
    seen = yield read("offset", at_once=rules.flaw is not Flaw.SETVAL_WITHOUT_LOCK)
    is_own = seen == rules.own(seen.ms)
    released = row.unfences == seen or rules.flaw is Flaw.RELEASE_OF_ANY_FENCE
    may_release = own_row is None or rules.flaw is Flaw.RELEASE_BY_OWN_TRANSACTION
    if not row.active or not (is_own or (may_release and (released or not seen.fenced))):
        return Step(refuse, (own_row is not None,))
    counter = yield read("counter")
    now = yield clock(rules)
    above = row if past_tick is None else row._replace(high_water=max(row.high_water, past_tick))
    target = target_ms(rules, seen, above, counter, now)
    if margin_ms(rules, seen, row) and waits(rules, target + (counter >> SEQUENCE_BITS) - now, seen, row):
        return Step(refuse)
    passed = yield read("passed", at_once=True)
    goes_past = rules.flaw is not Flaw.RESET_WITHOUT_PASSING_OVER and not (
        ticks and rules.flaw is Flaw.RESERVE_OVER_PASSED
    )
    if goes_past and overlaps(passed, tick_of(target + 1, counter), ticks + 4):
        target = ((passed[1] - counter + ticks) >> SEQUENCE_BITS) + 1
    if now >= LIMIT_MS:
        return Step(refuse)
    reached = max(seen.ms, (row.high_water - counter) >> SEQUENCE_BITS) + (counter >> SEQUENCE_BITS)
    if now - reached > MOST_FOLLOWED_MS:
        below = 0 if rules.flaw is Flaw.STEP_NOTED_ABOVE_WHAT_IS_SET_ASIDE else (ticks >> SEQUENCE_BITS) + 1
        yield note(now - below, reached)
    if target + (counter >> SEQUENCE_BITS) >= LIMIT_MS:
        yield unlock()
        return "refused for ever" if seen.ms >= LIMIT_MS else "refused"
    if not ticks:
        return Step(raise_to, (target, seen, target + (counter >> SEQUENCE_BITS) - now, past_tick))
    old = seen if seen.incarnation == rules.incarnation else Offset(target)
    return Step(set_aside, (target, old, ticks, now if rules.flushes else 0))


def note(ms: int, reached_ms: int) -> Action:
    """The first step stays: a clock's later ones are above it."""

    def results(s: Shared) -> list[tuple[None, Shared]]:
        first, before = s.noted or (ms, 0)
        return [(None, s._replace(noted=(first, max(before, reached_ms if reached_ms < first else 0))))]

    return Action("note", results, at_once=True)


def target_ms(rules: Rules, seen: Offset, row: Row, counter: int, now: int) -> int:
    clock_ms = now - (counter >> SEQUENCE_BITS)
    high_water_ms = ((row.high_water - counter) >> SEQUENCE_BITS) + 1
    margin = margin_ms(rules, seen, row)
    if (
        margin
        and is_promoted(rules, seen, row)
        and rules.flaw not in (Flaw.NO_MARGIN_PAST_THE_CLOCK, Flaw.PROMOTION_LIKE_A_RESTART)
    ):
        clock_ms += 3 * MARGIN_MS
    if rules.flaw is Flaw.NO_MARGIN_PAST_THE_CLOCK:
        return max(seen.ms + max(margin, seen.fenced), clock_ms, high_water_ms)
    if rules.flaw is Flaw.NO_MARGIN_PAST_THE_HIGH_WATER_TICK:
        return max(max(seen.ms + seen.fenced, clock_ms) + margin, high_water_ms)
    above_fence = seen.fenced and rules.flaw is not Flaw.SAME_OFFSET_AFTER_FENCE
    return max(seen.ms + above_fence, clock_ms, high_water_ms) + margin


def is_promoted(rules: Rules, seen: Offset, row: Row) -> bool:
    return (row.timeline if seen.fenced else seen.timeline) != rules.timeline


def waits(rules: Rules, lead_ms: int, seen: Offset, row: Row) -> bool:
    """Whether a new incarnation waits for the clock, so that jumps don't add up."""
    most = (4 if is_promoted(rules, seen, row) else 3) * MARGIN_MS
    return most < lead_ms <= 6 * MARGIN_MS and rules.flaw is not Flaw.RESTARTS_ADD_UP


def margin_ms(rules: Rules, seen: Offset, row: Row) -> int:
    """How much of what was issued a crash may have made the server forget.

    After an activation that may be the release of the fence as well: the offset is the fenced one again.
    """
    if seen.fenced:
        forgotten = row.active and row.unfences == seen and row.incarnation != rules.incarnation
        return MARGIN_MS if forgotten and rules.flaw is not Flaw.NO_MARGIN_IN_RELEASE else 0
    is_new = seen.incarnation != rules.incarnation
    return MARGIN_MS if is_new and rules.flaw is not Flaw.NO_MARGIN_AFTER_CRASH else 0


def refuse(_rules: Rules, in_transaction: bool = False) -> Steps:
    yield unlock()
    if in_transaction:
        yield roll_back()
    return "refused"


def log_offset(rules: Rules, target: int, seen: Offset, lead_ms: int) -> Generator[Action, Any, bool]:
    """Flushes an offset that leads by more than half the margin; whether a cancel ends the statement."""
    trusted = rules.flaw is Flaw.CANCELLED_FLUSH_TRUSTED and seen.pending and target == seen.ms
    if lead_ms * 2 <= MARGIN_MS or not rules.flushes or rules.flaw is Flaw.LEAD_NOT_FLUSHED or trusted:
        return False
    drawn_before = rules.flaw is Flaw.LEAD_DRAWN_BEFORE_FLUSHED
    yield setval(rules.own(target)._replace(pending=not drawn_before))
    return (yield flush_or_cancel()) == "cancel"


def flush_or_cancel() -> Action:
    return Action("flush", lambda s: [("done", s._replace(flushed=s.stored())), ("cancel", s)])


def raise_to(rules: Rules, target: int, seen: Offset, lead_ms: int, past_tick: int | None = None) -> Steps:
    raised = rules.own(target)
    if raised != seen:
        if (yield from log_offset(rules, target, seen, lead_ms)):
            return Step(refuse)
        yield setval(raised)
    yield unlock()
    return Step(draw_again, (raised,)) if past_tick is None else Past(past_tick)


def set_aside(rules: Rules, target: int, seen: Offset, ticks: int, now: int) -> Steps:
    """Raises the offset from that of ``seen`` to ``target`` and so much more that ``ticks`` are free.

    Draws that saw that or less have counters up to c2, read after that; draws that see ``target`` have
    counters above c1, read before it. The ticks between are nobody else's.
    """
    old = seen.ms
    c1 = yield read("counter")
    while True:
        target = max(target, old + (ticks >> SEQUENCE_BITS) + 1)
        if (yield from log_offset(rules, target, seen, target + (c1 >> SEQUENCE_BITS) - now)):
            return Step(refuse)
        yield setval(rules.own(target))
        c2 = yield read("counter")
        free = tick_of(target, c1) - tick_of(old, c2)
        if free >= ticks or rules.flaw is Flaw.RESERVE_OVER_LATE_DRAWS:
            yield unlock()
            return Ticks(tick_of(target, c1) - ticks + 1, tick_of(target, c1))
        # Others used up what was to spare, and some of it with the new offset.
        if rules.flaw is Flaw.WIDEN_OVER_DRAWS_BETWEEN:
            target += 1
        else:
            old, c1 = target, (yield read("counter"))


def fence(rules: Rules) -> Steps:
    yield from stop(rules)
    return Step(fence_for_good)


def fence_for_good(rules: Rules) -> Steps:
    yield take("row_lock")
    row = yield read("row", at_once=True)
    high_water = max((yield from stop(rules)), row.high_water)
    yield commit(
        Row(active=False, high_water=high_water, incarnation=rules.incarnation, timeline=rules.timeline)
    )
    return HighWater(high_water)


def stop(rules: Rules) -> Generator[Action, Any, int]:
    yield take("lock")
    seen = yield read("offset", at_once=True)
    row = yield read("row")
    ms = seen.ms
    flaw = Flaw.NO_MARGIN_IN_FENCE_AFTER_RELEASE if seen.fenced else Flaw.NO_MARGIN_IN_FENCE
    if margin_ms(rules, seen, row) and rules.flaw is not flaw:
        ms = yield from safe_ms(rules, seen, row)
    yield setval(Offset(ms + (rules.flaw is not Flaw.SAME_OFFSET_AFTER_FENCE), FENCED))
    counter = yield read("counter")
    yield unlock()
    return tick_of(ms, counter)


def safe_ms(rules: Rules, seen: Offset, row: Row) -> Generator[Action, Any, int]:
    """An offset above all that another incarnation may have issued."""
    counter = yield read("counter")
    now = yield clock(rules)
    stored_ms = max(seen.ms, ((row.high_water - counter) >> SEQUENCE_BITS) + 1) + 3 * MARGIN_MS
    if rules.flaw is Flaw.NO_MARGIN_PAST_THE_CLOCK_IN_FENCE:
        return seen.ms + 2 * MARGIN_MS
    return max(stored_ms, now - (counter >> SEQUENCE_BITS) + 5 * MARGIN_MS)


def activate(rules: Rules, above_tick: int = -1) -> Steps:
    row = yield from activated(rules, above_tick)
    yield commit(row)
    return "activated"


def activated(rules: Rules, above_tick: int) -> Generator[Action, Any, Row]:
    """The row that an activation writes; its lock is held."""
    yield take("row_lock")
    row = yield read("row", at_once=True)
    seen = yield read("offset")
    high_water = max(row.high_water, above_tick)
    is_unknown = rules.incarnation not in (row.incarnation, seen.incarnation)
    if is_unknown and rules.flaw is not Flaw.INCARNATION_FORGOTTEN_IN_ACTIVATE:
        ms = yield from safe_ms(rules, seen, row)
        high_water = max(high_water, tick_of(ms, (yield read("counter"))))
    counter = yield read("counter")
    if high_water >= tick_of(seen.ms, counter) and rules.flaw is not Flaw.ACTIVATE_WITHOUT_STOP:
        yield from stop(rules)
    seen = yield read("offset")
    return Row(
        active=True,
        unfences=seen,
        high_water=high_water,
        incarnation=rules.incarnation,
        timeline=rules.timeline,
    )


def reset(rules: Rules, to_ms: int) -> Steps:
    """Takes a shard back from where a wrong clock began to ``to_ms``, above all before that."""
    high_water = yield from stop(rules)

    def results(s: Shared) -> list[tuple[str | None, Shared]]:
        if s.lock or s.row_lock:
            return []
        from_ms, reached_ms = s.noted or (0, 0)
        is_unknown = reached_ms > to_ms and rules.flaw is not Flaw.RESET_FROM_A_LATER_STEP
        if from_ms <= to_ms or is_unknown:
            return [("refused", s)]
        offset = Offset(to_ms - (s.counter >> SEQUENCE_BITS), FENCED)
        row = Row(True, offset, to_ms << SEQUENCE_BITS, rules.incarnation, rules.timeline)
        back = s._replace(
            offset=offset,
            logged_offset=offset,
            row=row,
            high_water=row.high_water,
            ceiling=None,
            passed=(from_ms << SEQUENCE_BITS, max(high_water, tick_of(s.offset.ms, s.counter))),
            was_reset=True,
        )
        return [(None, back._replace(flushed=back.stored()))]

    return (yield Action("reset", results)) or "reset"


def activate_and_draw(rules: Rules) -> Steps:
    """Draws before the COMMIT; what the draw stores would stay after a ROLLBACK."""
    row = yield from activated(rules, -1)
    return Step(advance, (0, row))


def published_draw(rules: Rules) -> Steps:
    """The function that everyone copied: the sequence and the clock, each read by itself."""
    drawn = yield nextval()
    now = yield clock(rules)
    tick = (now << SEQUENCE_BITS) | (drawn % (1 << SEQUENCE_BITS))
    return Ticks(tick, tick)


# What befalls a shard


def move_and_return(_rules: Rules) -> Steps:
    """Another node issues the tick above the high-water tick; then the shard is activated here again."""

    def results(s: Shared) -> list[tuple[int, Shared]]:
        tick = s.high_water + 1
        return [(tick, s._replace(high_water=tick, issued=s.issued | (1 << tick)))]

    tick = yield Action("a tick of another node", results)
    return Step(activate, (tick,))


def flush(_rules: Rules) -> Steps:
    """The WAL is on disk up to here, as it is after each commit."""
    yield Action("WAL", lambda s: [(None, s._replace(flushed=s.stored()))])
    return "flushed"


def copy_files(_rules: Rules) -> Steps:
    """A base backup, or a standby that hears no more from here on."""
    yield Action("files", lambda s: [(None, s._replace(copy=s.stored()))])
    return "copied"


def crash(_rules: Rules) -> Steps:
    """The server loses what was not flushed, and every operation under way."""
    yield Action("server", lambda s: [(None, began(s, s.flushed))])
    return "restarted"


def restart(_rules: Rules) -> Steps:
    """The server is shut down in good order, and starts again."""
    yield Action("server", lambda s: [(None, began(s, s.stored()))])
    return "restarted"


def replace_by_copy(_rules: Rules) -> Steps:
    """The copy is promoted in the place of the server, which is gone."""
    yield Action("server", lambda s: [(None, began(s, s.copy)._replace(timeline=s.timeline + 1))])
    return "replaced"


def began(s: Shared, stored: Stored) -> Shared:
    """Another incarnation, with what is stored."""
    counter, offset, row = stored
    kept = s._replace(
        counter=counter, logged=counter, offset=offset, logged_offset=offset, row=row, flushed=stored
    )
    # A fence that was rolled back may be lost, and a copy may not have heard of one.
    ceiling = None if row.active else s.ceiling
    return kept._replace(lock=False, row_lock=False, incarnation=s.incarnation + 1, ceiling=ceiling, past=-1)
