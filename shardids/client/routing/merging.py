"""How the rows of several shards become the answer to one SELECT: in which order, and how many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from sqlalchemy import (
    CHAR,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Date,
    DateTime,
    Enum,
    Float,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    Select,
    String,
    TableClause,
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

from shardids.client.routing.aggregates import BYTE_ORDER, Fold, folds_of
from shardids.client.routing.replay import Row
from shardids.errors import CannotCombine
from shardids.models.kinds import innermost

_SORTABLE: Final = (Integer, Numeric, Float, Boolean, LargeBinary, Uuid)
_MOMENTS: Final = (Date, DateTime, Time)
"""Types of which Python cannot have every value: 'infinity', or 24:00."""


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

    @property
    def in_byte_order(self) -> bool:
        """Whether it is text in the order of its code points."""
        type_: Any = innermost(self.expression.type)
        if not isinstance(type_, String) or isinstance(type_, Enum | CHAR):
            return False
        expression: Any = self.expression
        if getattr(expression, "operator", None) is operators.collate:
            return str(expression.right.collation) in BYTE_ORDER
        return isinstance(expression, Column) and type_.collation in BYTE_ORDER

    @property
    def clause(self) -> ColumnElement[Any]:
        """The key as SQLAlchemy writes it."""
        directed = self.expression.desc() if self.descending else self.expression.asc()
        return directed.nulls_first() if self.nulls_first else directed.nulls_last()

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
        if type(value) is str and not self.in_byte_order:
            raise CannotCombine(
                f"ORDER BY {self.expression} sorts text by a language's rules, which Python can't",
                hint='Order by collate(column, "C"), or sort in Python.',
            )
        # NaN, the only value that differs from itself, is above all numbers and equal to itself.
        return (1, value) if value == value else (2,)  # noqa: PLR0124  -- NaN

    def compared(self) -> ColumnElement[Any]:
        """Returns the SQL of a value that Python compares as PostgreSQL compares the key's.

        Raises:
            CannotCombine: there is none.
        """
        type_ = innermost(self.expression.type)
        declared: Any = self.expression.type
        while isinstance(declared, TypeDecorator) and not isinstance(declared, Interval):
            declared = declared.impl_instance
        if isinstance(declared, Interval):
            type_ = declared  # Which stands for a date on other servers.
        if isinstance(type_, _MOMENTS) and not (isinstance(type_, Time) and type_.timezone):
            return extract("epoch", self.expression)
        if isinstance(type_, _SORTABLE) or self.in_byte_order:
            # The value itself, whatever the column's type makes of it.
            return type_coerce(self.expression, NullType())
        raise CannotCombine(
            f"ORDER BY {self.expression} over several shards: Python can't sort {type_!r} as PostgreSQL does",
            hint='Order by a number, a date, a UUID, or text of collation C: collate(column, "C").',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """How to combine.

    Attributes:
        branch: the statement for each shard: all rows that can be among the first ``offset + limit``.
        keys: what to merge rows by; none if any order does.
        key_name: the names of the columns that a branch has for merging only, with their number.
        limit, offset: applied to the merged rows.
        folds: for a statement of aggregates, how to fold each column's values; otherwise empty.
        locks: whether it locks rows.
    """

    branch: Select[Any]
    keys: tuple[OrderKey, ...] = ()
    key_name: str = "shardids_key_{}"
    limit: int | None = None
    offset: int = 0
    folds: tuple[Fold, ...] = ()
    locks: bool = False

    @property
    def key_names(self) -> list[str]:
        """The names of the columns to merge by."""
        return [self.key_name.format(number) for number in range(len(self.keys))]

    def merged(self, answers: Sequence[Sequence[Row]], places: Sequence[int]) -> list[Row]:
        """Returns the rows of several nodes, each in the plan's order, as one; ``places`` has the keys."""
        if self.folds:
            columns = zip(*chain.from_iterable(answers), strict=True)
            rows: list[Row] = [
                [_folded(fold, values) for fold, values in zip(self.folds, columns, strict=True)]
            ]
        else:
            rows = list(chain.from_iterable(answers))
            if len(answers) > 1:
                # To sort what is made of sorted runs is to merge them.
                for key, place in reversed(list(zip(self.keys, places, strict=True))):
                    key.sort(rows, place)
        return rows[self.offset : None if self.limit is None else self.offset + self.limit]


def _folded(fold: Fold, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return fold(known) if known else None


def plan(statement: Any, parameters: Any) -> MergePlan:
    """Plans a SELECT that asks several shards; whether its shape is right is for :mod:`shapes` to say.

    Raises:
        CannotCombine: Python can't order, limit or fold the answers; the hint says what to do.
    """
    if not isinstance(statement, Select):
        raise CannotCombine(
            f"a {type(statement).__name__} can't be sent to several shards",
            hint='Name the shard: bind_arguments={"shard_id": number}; or write one select() a part.',
        )
    # Applications have no public way to read these parts of a SELECT; dialects read them by these names.
    if statement._fetch_clause is not None:
        raise CannotCombine("FETCH over several shards is not supported", hint="Use limit().")
    limit = _number(statement._limit_clause, parameters, "LIMIT")
    offset = _number(statement._offset_clause, parameters, "OFFSET") or 0
    folds = folds_of(statement)
    if folds:
        # One row a shard, and one in the end: there is nothing to sort, and limits are for that one.
        branch = statement.order_by(None).limit(None).offset(None)
        return MergePlan(branch=branch, folds=folds, limit=limit, offset=offset)
    keys = tuple(order_keys(statement))
    if offset and not keys:
        raise CannotCombine("OFFSET over several shards needs an order", hint="Add order_by().")
    name = "shardids_key_{}"
    while any(str(column).startswith(name[:-2]) for column in list(statement.selected_columns.keys())):
        name = f"x{name}"
    branch = statement
    if offset:
        branch = branch.limit(None if limit is None else limit + offset).offset(None)
    branch = branch.add_columns(*(key.compared().label(name.format(n)) for n, key in enumerate(keys)))
    locks = statement._for_update_arg is not None
    return MergePlan(branch=branch, keys=keys, key_name=name, limit=limit, offset=offset, locks=locks)


def order_keys(statement: Select[Any]) -> Iterator[OrderKey]:
    """Returns the keys of a statement's ORDER BY.

    Raises:
        CannotCombine: one of them is text that is not the name of a column.
    """
    for clause in statement._order_by_clauses:
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


def tables_of(statement: Any) -> list[str]:
    """Returns the names of the tables in a statement, in order of their appearance."""
    names = (e.name for e in visitors.iterate(statement) if isinstance(e, TableClause))
    return list(dict.fromkeys(names))


def _number(clause: Any, parameters: Any, what: str) -> int | None:
    if clause is None:
        return None
    value = None
    if isinstance(clause, BindParameter):
        value = (parameters or {}).get(clause.key, clause.effective_value)
    if not isinstance(value, int):
        raise CannotCombine(f"{what} over several shards must be a number, not an expression")
    return value
