"""The order of the rows of several shards: keys of ORDER BY that Python compares as PostgreSQL does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import total_ordering
from itertools import chain
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Boolean,
    ColumnElement,
    Date,
    DateTime,
    Float,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    Select,
    TextClause,
    Time,
    TypeDecorator,
    extract,
    type_coerce,
)
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import Label
from sqlalchemy.sql.selectable import ScalarSelect
from sqlalchemy.types import NullType, Uuid

from shardids.client.routing.aggregates import in_byte_order
from shardids.client.routing.sent import clauses_of, plain
from shardids.errors import CannotCombine
from shardids.models.types import innermost

Row = Sequence[Any]
"""A row as the driver gives it."""

_SORTABLE: Final = (Integer, Numeric, Float, Boolean, LargeBinary, Uuid)
_MOMENTS: Final = (Date, DateTime, Time)
"""Types with values that Python cannot represent: 'infinity', or 24:00."""


@total_ordering
class _Descending:
    """A rank that comes before lower ones."""

    __slots__ = ("rank",)

    def __init__(self, rank: Any) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.rank == other.rank)

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.rank < self.rank)

    __hash__ = None  # type: ignore[assignment]  # it is only compared


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKey:
    """One key of ORDER BY.

    Attributes:
        expression: the expression to sort by.
        descending: whether the highest comes first.
        nulls_first: whether NULL comes before all values.
    """

    expression: ColumnElement[Any]
    descending: bool
    nulls_first: bool

    def sql(self, name: str) -> str:
        """Return the key in ORDER BY of a column of this name."""
        return (
            f"{name} {'DESC' if self.descending else 'ASC'} NULLS {'FIRST' if self.nulls_first else 'LAST'}"
        )

    def clause(self) -> ColumnElement[Any]:
        """Return the key in ORDER BY of a statement that need not select it."""
        ordered = self.expression.desc() if self.descending else self.expression.asc()
        return ordered.nulls_first() if self.nulls_first else ordered.nulls_last()

    def rank(self, value: Any) -> tuple[Any, ...]:
        """Return a value's sort key: the lower sorts first, or the higher if the order is descending."""
        if value is None:
            return (0,) if self.nulls_first is not self.descending else (3,)
        if type(value) is str and not in_byte_order(self.expression):
            raise CannotCombine(
                f"ORDER BY {self.expression} over several shards: Python can't sort text as a language does",
                hint='Order by collate(column, "C"), or sort in Python.',
            )
        # NaN, the only value that differs from itself, is above all numbers and equal to itself.
        return (1, value) if value == value else (2,)  # noqa: PLR0124  -- NaN

    def compared(self) -> ColumnElement[Any]:
        """Return the SQL of a value that Python compares as PostgreSQL compares the key's.

        Raises:
            CannotCombine: Python can't compare the key's values as PostgreSQL does.
        """
        type_ = innermost(self.expression.type)
        declared: Any = self.expression.type
        while isinstance(declared, TypeDecorator) and not isinstance(declared, Interval):
            declared = declared.impl_instance
        if isinstance(declared, Interval):
            type_ = declared  # Which stands for a date on other servers.
        if isinstance(type_, _MOMENTS) and not (isinstance(type_, Time) and type_.timezone):
            return extract("epoch", self.expression)
        if isinstance(type_, _SORTABLE) or in_byte_order(self.expression):
            # The value itself, whatever the column's type makes of it.
            return type_coerce(self.expression, NullType())
        raise CannotCombine(
            f"ORDER BY {self.expression} over several shards: Python can't sort {type_!r} as PostgreSQL does",
            hint='Order by a number, a date, a UUID, or text of collation C: collate(column, "C").'
            " Cast CITEXT and CHAR to text first: their order is another, whatever their collation is.",
        )


