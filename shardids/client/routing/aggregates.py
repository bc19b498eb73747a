"""Aggregates that each node computes for its rows: the one list of those whose parts make the whole.

The query node combines the parts by SQL: ``postgres_fdw`` sends an aggregate to a node only if the groups are
the node's own, so the inner SELECT also groups by the node. A session combines them in Python if the result
is one row, and only numbers that Python adds and compares exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Context, Decimal, localcontext
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    CHAR,
    BigInteger,
    BindParameter,
    Column,
    Enum,
    Integer,
    Numeric,
    Select,
    Table,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import FunctionFilter, UnaryExpression
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import Exists
from sqlalchemy.types import Date, DateTime, Float, SmallInteger, String

from shardids.client.routing.models import how_it_tells
from shardids.client.routing.sent import (
    ELEMENTS,
    Clauses,
    Kind,
    KindOf,
    as_sent,
    clauses_of,
    compiles_itself,
    is_native_enum,
    own_name,
    plain,
)
from shardids.errors import CannotCombine
from shardids.models.types import innermost

NODE_COLUMN: Final = "shardids_node"
"""The column that names a row's node: the tables in schema ``shardids_nodes`` are partitioned by it."""

_BYTE_ORDER: Final = ("C", "POSIX", "ucs_basic")
"""Collations that sort text by its code points, as Python does."""

_EXACT: Final = Context(prec=1000, traps=[])
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Fold = Callable[[list[Any]], Any]
"""Makes one value of those of all shards; NULLs are left out, and of none it makes NULL."""


class Parts(NamedTuple):
    """The two steps of an aggregate: on each node, and over the nodes' results.

    Attributes:
        on_nodes: the aggregates that each node computes.
        combined: makes the SQL that combines the nodes' columns.
        fold: combines the nodes' values in Python; ``None`` if the result could differ from PostgreSQL's.
    """

    on_nodes: list[Any]
    combined: Callable[..., Any]
    fold: Fold | None


def parts_of(aggregate: Any) -> Parts | None:  # noqa: PLR0911 -- one per aggregate
    """Return the two steps of an aggregate; ``None`` if it has no known way to combine."""
    function = aggregate.func if isinstance(aggregate, FunctionFilter) else aggregate
    if not isinstance(function, FunctionElement):
        return None
    arguments = list(function.clauses)
    name, type_ = own_name(function), getattr(arguments[0], "type", None) if arguments else None
    if any(getattr(one, "operator", None) is operators.distinct_op for one in arguments):
        # Equal values that tell the shard are all in one.
        if name == "count" and len(arguments) == 1 and _tells_shard(arguments[0].element):
            return Parts([aggregate], _total, sum)
        return None
    is_small = isinstance(type_, Integer | SmallInteger) and not isinstance(type_, BigInteger)
    is_exact = isinstance(type_, Integer) or (isinstance(type_, Numeric) and not isinstance(type_, Float))
    if name == "count" and len(arguments) <= 1:
        return Parts([aggregate], _total, sum)
    if name in ("min", "max") and len(arguments) == 1:
        fold: Fold | None = {"min": min, "max": max}[name]
        if isinstance(type_, Integer | Date | DateTime):
            fold = partial({"min": min, "max": max}[name], key=_compared)
        elif not in_byte_order(arguments[0]):
            fold = None
        return Parts([aggregate], getattr(func, name), fold)
    if name == "sum" and is_exact and len(arguments) == 1:
        # The sum of integers is a bigint, and the sum of those a numeric.
        def total(part: Any) -> Any:
            return cast(func.sum(part), BigInteger) if is_small else func.sum(part)

        return Parts([aggregate], total, _added if isinstance(type_, Integer) else None)
    if name == "avg" and is_exact and len(arguments) == 1:
        both: list[Any] = [func.sum(arguments[0]), func.count(arguments[0])]
        if isinstance(aggregate, FunctionFilter):
            criterion: Any = aggregate.criterion
            both = [one.filter(criterion) for one in both]
        return Parts(both, _average, None)
    return None


def in_byte_order(expression: Any) -> bool:
    """Return whether an expression is text that PostgreSQL compares by its code points, as Python does.

    Other collations, and enums, have other orders. Whatever its collation is, CHAR is compared
    without its last spaces, and CITEXT in lower case.
    """
    type_ = innermost(expression.type)
    if not isinstance(type_, String) or isinstance(type_, Enum | CHAR | CITEXT):
        return False
    if getattr(expression, "operator", None) is operators.collate:
        return str(expression.right.collation) in _BYTE_ORDER
    return isinstance(expression, Column) and type_.collation in _BYTE_ORDER


