"""Aggregates whose values from several shards make that of all: how they fold, and which they are."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from typing import Any, Final

from sqlalchemy import BindParameter, Select, TypeDecorator
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import FunctionFilter, UnaryExpression
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import Exists

from shardids.client.routing.expressions import arguments
from shardids.client.routing.models import how_it_tells
from shardids.client.routing.order import check_sortable
from shardids.client.routing.sources import plain
from shardids.errors import CannotCombine

Fold = Callable[[list[Any]], Any]
"""Makes one value of those of all shards; NULLs are left out, and of none it makes NULL."""

_EXACT: Final = Context(prec=200_000, traps=[])
"""Wide enough for every ``numeric``; infinity minus infinity is NaN, as in PostgreSQL."""


def fold_of(column: Any) -> Fold | None:
    """Returns how the shards' values of a column become that of all of them; ``None`` if they don't.

    Raises:
        CannotCombine: they could, but for the type.
    """
    select, negated = without_not(plain(column))
    if select is not None:
        return all if negated else any
    element = without_zero(column)
    if isinstance(element, FunctionFilter):
        element = element.func
    if not isinstance(element, FunctionElement):
        return None
    name = str(getattr(element, "name", "")).lower()
    distinct = any(getattr(one, "operator", None) is operators.distinct_op for one in element.clauses)
    if name == "count" and (not distinct or _tells_shard(element)):
        return _total
    if name == "sum" and (not distinct or _tells_shard(element)):
        _check_number(element)
        return _total
    if name in ("min", "max") and element is plain(column):
        for one in arguments(element):
            check_sortable(one)
        return min if name == "min" else max
    return None


def without_zero(column: Any) -> Any:
    """Returns what is in ``coalesce(…, 0)`` of a column: for a sum and a count, 0 and none are alike."""
    element = plain(column)
    if not (isinstance(element, FunctionElement) and str(getattr(element, "name", "")).lower() == "coalesce"):
        return element
    parts = list(element.clauses)
    inside = plain(parts[0])
    function = inside.func if isinstance(inside, FunctionFilter) else inside
    adds = str(getattr(function, "name", "")).lower() in ("sum", "count")
    is_zero = len(parts) == 2 and isinstance(parts[1], BindParameter) and parts[1].effective_value == 0
    return inside if adds and is_zero else element


def without_not(element: Any) -> tuple[Select[Any] | None, bool]:
    """Returns the SELECT of EXISTS, and whether it is under NOT; ``None`` if it is something else."""
    negated = False
    element = plain(element)
    while isinstance(element, UnaryExpression) and element.operator is operators.inv:
        element, negated = plain(element.element), not negated
    if not isinstance(element, Exists):
        return None, False
    inside: Any = plain(element.element)
    return getattr(inside, "element", inside), negated


def _tells_shard(function: Any) -> bool:
    bases = [base for one in arguments(function) for base in plain(one).base_columns]
    return len(bases) == 1 and how_it_tells(bases[0]) is not None


def _check_number(function: Any) -> None:
    type_ = function.type
    while isinstance(type_, TypeDecorator):
        type_ = type_.impl_instance
    try:
        is_number = issubclass(type_.python_type, int | float | Decimal)
    except NotImplementedError:
        is_number = False
    if not is_number:
        raise CannotCombine(
            f"{function} over several shards: Python can't add up {type_!r} as PostgreSQL does",
            hint="Give the expression a number's type: type_coerce(…, Integer) or cast(…, Numeric).",
        )


def _total(values: list[Any]) -> Any:
    with localcontext(_EXACT):
        return sum(values[1:], values[0])
