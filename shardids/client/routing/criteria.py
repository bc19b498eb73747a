"""Which shards a statement names: by IDs, by foreign keys to them, and by sharding keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import BindParameter, ColumnElement, Insert, Update
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, False_, Grouping, UnaryExpression
from sqlalchemy.util import LRUCache

from shardids.client.routing.models import (
    Claimant,
    ShardFinder,
    Tells,
    claimed_value,
    facts_of,
    how_it_tells,
    mapper_written,
)
from shardids.client.routing.shapes import Check, reads_references
from shardids.errors import BadArgument, ShardidsError, UnknownId
from shardids.models.lookups import Lookup, lookup_of

Choice = frozenset[int] | None
"""Shards outside of which no row fulfils a criterion; ``None`` if it could be any."""


class Values:
    """The values of one execution: those of the statement's literals, and those given beside it."""

    __slots__ = ("binds", "claims", "finder", "given", "lists")

    def __init__(
        self,
        binds: Sequence[BindParameter[Any]],
        parameters: Any,
        finder: ShardFinder,
        claims: Claimant | None = None,
    ) -> None:
        self.binds = binds
        self.given: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self.finder = finder
        self.claims = claims
        self.lists: dict[str, dict[int, list[Any]]] = {}

    def value(self, slot: int) -> Any:
        """Returns the value of a literal or a parameter; ``None`` if it is not known."""
        bind = self.binds[slot]
        return self.given.get(bind.key, bind.effective_value) if self.given else bind.effective_value

    def shard(self, column: ColumnElement[Any], tells: Tells, value: Any, slot: int) -> int | None:
        """Returns the shard that a value tells, ``None`` if no row has it; its error names the column."""
        try:
            # The parameter's type, not the column's, decides what is sent.
            return tells.shard(value, self.finder, self.binds[slot].type)
        except UnknownId:
            return None
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None

    def shards(
        self, column: ColumnElement[Any], tells: Tells, given: Iterable[Any], slot: int
    ) -> dict[int, list[Any]]:
        """Returns the values that rows can have, by their shards; its error names the column."""
        by_shard: dict[int, list[Any]] = defaultdict(list)
        try:
            told = tells.shards(
                [value for value in given if value is not None], self.finder, self.binds[slot].type
            )
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None
        for value, shard in told:
            by_shard[shard].append(value)
        return dict(by_shard)

    def looked_up(self, lookup: Lookup, given: Iterable[Any], slot: int) -> Choice:
        """Returns the shards whose rows can have values of a look-up key, which the nodes are asked for."""
        if self.claims is None:
            return None
        type_ = self.binds[slot].type
        try:
            wanted = [claimed_value(lookup, value, type_) for value in given if value is not None]
        except BadArgument:
            return None  # A value of another type, of which PostgreSQL makes one.
        found = self.claims.shards_of(lookup, wanted)
        return None if found is None else frozenset(found.values())


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
    reader = Reader()
    return reader.where(where).named(Values(reader.binds, parameters, finder))


