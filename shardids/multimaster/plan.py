"""Plans offsets for several masters, and carries the plan out, without stopping their writes.

A plan has two phases. First it *fences* each sequence: the sequence cannot pass a bound above every value
drawn on any master. Then it *switches* each: the sequence counts by the number of masters from its own
first value above the bound. Values drawn before a switch are at most the bound, values drawn after it are
above. So masters in either state can run side by side, and once all fences stand the switches may come in
any order and at any pace. The same steps introduce offsets where there were none, and make room for
further masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from psycopg import sql

from shardids.errors import BadArgument, ClusterConflict, ShardidsError, StatementFailed
from shardids.multimaster.counters import Counter, Master, MasterState, SequenceState
from shardids.multimaster.postgresql_session import PostgreSqlSession
from shardids.multimaster.verify import is_behind, is_right

HEADROOM: Final = 10_000
"""How many values a sequence may still give between the making of a plan and its switch."""

LOCKS: Final = "SHARE ROW EXCLUSIVE on the sequence, for this statement: draws wait for it"

Phase: TypeAlias = Literal["fence", "switch", "stop", "catch-up", "end-sessions", "resume"]
"""What a step is for. A phase is over on all masters before the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetStep:
    """One statement on one master; ``column`` is ``*`` where it concerns the whole server."""

    phase: Phase
    master: str
    column: str
    statement: str
    locks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetPlan:
    """All steps, in the order in which they must be taken: no switch before the last fence."""

    masters: int
    steps: tuple[OffsetStep, ...]


def make_plan(states: Sequence[MasterState], headroom: int = HEADROOM) -> OffsetPlan:
    """Returns the steps that give every column its offsets; none for columns that have them.

    Raises:
        BadArgument: ``headroom`` is below 1.
        ClusterConflict: a table or its sequence is missing on a master, or a column has no room left.
    """
    if headroom < 1:
        raise BadArgument(f"a headroom of {headroom} values leaves no room to draw until the switch")
    fences: list[OffsetStep] = []
    switches: list[OffsetStep] = []
    for key in sorted({counter.key for state in states for counter in state.counters}):
        counters = [state.get(key) for state in states]
        if all(counter is not None and counter.sequence is None for counter in counters):
            # No sequence numbers it on any master: its values come from elsewhere.
            continue
        for step in _steps(_complete(key, states), len(states), headroom):
            (fences if step.phase == "fence" else switches).append(step)
    return OffsetPlan(masters=len(states), steps=(*fences, *switches))


def carry_out(
    masters: Sequence[Master],
    steps: Sequence[OffsetStep],
    on_step: Callable[[OffsetStep], None] = lambda _step: None,
) -> None:
    """Takes the steps in order, each in its own transaction, and calls ``on_step`` after each.

    Connects to all masters before the first step.

    Raises:
        ConnectionFailed, MissingPrivilege, StatementFailed: a step failed. The steps before it stay,
            and are harmless: a new plan continues from there.
    """
    sessions: dict[str, PostgreSqlSession] = {}
    try:
        for master in masters:
            sessions[master.name] = PostgreSqlSession(master.url, what=f'master "{master.name}"')
        for done, step in enumerate(steps):
            try:
                sessions[step.master].run(step.statement)
            except ShardidsError as error:
                raise _stopped(step, done, len(steps), error) from error
            on_step(step)
    finally:
        for session in sessions.values():
            session.close()


def _stopped(step: OffsetStep, done: int, steps: int, error: ShardidsError) -> ShardidsError:
    hint = "No keys collide in this state. Make a new plan and apply it."
    if step.phase == "fence" and "MAXVALUE" in error.message:
        hint = "It drew past the bound after the plan was made. " + hint + " A larger --headroom helps."
    message = f'after {done} of {steps} steps, {step.column} on master "{step.master}": {error.message}'
    if isinstance(error, StatementFailed):
        return StatementFailed(message, hint=hint, sqlstate=error.sqlstate)
    return type(error)(message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One column on one master."""

    master: str
    offset: int
    counter: Counter
    sequence: SequenceState


def _complete(key: tuple[str, str, str], states: Sequence[MasterState]) -> list[_Place]:
    places = []
    for state in states:
        counter = state.get(key)
        if counter is None or counter.sequence is None:
            what = "has no such column" if counter is None else "has no sequence for it"
            raise ClusterConflict(
                f'{".".join(key)}: master "{state.name}" {what}',
                hint="Create it there as on the other masters.",
            )
        places.append(
            _Place(master=state.name, offset=state.offset, counter=counter, sequence=counter.sequence)
        )
    return places


def _steps(places: Sequence[_Place], masters: int, headroom: int) -> Iterator[OffsetStep]:
    if all(is_right(place.sequence, place.counter, place.offset, masters) for place in places):
        for place in places:
            if is_behind(place.sequence, place.counter):
                # Only its own values are ahead of it: the other masters are not affected.
                yield _switch(place, masters, place.counter.highest_own or 0)
        return
    bound = max(_highest(place) for place in places) + headroom
    limit = min(place.counter.type_limit for place in places)
    if bound + masters > limit:
        raise ClusterConflict(
            f"{places[0].counter.title} can't go past {limit}, and the bound would be {bound}",
            hint="Make the column a bigint, or try a smaller --headroom.",
        )
    for place in places:
        # A fence that stands, from an unfinished apply, is never raised: beyond it others may be switched.
        if place.sequence.maximum > bound:
            yield _fence(place, bound)
    for place in places:
        yield _switch(place, masters, bound)


def _highest(place: _Place) -> int:
    # A sequence that was set and not used may be far ahead of its table.
    return max(place.sequence.next_value, place.counter.highest or 0, 0)


def _fence(place: _Place, bound: int) -> OffsetStep:
    statement = sql.SQL("ALTER SEQUENCE {} MAXVALUE {} NO CYCLE").format(
        place.sequence.identifier, sql.Literal(bound)
    )
    return _step("fence", place, statement)


def _switch(place: _Place, masters: int, bound: int) -> OffsetStep:
    first = bound + 1 + (place.offset - bound - 1) % masters
    statement = sql.SQL(
        "ALTER SEQUENCE {} INCREMENT BY {} MINVALUE 1 NO MAXVALUE START WITH {} RESTART WITH {} NO CYCLE"
    ).format(place.sequence.identifier, *map(sql.Literal, (masters, place.offset, first)))
    return _step("switch", place, statement)


def _step(phase: Phase, place: _Place, statement: sql.Composed) -> OffsetStep:
    return OffsetStep(
        phase=phase,
        master=place.master,
        column=place.counter.title,
        statement=statement.as_string(None),
        locks=LOCKS,
    )
