"""Offsets for several PostgreSQL masters: planned, carried out without stopping writes, and verified.

A plan has two phases. First it *fences* each sequence: the sequence cannot pass a bound above every value
drawn on any master. Then it *switches* each: the sequence counts by the number of masters from its own
first value above the bound. Values drawn before a switch are at most the bound, values drawn after it are
above. So masters in either state can run side by side, and once all fences stand the switches may come in
any order and at any pace. The same steps introduce offsets where there were none, and make room for
further masters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, LiteralString, NoReturn, TypeAlias

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from shardids.errors import BadArgument, ClusterConflict, ShardidsError, StatementFailed
from shardids.pg.connections import statement_failed, translate
from shardids.pg.sqlfiles import read_sql
from shardids.pg.urls import parse_url


class PostgreSqlSession:
    """Opens an autocommit connection that raises shardids' errors where one fits.

    ``what`` names the server in their messages.
    """

    def __init__(self, url: str, *, what: str = "the PostgreSQL server") -> None:
        self._url, self._what = parse_url(url), what
        try:
            self.connection: psycopg.Connection[Any] = psycopg.connect(
                self._url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
            )
        except psycopg.Error as error:
            self.fail(error)

    def rows(
        self, query: sql.SQL | sql.Composed | LiteralString, parameters: tuple[object, ...] = ()
    ) -> list[Any]:
        """Run a query and return its rows."""
        try:
            return self.connection.execute(query, parameters or None).fetchall()
        except psycopg.Error as error:
            self.fail(error)

    def run(self, script: str) -> None:
        """Run the text of an SQL file in one transaction."""
        try:
            self.connection.execute(script.encode())
        except psycopg.Error as error:
            self.fail(error)

    def fail(self, error: psycopg.Error) -> NoReturn:
        """Raise shardids' error for the driver's."""
        ours = translate(error, what=self._what, url=self._url)
        raise ours or statement_failed(error, self._what, self._url) from error

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A PostgreSQL database that takes writes; ``url`` may hold a password, which is shown nowhere.

    ``leaves`` says that it takes none once the others have their new offsets.

    Raises:
        BadArgument: ``name`` is not a letter followed by letters, digits, _ and -, 40 at most.
    """

    name: str
    url: str
    leaves: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadArgument(f"{self.name!r} is not a name for a master", hint="For example: a, b, east-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """A sequence on one master; ``next_value`` is the result of the next draw of a new session."""

    schema: str
    name: str
    increment: int
    maximum: int
    cycles: bool
    next_value: int
    last_value: int | None

    @property
    def identifier(self) -> sql.Identifier:
        """Returns its name, quoted for a statement."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A column that a sequence numbers, or an integer primary key that none does.

    Attributes:
        schema: the table's schema.
        table: the table.
        column: the column.
        sequence: its sequence, if it has one.
        type_limit: the greatest value that the column and its sequence can hold.
        highest: the greatest value in the table, ``None`` without a value.
        highest_own: the greatest of the values that the master's offset gives, likewise.
    """

    schema: str
    table: str
    column: str
    sequence: SequenceState | None
    type_limit: int
    highest: int | None
    highest_own: int | None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the counter's name, which is the same on every master."""
        return self.schema, self.table, self.column

    @property
    def title(self) -> str:
        """Returns the column in words."""
        return ".".join(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """The counters of one master; ``offset``, from 1, is its place among those that stay, 0 if it leaves."""

    name: str
    offset: int
    counters: tuple[Counter, ...]

    def get(self, key: tuple[str, str, str]) -> Counter | None:
        """Return the counter of that name, if the master has it."""
        return next((counter for counter in self.counters if counter.key == key), None)


def read_masters(masters: Sequence[Master], schemas: Sequence[str] = ()) -> list[MasterState]:
    """Read all masters, one after the other; the order of those that stay gives their offsets.

    Raises:
        BadArgument: none that stays, or two of one name.
        ConnectionFailed, MissingPrivilege: a master can't be reached, or its role may not read the tables.
    """
    check_masters(masters)
    states = []
    staying = [master.name for master in masters if not master.leaves]
    offsets = {name: offset for offset, name in enumerate(staying, 1)}
    for master in masters:
        offset = offsets.get(master.name, 0)
        session = PostgreSqlSession(master.url, what=f'master "{master.name}"')
        try:
            counters = _read(session, offset, len(staying), schemas)
        except psycopg.Error as error:
            session.fail(error)
        finally:
            session.close()
        states.append(MasterState(name=master.name, offset=offset, counters=tuple(counters)))
    return states


def check_masters(masters: Sequence[Master]) -> None:
    """Refuse a list without a master that stays, or with two of one name.

    Raises:
        BadArgument: it is such a list.
    """
    names = [master.name for master in masters]
    if all(master.leaves for master in masters):
        raise BadArgument("no master is named that stays", hint="Name one or more: --master NAME=URL")
    for name in names:
        if names.count(name) > 1:
            raise BadArgument(f'two masters are named "{name}"')


def _read(session: PostgreSqlSession, offset: int, masters: int, schemas: Sequence[str]) -> list[Counter]:
    with session.connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute("select set_config('shardids.schemas', %s, false)", (",".join(schemas),))
        cursor.execute(read_sql("multimaster/multimaster.v1").encode())
        found = cursor.fetchall()
    return [_counter(session, row, offset, masters) for row in found]


def _counter(session: PostgreSqlSession, row: dict[str, Any], offset: int, masters: int) -> Counter:
    table, column = sql.Identifier(row["schema"], row["table"]), sql.Identifier(row["column"])
    ((highest, highest_own),) = session.rows(
        sql.SQL(
            "select (select max({column})::bigint from {table}),"
            " (select {column}::bigint from {table} where mod({column}::bigint, %s) = mod(%s, %s)"
            " order by {column} desc limit 1)"
        ).format(column=column, table=table),
        (masters, offset, masters),
    )
    # Read after the table: its rows have drawn their values by then, so a sequence in use is never behind.
    sequence = _sequence(session, row) if row["sequence"] is not None else None
    return Counter(
        schema=row["schema"],
        table=row["table"],
        column=row["column"],
        sequence=sequence,
        type_limit=row["type_limit"],
        highest=highest,
        highest_own=highest_own,
    )


def _sequence(session: PostgreSqlSession, row: dict[str, Any]) -> SequenceState:
    identifier = sql.Identifier(row["sequence_schema"], row["sequence"])
    ((last_value, is_called),) = session.rows(
        sql.SQL("select last_value, is_called from {}").format(identifier)
    )
    return SequenceState(
        schema=row["sequence_schema"],
        name=row["sequence"],
        increment=row["increment"],
        maximum=row["maximum"],
        cycles=row["cycles"],
        next_value=last_value + row["increment"] if is_called else last_value,
        last_value=last_value if is_called else None,
    )


HEADROOM: Final = 10_000
"""How many values a sequence may still give between the making of a plan and its switch."""

LOCKS: Final = "SHARE ROW EXCLUSIVE on the sequence, for this statement: draws wait for it"

Phase: TypeAlias = Literal["fence", "switch", "stop", "catch-up", "end-sessions", "guard", "resume"]
"""The purpose of a step. A phase is over on all masters before the next begins."""


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
    """All steps, in their required order: no switch before the last fence."""

    masters: int
    steps: tuple[OffsetStep, ...]


def make_plan(states: Sequence[MasterState], headroom: int = HEADROOM) -> OffsetPlan:
    """Return the steps that give every column its offsets; none for columns that have them.

    Masters that leave are fenced: they draw up to the bound and then fail; the others continue above it.

    Raises:
        BadArgument: ``headroom`` is below 1.
        ClusterConflict: a table or its sequence is missing on a master, or a column has no room left.
    """
    if headroom < 1:
        raise BadArgument(f"a headroom of {headroom} values leaves no room to draw until the switch")
    staying = sum(1 for state in states if state.offset)
    fences: list[OffsetStep] = []
    switches: list[OffsetStep] = []
    for key in sorted({counter.key for state in states for counter in state.counters}):
        counters = [state.get(key) for state in states]
        if all(counter is not None and counter.sequence is None for counter in counters):
            # No sequence numbers it on any master: its values come from elsewhere.
            continue
        for step in _steps(_complete(key, states), staying, headroom):
            (fences if step.phase == "fence" else switches).append(step)
    return OffsetPlan(masters=staying, steps=(*fences, *switches))


def carry_out(
    masters: Sequence[Master],
    steps: Sequence[OffsetStep],
    on_step: Callable[[OffsetStep], None] = lambda _step: None,
) -> None:
    """Take the steps in order, each in its own transaction, and call ``on_step`` after each.

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
            if not state.offset:
                continue
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
    staying = [place for place in places if place.offset]
    first = min((place.sequence.next_value for place in staying), default=0)
    if all(
        is_right(place.sequence, place.counter, place.offset, masters)
        if place.offset
        else place.sequence.maximum < first
        for place in places
    ):
        for place in staying:
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
    for place in staying:
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


OffsetProblem: TypeAlias = Literal[
    "missing-table",
    "no-sequence",
    "no-offset",
    "wrong-increment",
    "wrong-offset",
    "behind",
    "limited",
    "guard",
    "cycles",
    "server-id",
    "replication",
]
"""The possible faults; :class:`OffsetFinding` describes one in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetFinding:
    """Something that is wrong on one master, and what to do about it."""

    master: str
    column: str
    problem: OffsetProblem
    detail: str
    remedy: str


def verify(states: Sequence[MasterState]) -> list[OffsetFinding]:
    """Compare each master's counters with its offset and with the other masters' counters."""
    staying = [state for state in states if state.offset]
    keys = sorted({counter.key for state in staying for counter in state.counters})
    return [finding for state in staying for key in keys for finding in _findings(state, key, len(staying))]


def is_right(sequence: SequenceState, counter: Counter, offset: int, masters: int) -> bool:
    """Return whether a sequence gives values of its master's class only, even if it is behind its table."""
    return (
        sequence.increment == masters
        and sequence.next_value % masters == offset % masters
        and sequence.maximum >= counter.type_limit
        and not sequence.cycles
    )


def is_behind(sequence: SequenceState, counter: Counter) -> bool:
    """Return whether the table holds values that the sequence has yet to give."""
    return counter.highest_own is not None and counter.highest_own >= sequence.next_value


_APPLY = "shardids multimaster"


def _findings(state: MasterState, key: tuple[str, str, str], masters: int) -> Iterator[OffsetFinding]:
    def found(problem: OffsetProblem, detail: str, remedy: str = _APPLY) -> OffsetFinding:
        return OffsetFinding(
            master=state.name, column=".".join(key), problem=problem, detail=detail, remedy=remedy
        )

    counter = state.get(key)
    if counter is None:
        yield found("missing-table", "other masters have it", "Create the table here, as on the others.")
        return
    sequence = counter.sequence
    if sequence is None:
        yield found(
            "no-sequence",
            "an integer primary key that no sequence numbers",
            "Make it an identity column, unless its values come from elsewhere.",
        )
        return
    if sequence.increment != masters and sequence.increment == 1:
        yield found("no-offset", f"counts by 1, as if it were alone among {masters} masters")
    elif sequence.increment != masters:
        yield found("wrong-increment", f"counts by {sequence.increment}, not by {masters}")
    elif sequence.next_value % masters != state.offset % masters:
        other = sequence.next_value % masters or masters
        yield found("wrong-offset", f"continues at {sequence.next_value}: offset {other}, not {state.offset}")
    if is_behind(sequence, counter):
        yield found(
            "behind", f"continues at {sequence.next_value}, but the table holds {counter.highest_own}"
        )
    if sequence.maximum < counter.type_limit:
        yield found("limited", f"ends at {sequence.maximum}: an apply or grow was interrupted")
    if sequence.cycles:
        yield found("cycles", "cycles: it would repeat its values after its end")
