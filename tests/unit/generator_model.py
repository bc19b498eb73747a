"""The generator's algorithm in atomic actions, for ``test_generator_model.py`` to run in every order.

Each operation below is a Python generator that mirrors a function of ``sql/engine.v1.sql`` and
``sql/admin.v1.sql``. Each ``yield`` is one atomic action on what the sessions share, and any other session
may act between two of them.

=====================  ===============================================================================
here                   there
=====================  ===============================================================================
draw, draw_again       ``next_id``: before its loop, and in it after ``advance``
advance                ``advance``, up to its loop
raise_to, set_aside    the loop of ``advance``, without and with ``ticks``
reserve                ``reserve``
stop, fence, activate  of the same names; an ``advance`` after ``activate`` releases the fence
=====================  ===============================================================================

The clock tells any of a few times at each reading: it jumps, forth and back. A commit may be a rollback.
Small here and large there are the ticks of a ms (2, 1,024), the margin after a crash (6 ms, 10 s), and the
window of ``is_current`` (from 2 ms ahead of the clock to 1 ms behind it; a minute and 2 ms). Left out are
``max_ahead``, the end of time, copies and promotions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import StrEnum, auto
from typing import Any, NamedTuple, TypeAlias

SEQUENCE_BITS = 1
MARGIN_MS = 6
AHEAD_MS, BEHIND_MS = 2, 1
FENCED = -1


class Flaw(StrEnum):
    """What can be got wrong in a line or two of the operations."""

    NO_SECOND_READ_OF_OFFSET = auto()
    SETVAL_WITHOUT_LOCK = auto()
    RESERVE_OVER_LATE_DRAWS = auto()
    WIDEN_OVER_DRAWS_BETWEEN = auto()
    SAME_OFFSET_AFTER_FENCE = auto()
    RELEASE_OF_ANY_FENCE = auto()
    ACTIVATE_WITHOUT_STOP = auto()
    NO_MARGIN_AFTER_CRASH = auto()
    NO_MARGIN_IN_RELEASE = auto()
    NO_MARGIN_IN_FENCE = auto()
    NO_MARGIN_IN_FENCE_AFTER_RELEASE = auto()
    LIFE_FORGOTTEN_IN_ACTIVATE = auto()
    AHEAD_IN_ANY_LIFE = auto()


class Offset(NamedTuple):
    """A value of id_offset, which SQL packs into one bigint.

    ``life`` is the server's life, from one start to the next, that raised it; negative if fenced.
    """

    ms: int
    life: int = 0

    @property
    def fenced(self) -> bool:
        return self.life < 0

    def __str__(self) -> str:
        return f"{self.ms} ms" + (" fenced" if self.fenced else f" of life {self.life}" * (self.life > 0))


class Row(NamedTuple):
    """The shard's row in table ``shardids.shard``."""

    active: bool = True
    unfences: Offset | None = None
    high_water: int = -1
    life: int = 0

    def __str__(self) -> str:
        state = "active" if self.active else "fenced"
        return f"({state}, unfences {self.unfences}, high water {self.high_water}, life {self.life})"


class Shared(NamedTuple):
    """What all sessions share; below the line, what the properties look back on."""

    counter: int = 0
    offset: Offset = Offset(0)
    row: Row = Row()
    lock: bool = False
    row_lock: bool = False
    life: int = 0
    clock_ms: int = 0
    flushed: tuple[int, Offset, Row] = (0, Offset(0), Row())
    # ----
    issued: int = 0  # bit t is set if tick t was issued
    high_water: int = -1  # the highest that a fence returned or the row had
    ceiling: int | None = None  # the high-water tick of the fence in force


class Rules(NamedTuple):
    """What an operation runs under. An honest clock never goes back."""

    flaw: Flaw | None = None
    clock_values: int = 2
    clock_is_honest: bool = False
    life: int = 0


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


class Step(NamedTuple):
    """An operation, or where one goes on, remembering nothing but these arguments."""

    run: Callable[..., Steps]
    arguments: tuple[Any, ...] = ()


Ending: TypeAlias = Ticks | HighWater | str
Steps: TypeAlias = Generator[Action, Any, Ending | Step]