def order_keys(statement: Select[Any]) -> Iterator[OrderKey]:
    """Yield the keys of a statement's ORDER BY.

    Raises:
        CannotCombine: one of them is a constant, text, or a name that is not clear.
    """
    for clause in clauses_of(statement).order_by:
        descending, nulls_first = False, None
        element: Any = clause
        while True:
            operator = getattr(element, "modifier", None)
            if operator in (operators.desc_op, operators.asc_op):
                descending = operator is operators.desc_op
            elif operator in (operators.nulls_first_op, operators.nulls_last_op):
                nulls_first = operator is operators.nulls_first_op
            elif element.__visit_name__ not in ("label_reference", "grouping") or isinstance(
                element, ScalarSelect
            ):
                break
            element = element.element
        if isinstance(element, Label):
            element = element.element
        if element.__visit_name__ == "textual_label_reference":
            element = _named(statement, element.element)
        _refuse_constant(element)
        yield OrderKey(
            expression=element,
            descending=descending,
            nulls_first=descending if nulls_first is None else nulls_first,
        )


def _named(statement: Select[Any], name: str) -> Any:
    """Return the selected expression of a name."""
    named = statement.selected_columns.get(name)
    if isinstance(named, Label):
        return named.element
    if named is None or named.key != name:
        raise _not_supported(name)
    return named


def require_clear_names(statement: Select[Any]) -> None:
    """Refuse names in ORDER BY that SQLAlchemy could find in another table than that of the selected column.

    It looks for a name in labels, and then in all of FROM.

    Raises:
        CannotCombine: there is such a name.
    """
    parts: Iterator[Any] = (part for one in clauses_of(statement).order_by for part in visitors.iterate(one))
    names = {one.element for one in parts if one.__visit_name__ == "textual_label_reference"}
    names -= {one.name for one in statement.selected_columns if isinstance(one, Label)}
    if names:
        # Columns instead of objects: SQLAlchemy does not look at relationships that it loads by a join.
        bare = statement.with_only_columns(*statement.selected_columns)
        keys = [column.key for source in bare.get_final_froms() for column in source.c]
        for name in names:
            if keys.count(name) != 1:
                raise _not_supported(name)


def _refuse_constant(key: Any) -> None:
    """Refuse text and constants: PostgreSQL takes a number for the place of a column."""
    while key.__visit_name__ in ("label", "grouping", "type_coerce") and not isinstance(key, ScalarSelect):
        key = key.clause if key.__visit_name__ == "type_coerce" else key.element
    if isinstance(key, TextClause | BindParameter) or getattr(key, "is_literal", False):
        raise _not_supported(str(key))


def require_selected(statement: Select[Any], keys: Sequence[OrderKey]) -> None:
    """Refuse to order the rows of SELECT DISTINCT by a value that equal rows would differ in."""
    selected = list(map(plain, statement.selected_columns))
    for key in map(plain, (one.expression for one in keys)):
        # A mapped attribute equals its column, but not the other way round.
        if not any(key.compare(one) or one.compare(key) for one in selected):
            raise CannotCombine(
                f"SELECT DISTINCT is ordered by {key}, which is not selected",
                hint="Select it too, or leave out distinct().",
            )


def _not_supported(written: str) -> CannotCombine:
    return CannotCombine(
        f"ORDER BY {written!r} over several shards is not supported",
        hint="Order by a column or an expression, not by text, a constant, or a name of several columns.",
    )


def ranks(keys: Sequence[tuple[OrderKey, int]], row: Row) -> list[Any]:
    """Return a row's ranks by keys, each with its place in the row: the lower sorts first."""
    ranks = ((key, key.rank(row[place])) for key, place in keys)
    return [_Descending(rank) if key.descending else rank for key, rank in ranks]


def in_order(streams: Iterable[Iterable[Row]], keys: Sequence[tuple[OrderKey, int]]) -> Iterator[Row]:
    """Sort rows, and leave equal ones in their order; of sorted runs that is quicker than to merge them."""
    rows = list(chain.from_iterable(streams))
    for key, place in reversed(keys):
        rows.sort(key=lambda row: key.rank(row[place]), reverse=key.descending)
    return iter(rows)