def _compared(value: Any) -> Any:
    """Return what Python compares as PostgreSQL compares a value of a number, a date or a moment."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        # Python compares moments of one zone by the clock on the wall, which shows an hour of autumn twice.
        return value - _EPOCH
    _require(value, int | float | Decimal | date)
    return value


def _require(value: Any, kinds: Any) -> None:
    """Refuse a value of another type than the application has declared, and NaN.

    Raises:
        CannotCombine: it is one.
    """
    if not isinstance(value, kinds) or value != value:  # noqa: PLR0124  -- NaN
        raise CannotCombine(
            f"an aggregate over several shards is {value!r}, which is not of the type of its argument",
            hint="Declare the type that it has in the database.",
        )


def _added(values: list[Any]) -> Any:
    for value in values:
        _require(value, int | float | Decimal)
    # The sums of bigints are numerics, of more digits than Python's decimals keep by default.
    with localcontext(_EXACT):
        return sum(values[1:], values[0])


def _total(part: Any) -> Any:
    return func.coalesce(cast(func.sum(part), BigInteger), 0)


def _average(total: Any, number: Any) -> Any:
    """Divide as avg() itself does: numeric by numeric."""
    return cast(func.sum(total), Numeric).op("/")(cast(func.nullif(func.sum(number), 0), Numeric))


def _tells_shard(element: Any) -> bool:
    bases = list(plain(element).base_columns)
    return len(bases) == 1 and how_it_tells(bases[0]) is not None


# In Python.


def folds_of(statement: Any) -> tuple[Fold, ...]:
    """Return how the columns of a SELECT of aggregates only fold; empty if they don't."""
    if not isinstance(statement, Select) or clauses_of(statement).group_by or clauses_of(statement).distinct:
        return ()
    columns = list(statement.inner_columns)
    folds = [fold_of(one) for one in columns]
    if None in folds or _are_rows(statement, columns):
        return ()
    return tuple(fold for fold in folds if fold is not None)


def _are_rows(statement: Any, columns: Iterable[Any]) -> bool:
    """Return whether columns that fold are computed for each row: EXISTS makes no aggregate of them."""
    if any(_found(one)[0] is None for one in columns):
        return False
    return statement.whereclause is not None or bool(statement.get_final_froms())


def fold_of(column: Any) -> Fold | None:
    """Return how the values of a column of aggregates fold; ``None`` if they don't."""
    found, is_negated = _found(column)
    if found is not None:
        return all if is_negated else any
    parts = parts_of(_without_zero(column))
    return None if parts is None or column.type.column_expression(column) is not None else parts.fold


def folded(column: Any) -> Iterator[Any]:
    """Yield what each shard computes an aggregate's column from: expressions, or the SELECT of EXISTS."""
    found, _ = _found(column)
    if found is not None:
        yield found
        return
    element = _without_zero(column)
    if isinstance(element, FunctionFilter):
        yield element.criterion
        element = element.func
    for one in element.clauses:
        if not (getattr(one, "is_literal", False) and one.name == "*"):
            yield one.element if getattr(one, "operator", None) is operators.distinct_op else one


def _found(element: Any) -> tuple[Any, bool]:
    """Return the SELECT of EXISTS, and whether it is under NOT; ``None`` if it is something else."""
    element, is_negated = plain(element), False
    while isinstance(element, UnaryExpression) and element.operator is operators.inv:
        element, is_negated = plain(element.element), not is_negated
    if not isinstance(element, Exists):
        return None, False
    inside: Any = plain(element.element)
    return getattr(inside, "element", inside), is_negated


def _without_zero(column: Any) -> Any:
    """Return the argument of ``coalesce(…, 0)`` of a column: for a sum and a count, 0 and none are alike."""
    element = plain(column)
    if not (isinstance(element, FunctionElement) and own_name(element) == "coalesce"):
        return element
    parts = list(element.clauses)
    inside = plain(parts[0])
    made = inside.func if isinstance(inside, FunctionFilter) else inside
    adds = isinstance(made, FunctionElement) and own_name(made) in ("sum", "count")
    return inside if adds and len(parts) == 2 and _is_zero(parts[1]) else element


def _is_zero(element: Any) -> bool:
    # A parameter with a name of its own, or a callable, may have another value when the statement is sent.
    is_literal = isinstance(element, BindParameter) and element.unique and element.callable is None
    return is_literal and type(element.value) is int and element.value == 0


# On the query node.


