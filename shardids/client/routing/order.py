"""ORDER BY over several servers: its keys, and sorting in Python what PostgreSQL sorts elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Enum, Interval, Select, String, TextClause, TypeDecorator
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import Label
from sqlalchemy.types import TypeEngine, Uuid

from shardids.errors import CannotCombine

_BYTE_ORDER = {"C", "POSIX", "ucs_basic"}
"""Collations by which text is in the order of its code points, as Python has it."""

_SORTABLE = (int, float, Decimal, datetime, date, time, UUID, bool, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKey:
    """One key of ORDER BY.

    Attributes:
        expression: what is sorted by.
        descending: whether from the highest down.
        nulls_first: whether NULL comes before all values.
    """

    expression: ColumnElement[Any]
    descending: bool
    nulls_first: bool

    def sql(self, name: str) -> str:
        """Returns the key in ORDER BY of a column of this name."""
        return (
            f"{name} {'DESC' if self.descending else 'ASC'} NULLS {'FIRST' if self.nulls_first else 'LAST'}"
        )

    def sort(self, rows: list[Any], place: int) -> None:
        """Sorts rows as PostgreSQL does by the value at this place, and leaves equal ones in their order."""
        rows.sort(key=lambda row: self.rank(row[place]), reverse=self.descending)

    def rank(self, value: Any) -> tuple[Any, ...]:
        """Returns what a value is compared by: the lower first, or the higher if the order is descending."""
        if value is None:
            return (0,) if self.nulls_first is not self.descending else (3,)
        # NaN, the only value that differs from itself, is above all numbers and equal to itself.
        return (1, value) if value == value else (2,)  # noqa: PLR0124  -- NaN


def order_keys(statement: Select[Any]) -> Iterator[OrderKey]:
    """Returns the keys of a statement's ORDER BY.

    Raises:
        CannotCombine: one of them is text that is no name of a column.
    """
    # Applications have no public way to read this part of a SELECT; dialects read it by this name.
    for clause in statement._order_by_clauses:
        descending, nulls_first = False, None
        element: Any = clause
        while True:
            operator = getattr(element, "modifier", None)
            if operator in (operators.desc_op, operators.asc_op):
                descending = operator is operators.desc_op
            elif operator in (operators.nulls_first_op, operators.nulls_last_op):
                nulls_first = operator is operators.nulls_first_op
            elif element.__visit_name__ not in ("label_reference", "grouping"):
                break
            element = element.element
        if isinstance(element, Label):
            element = element.element
        if isinstance(element, TextClause) or element.__visit_name__ == "textual_label_reference":
            written = str(getattr(element, "element", element))
            named = statement.selected_columns.get(written)
            if named is None:
                raise CannotCombine(
                    f"ORDER BY {written!r} over several shards",
                    hint="Order by a column or an expression, not by text.",
                )
            element = named.element if isinstance(named, Label) else named
        yield OrderKey(
            expression=element,
            descending=descending,
            nulls_first=descending if nulls_first is None else nulls_first,
        )


def check_sortable(expression: ColumnElement[Any]) -> None:
    """Refuses what Python would sort in another order than PostgreSQL."""
    type_: TypeEngine[Any] = expression.type
    while isinstance(type_, TypeDecorator) and not isinstance(type_, Interval):
        type_ = type_.impl_instance
    if isinstance(type_, String) and not isinstance(type_, Enum):
        if _collation(expression, type_) not in _BYTE_ORDER:
            raise CannotCombine(
                f"ORDER BY {expression} sorts text by a language's rules, which Python can't over two nodes",
                hint='Order by collate(column, "C"), or by something other than text, or sort in Python.',
            )
        return
    if not _sorts_alike(type_):
        raise CannotCombine(
            f"ORDER BY {expression} over two nodes: Python can't sort {type_!r} as PostgreSQL does",
            hint="Order by a number, a date, a UUID, or text with collation C.",
        )


def _sorts_alike(type_: TypeEngine[Any]) -> bool:
    if isinstance(type_, Enum):
        return False
    try:
        python_type = type_.python_type
    except NotImplementedError:
        return False
    if python_type is time and getattr(type_, "timezone", False):
        return False
    return isinstance(type_, Uuid) or issubclass(python_type, _SORTABLE)


def _collation(expression: Any, type_: Any) -> str | None:
    if getattr(expression, "operator", None) is operators.collate:
        return str(expression.right.collation)
    collation: str | None = type_.collation
    return collation
