"""Aggregates in two steps: each node computes those of its own rows, and the query node combines them.

``postgres_fdw`` sends an aggregate to a node only if the groups are the node's own, so otherwise every row is
fetched. Here the inner SELECT groups by the node, too. Where it is not known how to combine, there is no such
form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Final

from sqlalchemy import BigInteger, Enum, Integer, Numeric, Select, Table, cast, column, func, select
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import FunctionFilter
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Float, SmallInteger, TypeDecorator

from shardids.client.routing.functions import Kind, KindOf
from shardids.client.routing.sent import as_sent

NODE_COLUMN: Final = "shardids_node"
"""The column of the tables in schema ``shardids_nodes`` by which they are partitioned."""

_ELEMENTS: Final = frozenset(
    (
        *("column", "bindparam", "null", "true", "false", "binary", "unary", "clauselist", "label"),
        *("grouping", "label_reference", "expression_clauselist", "cast", "typeclause", "case", "extract"),
        *("type_coerce", "funcfilter", "tuple"),
    )
)
"""What may be around an aggregate, a key or in a condition; functions are looked up."""


def in_two_steps(statement: Any, dialect: Dialect, kind_of: KindOf) -> Select[Any] | None:
    """Returns a SELECT with the same answer, of the same columns in their order; ``None`` if none is known.

    It is for tables that have the column ``shardids_node``.
    """
    sent = as_sent(statement, dialect)
    _, core, sources = sent.parts.get(id(statement), (None, None, []))
    if core is None or len(sent.parts) != 1 or len(sources) != 1 or not _is_plain(core):
        return None
    table: Any = sources[0]
    while table.__visit_name__ == "alias":
        table = table.element
    if not isinstance(table, Table) or table.schema is not None:
        return None
    expressions = [*core.inner_columns, *core._having_criteria, *core._order_by_clauses]
    keys = list(core._group_by_clauses)
    if not all(map(_Known(kind_of, table), (*expressions, *keys, *core._where_criteria))):
        return None
    return _Steps(core, sources[0], keys, kind_of).made(expressions)


def _is_plain(core: Any) -> bool:
    clauses = (
        *("_distinct", "_distinct_on", "_for_update_arg", "_fetch_clause", "_prefixes", "_suffixes"),
        *("_hints", "_statement_hints", "_independent_ctes"),
    )
    given = (getattr(core, name, None) for name in clauses)
    # What is a clause has no truth value.
    return all(one is None or one is False or (isinstance(one, Sized) and not len(one)) for one in given)


class _Known:
    """Whether an expression holds nothing but what is known."""

    def __init__(self, kind_of: KindOf, table: Table) -> None:
        self._kind_of = kind_of
        self._table = table

    def __call__(self, expression: Any) -> bool:
        return all(map(self._is_known, visitors.iterate(expression)))

    def _is_known(self, element: Any) -> bool:
        type_ = getattr(element, "type", None)
        while isinstance(type_, TypeDecorator):
            type_ = type_.impl_instance
        type_ = getattr(type_, "item_type", type_)
        if isinstance(type_, Enum) and type_.native_enum:
            # Its name would be looked up beside the tables.
            return False
        if isinstance(element, FunctionElement):
            return self._kind_of(_name(element)) in (Kind.SCALAR, Kind.AGGREGATE)
        if element.__visit_name__ == "column":
            return getattr(element, "table", None) is not None or element.name == "*"
        return element.__visit_name__ in _ELEMENTS


class _Steps:
    """One statement in the making: what is computed on the nodes gets a name, and is found again by it."""

    def __init__(self, core: Any, source: Any, keys: Sequence[Any], kind_of: KindOf) -> None:
        self._core = core
        self._source = source
        self._keys = keys
        self._kind_of = kind_of
        self._partials: list[tuple[Any, list[Any], Callable[..., Any]]] = []

    def made(self, expressions: Sequence[Any]) -> Select[Any] | None:
        for expression in expressions:
            for aggregate in self._aggregates(expression):
                partials = _partials(aggregate)
                if partials is None:
                    return None
                self._partials.append((aggregate, *partials))
        if not (self._keys or self._partials):
            return None
        inner = self._inner()
        core = self._core
        if not all(self._is_combined(self._combined(one, inner), inner) for one in expressions):
            return None
        outer = select(*(self._combined(one, inner) for one in core.inner_columns)).select_from(inner)
        outer = outer.group_by(*(inner.c[f"k{n}"] for n in range(len(self._keys))))
        outer = outer.having(*(self._combined(one, inner) for one in core._having_criteria))
        outer = outer.order_by(*(self._combined(one, inner) for one in core._order_by_clauses))
        return outer.limit(core._limit_clause).offset(core._offset_clause)

    def _is_combined(self, expression: Any, inner: Any) -> bool:
        """Returns whether it reads nothing but what the nodes have computed."""
        columns = (part for part in visitors.iterate(expression) if part.__visit_name__ == "column")
        return all(getattr(part, "table", None) is inner for part in columns)

    def _inner(self) -> Any:
        node: Any = column(NODE_COLUMN, _selectable=self._source)
        keys = [key.label(f"k{n}") for n, key in enumerate(self._keys)]
        parts = [
            part.label(f"a{n}_{place}")
            for n, (_, parts, _) in enumerate(self._partials)
            for place, part in enumerate(parts)
        ]
        inner = select(node, *keys, *parts).select_from(self._source).where(*self._core._where_criteria)
        return inner.group_by(node, *self._keys).subquery()

    def _aggregates(self, expression: Any) -> Iterator[Any]:
        if self._is_key(expression) is not None:
            return
        if self._is_aggregate(expression):
            yield expression
            return
        for child in expression.get_children():
            yield from self._aggregates(child)

    def _is_aggregate(self, element: Any) -> bool:
        function = element.func if isinstance(element, FunctionFilter) else element
        return isinstance(function, FunctionElement) and self._kind_of(_name(function)) is Kind.AGGREGATE

    def _is_key(self, element: Any) -> int | None:
        return next((n for n, key in enumerate(self._keys) if element is key or element.compare(key)), None)

    def _combined(self, expression: Any, inner: Any) -> Any:
        def replace(element: Any, **_: Any) -> Any:
            key = self._is_key(element)
            if key is not None:
                return inner.c[f"k{key}"]
            for n, (aggregate, parts, combine) in enumerate(self._partials):
                if element is aggregate or (self._is_aggregate(element) and element.compare(aggregate)):
                    return combine(*(inner.c[f"a{n}_{place}"] for place in range(len(parts))))
            return None

        return visitors.replacement_traverse(expression, {}, replace)


def _partials(aggregate: Any) -> tuple[list[Any], Callable[..., Any]] | None:
    """Returns what a node computes for an aggregate, and what combines it; ``None`` if that is not known."""
    function = aggregate.func if isinstance(aggregate, FunctionFilter) else aggregate
    arguments = list(function.clauses)
    if any(getattr(one, "operator", None) is operators.distinct_op for one in arguments):
        return None
    name, type_ = _name(function), getattr(arguments[0], "type", None) if arguments else None
    is_small = isinstance(type_, Integer | SmallInteger) and not isinstance(type_, BigInteger)
    is_exact = isinstance(type_, Integer) or (isinstance(type_, Numeric) and not isinstance(type_, Float))
    if name == "count":
        return [aggregate], lambda part: func.coalesce(cast(func.sum(part), BigInteger), 0)
    if name in ("min", "max") and len(arguments) == 1:
        return [aggregate], getattr(func, name)
    if name == "sum" and is_exact:
        # The sum of integers is a bigint, and the sum of those a numeric.
        return [aggregate], lambda part: cast(func.sum(part), BigInteger) if is_small else func.sum(part)
    if name == "avg" and is_exact:
        both: list[Any] = [func.sum(arguments[0]), func.count(arguments[0])]
        if isinstance(aggregate, FunctionFilter):
            criterion: Any = aggregate.criterion
            both = [one.filter(criterion) for one in both]
        return both, _average
    return None


def _average(total: Any, number: Any) -> Any:
    """Divides as avg() itself does: numeric by numeric."""
    return cast(func.sum(total), Numeric).op("/")(cast(func.nullif(func.sum(number), 0), Numeric))


def _name(function: Any) -> str:
    return str(getattr(function, "name", "")).lower()
