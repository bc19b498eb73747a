"""A statement as SQLAlchemy sends it: every SELECT in it, each one's FROM, and what its functions compute."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import Dialect


class Kind(Enum):
    """What a function computes; ``UNKNOWN`` are those that may depend on more than their arguments."""

    SCALAR = "scalar"
    AGGREGATE = "aggregate"
    WINDOW = "window"
    UNKNOWN = "unknown"


SYNTAX: Final = frozenset({"coalesce", "nullif", "greatest", "least"})
"""What looks like a function and is none to PostgreSQL: it computes one value of one row."""

STABLE: Final = frozenset(
    (
        *("now", "current_timestamp", "current_date", "localtimestamp", "transaction_timestamp", "age"),
        *("concat", "concat_ws", "format", "to_char", "to_date", "to_timestamp", "to_number", "date_trunc"),
        *("date_part", "extract", "to_json", "to_jsonb", "json_build_object", "json_build_array"),
        *(
            "jsonb_build_object",
            "jsonb_build_array",
            "row_to_json",
            "array_to_json",
            "array_to_string",
            "length",
        ),
    )
)
"""Functions that depend on settings or the clock besides their arguments, and on nothing else."""

KindOf = Callable[[str], Kind]

_asked: WeakKeyDictionary[Engine, dict[str, Kind]] = WeakKeyDictionary()


def kinds_on(connection: Connection) -> KindOf:
    """Returns the kinds of functions as the connection's server knows them; asked once per name and engine.

    A name that is not listed is a scalar function if every function of this name is immutable and returns one
    value, and an aggregate or a window function if every one is.
    """
    known = _asked.setdefault(connection.engine, {})

    def kind_of(name: str) -> Kind:
        if name in SYNTAX or name in STABLE:
            return Kind.SCALAR
        if name not in known:
            known[name] = _ask(connection, name)
        return known[name]

    return kind_of


def _ask(connection: Connection, name: str) -> Kind:
    found = connection.execute(
        text("""select distinct case when prokind = 'f' and provolatile = 'i' and not proretset then 'scalar'
                                     when prokind = 'a' then 'aggregate'
                                     when prokind = 'w' then 'window' else 'unknown' end
                from pg_catalog.pg_proc where proname = :name"""),
        {"name": name},
    ).scalars()
    kinds = set(found)
    return Kind(kinds.pop()) if len(kinds) == 1 else Kind.UNKNOWN


class Sent(NamedTuple):
    """A statement as it is sent.

    Attributes:
        statement: with all that loader options, inheritance and extra criteria added to it.
        parts: each SELECT in it, and itself if it is one, by its ``id``: as it was, as it is sent, and the
            items of its FROM.
    """

    statement: Any
    parts: dict[int, tuple[Any, Any, list[Any]]]


def as_sent(statement: Any, dialect: Dialect) -> Sent:
    """Compiles a statement and keeps what the compiler saw."""
    base: Any = dialect.statement_compiler
    compiler = _recorder(base)(dialect, statement)
    state = compiler.compile_state
    found = compiler.parts.get(id(statement))
    if found is not None:
        return Sent(found[1], compiler.parts)
    return Sent(getattr(state, "statement", statement), compiler.parts)


@cache
def _recorder(base: Any) -> Any:
    """Returns a compiler that notes each SELECT. SQLAlchemy decides there which tables are correlated."""

    class Recorder(base):  # type: ignore[misc]  # the dialect's compiler
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.parts: dict[int, tuple[Any, Any, list[Any]]] = {}
            self._under_way: list[Any] = []
            super().__init__(*arguments, **options)

        def visit_select(self, select_stmt: Any, *arguments: Any, **options: Any) -> Any:
            self._under_way.append(select_stmt)
            try:
                return super().visit_select(select_stmt, *arguments, **options)
            finally:
                self._under_way.pop()

        def _setup_select_stack(self, select: Any, *arguments: Any) -> Any:
            froms = super()._setup_select_stack(select, *arguments)
            given = self._under_way[-1]
            if id(given) in self.parts and set(self.parts[id(given)][2]) != set(froms):
                # Used twice, correlated to different tables: nothing is known of either.
                self.parts[id(given)] = (given, None, [])
            else:
                self.parts[id(given)] = (given, select, froms)
            return froms

    return Recorder