# Actions


def read(what: str, *, at_once: bool = False) -> Action:
    return Action(what, lambda s: [(getattr(s, what), s)], at_once)


def change(label: str, *, at_once: bool = False, **to: object) -> Action:
    return Action(label, lambda s: [(None, s._replace(**to))], at_once)


def take(lock: str) -> Action:
    taken = change(f"take {lock}", **{lock: True})
    return taken._replace(results=lambda s: [] if getattr(s, lock) else taken.results(s))


def unlock() -> Action:
    return change("unlock", lock=False, at_once=True)


def setval(offset: Offset) -> Action:
    return change(f"setval(offset, {offset})", offset=offset)


def nextval() -> Action:
    return Action("nextval(counter)", lambda s: [(s.counter + 1, s._replace(counter=s.counter + 1))])


def clock(rules: Rules) -> Action:
    times = range(rules.clock_values)
    if rules.clock_is_honest:
        return Action("clock", lambda s: [(now, s._replace(clock_ms=now)) for now in times[s.clock_ms :]])
    return Action("clock", lambda s: [(now, s) for now in times], at_once=True)


def is_current(rules: Rules, seen: Offset, drawn: int) -> Action:
    ms = seen.ms + (drawn >> SEQUENCE_BITS)
    answers = {-AHEAD_MS <= now - ms < BEHIND_MS for now in range(rules.clock_values)}
    if seen.life != rules.life:
        answers = {False}
    return Action("is current", lambda s: [(answer, s) for answer in sorted(answers)], at_once=True)


def is_ahead(rules: Rules, seen: Offset) -> Action:
    """Any answer, as if nothing were known of the clock, of ``max_ahead`` and of the shard's row."""
    may_be = seen.life == rules.life or (rules.flaw is Flaw.AHEAD_IN_ANY_LIFE and not seen.fenced)
    answers = [False, True] if may_be else [False]
    return Action("is ahead", lambda s: [(answer, s) for answer in answers], at_once=True)


def commit(row: Row) -> Action:
    def results(s: Shared) -> list[tuple[str, Shared]]:
        rolled_back = s._replace(row_lock=False)
        high_water = max(s.high_water, row.high_water)
        committed = rolled_back._replace(row=row, flushed=(s.counter, s.offset, row), high_water=high_water)
        return [("commit", committed), ("rollback", rolled_back)]

    return Action(f"row := {row}", results)


# Operations


def tick_of(offset_ms: int, counter: int) -> int:
    return (offset_ms << SEQUENCE_BITS) + counter


def draw(rules: Rules) -> Steps:
    seen = yield read("offset")
    drawn = yield nextval()
    if (yield is_current(rules, seen, drawn)) and (yield from is_unchanged(rules, seen)):
        return Ticks(tick_of(seen.ms, drawn), tick_of(seen.ms, drawn))
    if (yield is_ahead(rules, seen)) and (yield from is_unchanged(rules, seen)):
        return Ticks(tick_of(seen.ms, drawn), tick_of(seen.ms, drawn))
    return Step(advance)


def draw_again(rules: Rules, seen: Offset) -> Steps:
    drawn = yield nextval()
    if (yield from is_unchanged(rules, seen)):
        return Ticks(tick_of(seen.ms, drawn), tick_of(seen.ms, drawn))
    return Step(advance)


def is_unchanged(rules: Rules, seen: Offset) -> Generator[Action, Any, bool]:
    return rules.flaw is Flaw.NO_SECOND_READ_OF_OFFSET or (yield read("offset")) == seen


def reserve(rules: Rules, ticks: int) -> Steps:
    yield nextval()
    return Step(advance, (ticks,))