Told = Callable[[Values], Choice]
"""Tells the shards that a condition names, with the values of one execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """A WHERE clause as it was read; ``None`` if it names nothing, whatever its values are."""

    read: Told | None

    def named(self, values: Values) -> Named:
        """Returns what the criteria name with these values. Raises as :func:`shards_named` does."""
        return _NAMES_NOTHING if self.read is None else Named(shards=self.read(values), lists=values.lists)


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


_NAMES_NOTHING: Final = Named(shards=None, lists={})


class Reader:
    """Reads the structure of criteria: what has to be compared, not the values to compare with.

    Attributes:
        binds: the literals and parameters; what is read names them by their number.
        reused: the keys of those that stand in several places: no shard gets only its part of their values.
    """

    def __init__(self, binds: Sequence[BindParameter[Any]] = ()) -> None:
        self.binds = list(binds)
        self.reused: Collection[str] = ()
        self._slots = {id(bind): slot for slot, bind in enumerate(self.binds)}

    def where(self, where: ColumnElement[bool] | None) -> Criteria:
        """Reads a WHERE clause."""
        return Criteria(read=None if where is None else self._read(where))

    def slot(self, element: object) -> int | None:
        """Returns the number of a literal or a parameter; ``None`` if the element is neither."""
        while isinstance(element, Grouping):
            element = element.element
        if not isinstance(element, BindParameter):
            return None
        if id(element) not in self._slots:
            self._slots[id(element)] = len(self.binds)
            self.binds.append(element)
        return self._slots[id(element)]

    def _read(self, element: object) -> Told | None:
        read: Told | None = None
        match element:
            case False_():
                read = _never
            case UnaryExpression() if element.operator is operators.is_true:
                read = self._read(element.element)
            case Grouping():
                read = self._read(element.element)
            case BooleanClauseList() if element.operator is operators.and_:
                clauses = list(element.clauses)
                read = _common([*map(self._read, clauses), *self._ranges(clauses)])
            case BooleanClauseList() if element.operator is operators.or_:
                read = _united(list(map(self._read, element.clauses)))
            case BinaryExpression():
                read = _common([self._compared(element), *self._ranges([element])])
        return read

    def _compared(self, element: BinaryExpression[Any]) -> Told | None:
        if element.operator is operators.in_op:
            return self._listed(element)
        if element.operator is not operators.eq:
            return None
        sides = ((element.left, element.right), (element.right, element.left))
        return _common([self._equal(column, other) for column, other in sides])

    def _equal(self, column: ColumnElement[Any], other: object) -> Told | None:
        tells, slot = _tells(column), self.slot(other)
        if slot is None:
            return None
        if tells is None:
            return _looked_up(column, slot, lambda value: [value])

        def read(values: Values) -> Choice:
            value = values.value(slot)
            if value is None:
                return None
            shard = values.shard(column, tells, value, slot)
            return frozenset() if shard is None else frozenset((shard,))

        return read

    def _listed(self, element: BinaryExpression[Any]) -> Told | None:
        column, tells, slot = element.left, _tells(element.left), self.slot(element.right)
        if slot is None:
            return None
        if tells is None:
            return _looked_up(column, slot, _listed_values)
        is_split = isinstance(element.right, BindParameter) and element.right.key not in self.reused

        def read(values: Values) -> Choice:
            given = values.value(slot)
            if not isinstance(given, Collection) or isinstance(given, str | bytes):
                return None
            by_shard = values.shards(column, tells, given, slot)
            if is_split:
                values.lists[values.binds[slot].key] = by_shard
            return frozenset(by_shard)

        return read

    def _ranges(self, clauses: list[Any]) -> list[Told]:
        """Reads the bounds of each ID column: taken together, they may lie within one millisecond."""
        bounds: dict[ColumnElement[Any], list[tuple[Any, int]]] = defaultdict(list)
        for column, operator, slot in self._bounds(clauses):
            bounds[column].append((operator, slot))
        return [
            partial(_within, tuple(of_column))
            for of_column in bounds.values()
            if any(operator in _LOWER for operator, _ in of_column)
            and any(operator in _UPPER for operator, _ in of_column)
        ]

    def _bounds(self, clauses: Iterable[Any]) -> Iterable[tuple[ColumnElement[Any], Callable[..., Any], int]]:
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
                slot = self.slot(bound)
                if tells and tells.kind is None and slot is not None:
                    yield column, operator, slot


def _looked_up(
    column: ColumnElement[Any], slot: int, values_of: Callable[[Any], Iterable[Any] | None]
) -> Told | None:
    """Returns what tells the shards of rows with a value of a look-up key, or with one of several."""
    bases = column.base_columns
    lookup = lookup_of(next(iter(bases))) if len(bases) == 1 else None
    if lookup is None:
        return None

    def read(values: Values) -> Choice:
        given = values.value(slot)
        wanted = None if given is None else values_of(given)
        return None if wanted is None else values.looked_up(lookup, wanted, slot)

    return read


def _listed_values(given: Any) -> Iterable[Any] | None:
    is_list = isinstance(given, Collection) and not isinstance(given, str | bytes)
    return given if is_list else None


def _never(_values: Values) -> Choice:
    return frozenset()


def _within(bounds: Sequence[tuple[Any, int]], values: Values) -> Choice:
    """Returns the shards of the IDs within bounds; ``None`` if those are of several milliseconds."""
    lows, highs = [], []
    for operator, slot in bounds:
        value = values.value(slot)
        if type(value) is int:
            if operator in _LOWER:
                lows.append(value + _LOWER[operator])
            else:
                highs.append(value + _UPPER[operator])
    if not (lows and highs):
        return None
    low, high = max(lows), min(highs)
    if low > high:
        return frozenset()
    old = values.finder.old_ids
    if old is not None and (old.has(low) or old.has(high)):
        return None
    layout = values.finder.layout
    first_ms, first = divmod(low >> layout.sequence_bits, layout.shard_limit)
    last_ms, last = divmod(high >> layout.sequence_bits, layout.shard_limit)
    if first_ms != last_ms:
        return None
    return frozenset(range(first, min(last + 1, values.finder.shard_count)))


def _tells(element: ColumnElement[Any]) -> Tells | None:
    bases = element.base_columns
    return how_it_tells(next(iter(bases))) if len(bases) == 1 else None


def _common(reads: Iterable[Told | None]) -> Told | None:
    """Returns what tells the shards that all conditions name."""
    known = [read for read in reads if read is not None]
    if len(known) <= 1:
        return known[0] if known else None

    def read(values: Values) -> Choice:
        choices = [choice for one in known if (choice := one(values)) is not None]
        return frozenset.intersection(*choices) if choices else None

    return read


def _united(reads: Sequence[Told | None]) -> Told | None:
    """Returns what tells the shards that any condition names: nothing, if one names nothing."""
    known = [read for read in reads if read is not None]
    if len(known) < len(reads):
        return None

    def read(values: Values) -> Choice:
        found: frozenset[int] = frozenset()
        for one in known:
            choice = one(values)
            if choice is None:
                return None
            found |= choice
        return found

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read.

    Attributes:
        criteria: the WHERE clause.
        name: the model or table that is written, for messages.
        telling: of an INSERT or UPDATE: what in a row tells its shard, by attribute and column.
        written: of those, the ones that the statement sets itself, by the number of their literal.
    """

    criteria: Criteria
    name: str = ""
    telling: Mapping[str, Tells]
    written: Mapping[str, int]