def in_two_steps(statement: Any, dialect: Dialect, kind_of: KindOf) -> Select[Any] | None:
    """Return a SELECT with the same answer, of the same columns in their order; ``None`` if none is known.

    It is for tables that have the column ``shardids_node``.
    """
    sent = as_sent(statement, dialect)
    _, core, sources = sent.part(statement)
    if core is None or len(sent.parts) != 1 or len(sources) != 1 or sent.ctes or sent.unread:
        return None
    clauses = clauses_of(core)
    if clauses.distinct or clauses.locks or clauses.fetch is not None:
        return None
    table: Any = sources[0]
    while table.__visit_name__ == "alias":
        table = table.element
    if not isinstance(table, Table) or table.schema is not None:
        return None
    where = [] if core.whereclause is None else [core.whereclause]
    expressions = (*core.inner_columns, *clauses.having, *clauses.order_by, *clauses.group_by, *where)
    if not all(_is_known(part, kind_of) for one in expressions for part in visitors.iterate(one)):
        return None
    return _Steps(core, clauses, sources[0], kind_of).made()


def _is_known(element: Any, kind_of: KindOf) -> bool:
    if compiles_itself(element) or is_native_enum(getattr(element, "type", None)):
        # The latter's name would be looked up beside the tables.
        return False
    if isinstance(element, FunctionElement):
        # What these two are in GROUP BY, whatever functions have their names.
        is_grouping = own_name(element) in ("cube", "rollup")
        return not is_grouping and kind_of(element) in (Kind.SCALAR, Kind.AGGREGATE)
    if element.__visit_name__ == "column":
        return getattr(element, "table", None) is not None or element.name == "*"
    return element.__visit_name__ in ELEMENTS or element.__visit_name__ == "funcfilter"


class _Steps:
    """One statement in the making: each part that the nodes compute gets a name, and is found again by it."""

    def __init__(self, core: Any, clauses: Clauses, source: Any, kind_of: KindOf) -> None:
        self._core = core
        self._clauses = clauses
        self._source = source
        self._kind_of = kind_of
        self._partials: list[tuple[Any, Parts]] = []

    def made(self) -> Select[Any] | None:
        given = (list(self._core.inner_columns), self._clauses.having, self._clauses.order_by)
        for aggregate in (found for some in given for one in some for found in self._aggregates(one)):
            parts = parts_of(aggregate)
            if parts is None:
                return None
            self._partials.append((aggregate, parts))
        if not (self._clauses.group_by or self._partials):
            return None
        inner = self._inner()
        columns, having, order_by = ([self._combined(one, inner) for one in some] for some in given)
        # They read nothing but what the nodes have computed.
        read = (part for one in (*columns, *having, *order_by) for part in visitors.iterate(one))
        if any(
            part.__visit_name__ == "column" and getattr(part, "table", None) is not inner for part in read
        ):
            return None
        outer = select(*columns).select_from(inner).having(*having).order_by(*order_by)
        outer = outer.group_by(*(inner.c[f"k{n}"] for n in range(len(self._clauses.group_by))))
        return outer.limit(self._clauses.limit).offset(self._clauses.offset)

    def _inner(self) -> Any:
        node: Any = column(NODE_COLUMN)
        keys = [key.label(f"k{n}") for n, key in enumerate(self._clauses.group_by)]
        parts = [
            part.label(f"a{n}_{place}")
            for n, (_, parts) in enumerate(self._partials)
            for place, part in enumerate(parts.on_nodes)
        ]
        inner = select(node, *keys, *parts).select_from(self._source)
        if self._core.whereclause is not None:
            inner = inner.where(self._core.whereclause)
        return inner.group_by(node, *self._clauses.group_by).subquery()

    def _aggregates(self, expression: Any) -> Iterator[Any]:
        if self._is_key(expression) is None:
            if self._is_aggregate(expression):
                yield expression
            else:
                for child in expression.get_children():
                    yield from self._aggregates(child)

    def _is_aggregate(self, element: Any) -> bool:
        function = element.func if isinstance(element, FunctionFilter) else element
        return isinstance(function, FunctionElement) and self._kind_of(function) is Kind.AGGREGATE

    def _is_key(self, element: Any) -> int | None:
        keys = enumerate(self._clauses.group_by)
        return next((n for n, key in keys if element is key or element.compare(key)), None)

    def _combined(self, expression: Any, inner: Any) -> Any:
        def replace(element: Any, **_: Any) -> Any:
            key = self._is_key(element)
            if key is not None:
                return inner.c[f"k{key}"]
            for n, (aggregate, parts) in enumerate(self._partials):
                if element is aggregate or (self._is_aggregate(element) and element.compare(aggregate)):
                    columns = (inner.c[f"a{n}_{place}"] for place in range(len(parts.on_nodes)))
                    return parts.combined(*columns)
            return None

        return visitors.replacement_traverse(expression, {}, replace)