def advance(rules: Rules, ticks: int = 0) -> Steps:
    """The only place that raises the offset: to the clock, above a fence, past a crash, and by ``ticks``."""
    row = yield read("row")
    if rules.flaw is not Flaw.SETVAL_WITHOUT_LOCK:
        yield take("lock")
    seen = yield read("offset", at_once=rules.flaw is not Flaw.SETVAL_WITHOUT_LOCK)
    released = row.unfences == seen or rules.flaw is Flaw.RELEASE_OF_ANY_FENCE
    if seen.life != rules.life and not (row.active and (released or not seen.fenced)):
        return Step(refuse)
    counter = yield read("counter")
    now = yield clock(rules)
    target = max(
        seen.ms + (seen.fenced and rules.flaw is not Flaw.SAME_OFFSET_AFTER_FENCE),
        seen.ms + margin_ms(rules, seen, row),
        now - (counter >> SEQUENCE_BITS),
        ((row.high_water - counter) >> SEQUENCE_BITS) + 1,
    )
    old = seen.ms if seen.life == rules.life else target
    return Step(set_aside, (target, old, ticks)) if ticks else Step(raise_to, (target, seen))


def margin_ms(rules: Rules, seen: Offset, row: Row) -> int:
    """How much of what was issued a crash may have made the server forget.

    After an activation that may be the release of the fence as well: the offset is the fenced one again.
    """
    if seen.fenced:
        forgotten = row.active and row.unfences == seen and row.life != rules.life
        return MARGIN_MS if forgotten and rules.flaw is not Flaw.NO_MARGIN_IN_RELEASE else 0
    return MARGIN_MS if seen.life != rules.life and rules.flaw is not Flaw.NO_MARGIN_AFTER_CRASH else 0


def refuse(_rules: Rules) -> Steps:
    yield unlock()
    return "refused"


def raise_to(rules: Rules, target: int, seen: Offset) -> Steps:
    raised = Offset(target, rules.life)
    if raised != seen:
        yield setval(raised)
    yield unlock()
    return Step(draw_again, (raised,))


def set_aside(rules: Rules, target: int, old: int, ticks: int) -> Steps:
    """Raises the offset from ``old`` to ``target`` and so much more that ``ticks`` are free.

    Draws that saw ``old`` or less have counters up to c2, read after that; draws that see ``target`` have
    counters above c1, read before it. The ticks between are nobody else's.
    """
    c1 = yield read("counter")
    while True:
        target = max(target, old + (ticks >> SEQUENCE_BITS) + 1)
        yield setval(Offset(target, rules.life))
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
    yield commit(row._replace(active=False, unfences=None, high_water=high_water))
    return HighWater(high_water)


def stop(rules: Rules) -> Generator[Action, Any, int]:
    yield take("lock")
    seen = yield read("offset", at_once=True)
    row = yield read("row")
    flaw = Flaw.NO_MARGIN_IN_FENCE_AFTER_RELEASE if seen.fenced else Flaw.NO_MARGIN_IN_FENCE
    ms = seen.ms + (0 if rules.flaw is flaw else margin_ms(rules, seen, row))
    yield setval(Offset(ms + (rules.flaw is not Flaw.SAME_OFFSET_AFTER_FENCE), FENCED))
    counter = yield read("counter")
    yield unlock()
    return tick_of(ms, counter)


def activate(rules: Rules, above_tick: int = -1) -> Steps:
    yield take("row_lock")
    row = yield read("row", at_once=True)
    high_water = max(row.high_water, above_tick)
    seen = yield read("offset")
    counter = yield read("counter")
    if high_water >= tick_of(seen.ms, counter) and rules.flaw is not Flaw.ACTIVATE_WITHOUT_STOP:
        yield from stop(rules)
    seen = yield read("offset")
    again = seen == row.unfences and rules.flaw is not Flaw.LIFE_FORGOTTEN_IN_ACTIVATE
    yield commit(
        Row(active=True, unfences=seen, high_water=high_water, life=row.life if again else rules.life)
    )
    return "activated"


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
    yield Action("WAL", lambda s: [(None, s._replace(flushed=(s.counter, s.offset, s.row)))])
    return "flushed"


def crash(_rules: Rules) -> Steps:
    """The server loses what was not flushed, and every operation under way."""

    def results(s: Shared) -> list[tuple[None, Shared]]:
        counter, offset, row = s.flushed
        kept = s._replace(counter=counter, offset=offset, row=row, lock=False, row_lock=False)
        # A fence that was rolled back may be lost.
        return [(None, kept._replace(life=s.life + 1, ceiling=None if row.active else s.ceiling))]

    yield Action("server", results)
    return "restarted"