class Read:
    """One statement with its values.

    Attributes:
        reading: what its structure says.
        values: those of its literals, and those that were given beside it.
    """

    __slots__ = ("_key", "reading", "values")

    def __init__(
        self, statement: Any, parameters: Any, finder: ShardFinder, claims: Claimant | None = None
    ) -> None:
        generate = getattr(statement, "_generate_cache_key", None)
        # What SQLAlchemy finds the compiled statement by; it keeps it, and will not make it again.
        key = None if generate is None else generate()
        reading: Reading | None = None if key is None else _KNOWN.get(key.key)
        binds: Sequence[BindParameter[Any]] = () if key is None else key.bindparams
        if reading is None:
            reader = Reader(binds)
            reading = _read_statement(statement, reader)
            if key is not None and len(reader.binds) == len(binds):
                _KNOWN[key.key] = reading
            binds = reader.binds
        self._key = key
        self.reading = reading
        self.values = Values(binds, parameters, finder, claims)

    def named(self) -> Named:
        """Returns what the criteria name. Raises as :func:`criteria.shards_named` does."""
        return self.reading.criteria.named(self.values)

    def in_one_shard(self, statement: Any, dialect: Callable[[], Dialect]) -> None:
        """Refuses a statement whose criteria name one shard, but which also reads rows of others.

        Raises:
            CannotCombine: a table or a subquery in it is not bound to the rows that the criteria are about.
        """
        by_table = self.values.finder.old_ids is not None
        known = None if self._key is None else (self._key.key, by_table)
        if known is not None and _STAYS.get(known):
            return
        Check(statement, dialect(), by_table=by_table).in_one_shard()
        if known is not None:
            _STAYS[known] = True

    def of_references(self, statement: Any, dialect: Callable[[], Dialect]) -> bool:
        """Returns whether it reads reference tables alone, which every node answers alike."""
        known = None if self._key is None else _OF_REFERENCES.get(self._key.key)
        if known is None:
            is_free = getattr(statement, "is_select", False) and self.reading.criteria.read is None
            known = bool(is_free) and reads_references(statement, dialect())
            if self._key is not None:
                _OF_REFERENCES[self._key.key] = known
        return known

    def written(self) -> dict[str, Any]:
        """Returns the values of the statement itself that tell the shard of what it writes."""
        return {name: self.values.value(slot) for name, slot in self.reading.written.items()}


_KNOWN: Final[LRUCache[Any, Reading]] = LRUCache(500)
_STAYS: Final[LRUCache[Any, bool]] = LRUCache(500)
"""Statements that were found to read one shard when their criteria name one."""

_OF_REFERENCES: Final[LRUCache[Any, bool]] = LRUCache(500)


def _read_statement(statement: Any, reader: Reader) -> Reading:
    places = Counter(one.key for one in visitors.iterate(statement) if isinstance(one, BindParameter))
    reader.reused = {key for key, count in places.items() if count > 1}
    criteria = reader.where(getattr(statement, "whereclause", None))
    if not isinstance(statement, Insert | Update):
        return Reading(criteria=criteria, telling={}, written={})
    telling, name = _what_tells(statement)
    # Dialects know the values of an INSERT or UPDATE by these names; there are no public ones.
    values = {**(statement._values or {}), **dict(getattr(statement, "_ordered_values", None) or ())}
    written = {}
    for column, value in values.items():
        key, slot = getattr(column, "key", column), reader.slot(value)
        if key in telling and slot is not None:
            written[str(key)] = slot
    return Reading(criteria=criteria, name=name, telling=telling, written=written)


def _what_tells(statement: Any) -> tuple[dict[str, Tells], str]:
    """Returns what in a row tells its shard, by attribute and column, and the name of the model or table."""
    table = statement.table
    telling = {column.key: tells for column in table.columns if (tells := how_it_tells(column)) is not None}
    mapper = mapper_written(statement)
    if mapper is None:
        return telling, str(table.name)
    facts = facts_of(mapper)
    return telling | dict(facts.telling), facts.name


def rows_in_values(statement: Any) -> list[dict[str, Any]]:
    """Returns the rows of ``values([…])`` in an INSERT."""
    return [
        {str(getattr(column, "key", column)): value for column, value in row.items()}
        for rows in getattr(statement, "_multi_values", ())
        for row in rows
    ]
