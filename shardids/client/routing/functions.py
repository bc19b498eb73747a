"""Which SQL functions compute one value of one row, and which are aggregates: as ``pg_proc`` says."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, text


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
