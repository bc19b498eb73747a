"""Which SQL functions compute one value of one row, and which are aggregates: by name or ``pg_proc``."""

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

_SCALARS: Final = frozenset(
    (
        *("abs", "ceil", "ceiling", "floor", "round", "trunc", "sign", "mod", "power", "sqrt", "exp", "ln"),
        *("lower", "upper", "initcap", "char_length", "octet_length", "left", "right", "reverse"),
        *("substr", "substring", "replace", "btrim", "ltrim", "rtrim", "lpad", "rpad", "repeat", "strpos"),
        *("split_part", "md5", "sha256", "encode", "decode", "starts_with", "make_date", "cardinality"),
        *("array_length", "array_position", "jsonb_array_length", "jsonb_typeof"),
    )
)
_AGGREGATES: Final = frozenset(
    (
        *("count", "sum", "min", "max", "avg", "array_agg", "string_agg", "bool_and", "bool_or", "every"),
        *("bit_and", "bit_or", "json_agg", "jsonb_agg", "json_object_agg", "jsonb_object_agg"),
        *("stddev", "stddev_pop", "stddev_samp", "variance", "var_pop", "var_samp", "corr"),
        *("mode", "percentile_cont", "percentile_disc"),
    )
)
_WINDOWS: Final = frozenset(
    (
        *("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"),
        *("first_value", "last_value", "nth_value"),
    )
)
LISTED: Final = {
    **dict.fromkeys(SYNTAX | STABLE | _SCALARS, Kind.SCALAR),
    **dict.fromkeys(_AGGREGATES, Kind.AGGREGATE),
    **dict.fromkeys(_WINDOWS, Kind.WINDOW),
}
"""Functions that need no look at the server."""

KindOf = Callable[[str], Kind]

_asked: WeakKeyDictionary[Engine, dict[str, Kind]] = WeakKeyDictionary()


def kinds_on(connection: Connection) -> KindOf:
    """Returns the kinds of functions as the connection's server knows them; asked once a name and engine.

    A name that is not listed is a scalar function if every function of this name is immutable and returns one
    value, and an aggregate if every one is.
    """
    known = _asked.setdefault(connection.engine, {})

    def kind_of(name: str) -> Kind:
        kind = listed(name)
        if kind is Kind.UNKNOWN and name not in known:
            known[name] = _ask(connection, name)
        return known.get(name, kind)

    return kind_of


def listed(name: str) -> Kind:
    """Returns the kind of a listed function."""
    return LISTED.get(name, Kind.UNKNOWN)


def _ask(connection: Connection, name: str) -> Kind:
    found = connection.execute(
        text("""select prokind = 'f' and provolatile = 'i' and not proretset, prokind = 'a'
                from pg_catalog.pg_proc where proname = :name"""),
        {"name": name},
    ).all()
    if found and all(is_scalar for is_scalar, _ in found):
        return Kind.SCALAR
    if found and all(is_aggregate for _, is_aggregate in found):
        return Kind.AGGREGATE
    return Kind.UNKNOWN
