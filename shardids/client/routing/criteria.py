"""Which shards a statement's criteria name: by IDs, by foreign keys to them, and by sharding keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, ColumnElement
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, False_, Grouping, UnaryExpression

from shardids.client.routing.models import ShardFinder, Tells, how_it_tells
from shardids.errors import ShardidsError

Parameters = Mapping[str, Any]
Choice = frozenset[int] | None
"""Shards outside of which no row fulfils a criterion; ``None`` if it could be any."""

_UPPER = {operators.le: 0, operators.lt: -1}
_LOWER = {operators.ge: 0, operators.gt: 1}
_MIRRORED = {
    operators.le: operators.ge,
    operators.lt: operators.gt,
    operators.ge: operators.le,
    operators.gt: operators.lt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What the criteria of a statement name.

    Attributes:
        shards: the shards that rows can come from; ``None`` if the criteria name none.
        lists: parameters of ``IN`` over IDs or keys: by the parameter's key, each shard's values.
    """

    shards: Choice
    lists: Mapping[str, Mapping[int, list[Any]]]


def shards_named(where: ColumnElement[bool] | None, parameters: Any, finder: ShardFinder) -> Named:
    """Reads a WHERE clause. What can't be read names nothing, so the answer is never too small.

    A statement runs within one shard at a time: a condition on any of its tables holds for all of them.

    Raises:
        BadArgument: an ID of no shard of this cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    reader = _Reader(parameters if isinstance(parameters, Mapping) else {}, finder)
    shards = None if where is None else reader.read(where)
    return Named(shards=shards, lists=reader.lists)


def narrowed(statement: Any, parameters: Any, named: Named, shard: int) -> tuple[Any, Any]:
    """Returns the statement and its parameters with those values of IN lists that belong to the shard."""
    if not named.lists:
        return statement, parameters
    given = parameters if isinstance(parameters, Mapping) else {}
    inside = named.lists.keys() - given.keys()

    def narrow(parameter: BindParameter[Any]) -> None:
        if parameter.key in inside:
            parameter.value = named.lists[parameter.key].get(shard, [])

    if inside:
        statement = visitors.cloned_traverse(statement, {"maintain_key": True}, {"bindparam": narrow})
    narrow_given = {name: named.lists[name].get(shard, []) for name in named.lists.keys() & given.keys()}
    return statement, {**given, **narrow_given} if narrow_given else parameters


class _Reader:
    def __init__(self, parameters: Parameters, finder: ShardFinder) -> None:
        self.lists: dict[str, dict[int, list[Any]]] = {}
        self._parameters = parameters
        self._finder = finder

    def read(self, element: object) -> Choice:
        shards: Choice = None
        match element:
            case False_():
                shards = frozenset()
            case UnaryExpression() if element.operator is operators.is_true:
                shards = self.read(element.element)
            case Grouping():
                shards = self.read(element.element)
            case BooleanClauseList() if element.operator is operators.and_:
                shards = self._all_of(element.clauses)
            case BooleanClauseList() if element.operator is operators.or_:
                shards = _united(map(self.read, element.clauses))
            case BinaryExpression():
                shards = _common([self._compared(element), *self._ranges([element])])
        return shards

    def _all_of(self, elements: Iterable[Any]) -> Choice:
        clauses = list(elements)
        return _common([*map(self.read, clauses), *self._ranges(clauses)])

    def _compared(self, element: BinaryExpression[Any]) -> Choice:
        if element.operator is operators.in_op:
            return self._listed(element)
        if element.operator is not operators.eq:
            return None
        for column, other in ((element.left, element.right), (element.right, element.left)):
            tells = _tells(column)
            value = self._value(other) if tells else None
            if tells and value is not None:
                return frozenset((self._shard(column, tells, value, other),))
        return None

    def _listed(self, element: BinaryExpression[Any]) -> Choice:
        tells, values = _tells(element.left), self._value(element.right)
        if tells is None or not isinstance(values, Collection) or isinstance(values, str | bytes):
            return None
        by_shard: dict[int, list[Any]] = defaultdict(list)
        for value in values:
            if value is not None:
                by_shard[self._shard(element.left, tells, value, element.right)].append(value)
        if isinstance(element.right, BindParameter):
            self.lists[element.right.key] = dict(by_shard)
        return frozenset(by_shard)

    def _ranges(self, clauses: list[ColumnElement[Any]]) -> Iterable[Choice]:
        """Returns the shards of each ID column whose bounds, taken together, lie within one millisecond."""
        lower: dict[ColumnElement[Any], int] = {}
        upper: dict[ColumnElement[Any], int] = {}
        for column, operator, value in self._bounds(clauses):
            if operator in _LOWER:
                bound = value + _LOWER[operator]
                lower[column] = max(bound, lower.get(column, bound))
            else:
                bound = value + _UPPER[operator]
                upper[column] = min(bound, upper.get(column, bound))
        return [self._between(lower[column], upper[column]) for column in lower.keys() & upper.keys()]

    def _bounds(
        self, clauses: Iterable[ColumnElement[Any]]
    ) -> Iterable[tuple[ColumnElement[Any], Callable[..., Any], int]]:
        for one in clauses:
            if not isinstance(one, BinaryExpression):
                continue
            sides: list[tuple[Any, Any, Any]] = []
            if one.operator is operators.between_op:
                low, high = getattr(one.right, "clauses", (None, None))
                sides = [(one.left, operators.ge, low), (one.left, operators.le, high)]
            elif one.operator in _MIRRORED:
                sides = [
                    (one.left, one.operator, one.right),
                    (one.right, _MIRRORED[one.operator], one.left),
                ]
            for column, operator, bound in sides:
                tells = _tells(column)
                if tells and tells.kind is None and type(value := self._value(bound)) is int:
                    yield column, operator, value

    def _between(self, low: int, high: int) -> Choice:
        layout = self._finder.layout
        if low > high:
            return frozenset()
        first_ms, first = divmod(low >> layout.sequence_bits, layout.shard_limit)
        last_ms, last = divmod(high >> layout.sequence_bits, layout.shard_limit)
        if first_ms != last_ms:
            return None
        return frozenset(range(first, min(last + 1, self._finder.shard_count)))

    def _value(self, element: object) -> Any:
        """Returns the value of a literal or a parameter; ``None`` if it is neither, or not known."""
        if isinstance(element, Grouping):
            return self._value(element.element)
        if not isinstance(element, BindParameter):
            return None
        return self._parameters.get(element.key, element.effective_value)

    def _shard(self, column: ColumnElement[Any], tells: Tells, value: Any, given: Any) -> int:
        try:
            # The parameter's type, not the column's, decides what is sent.
            return tells.shard(value, self._finder, getattr(given, "type", None))
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None


def _tells(element: ColumnElement[Any]) -> Tells | None:
    bases = element.base_columns
    return how_it_tells(next(iter(bases))) if len(bases) == 1 else None


def _common(choices: Iterable[Choice]) -> Choice:
    known = [choice for choice in choices if choice is not None]
    return frozenset.intersection(*known) if known else None


def _united(choices: Iterable[Choice]) -> Choice:
    found: frozenset[int] = frozenset()
    for choice in choices:
        if choice is None:
            return None
        found |= choice
    return found
