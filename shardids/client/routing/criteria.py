"""The shards that a statement names: by IDs, by foreign keys to them, and by sharding keys.

A statement's structure is read once for all statements that differ in their values only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    AliasedReturnsRows,
    BindParameter,
    ClauseElement,
    ColumnElement,
    Insert,
    Join,
    SelectBase,
    Update,
    UpdateBase,
    inspect,
)
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import Mapper
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, False_, Grouping, UnaryExpression
from sqlalchemy.util import LRUCache

from shardids.client.routing.models import (
    Claimed,
    ShardFinder,
    Tells,
    claimed_value,
    facts_of,
    how_it_tells,
    is_sharding_key,
    mapper_written,
)
from shardids.client.routing.sent import assigned, part_of
from shardids.client.routing.shapes import Check, reads_references
from shardids.errors import BadArgument, ShardidsError
from shardids.models.lookups import Lookup, lookup_of, lookups_of

Choice = frozenset[int] | None
"""All shards that can have rows that fulfil a criterion; ``None`` if it could be any."""

LookUp = Callable[[Lookup, Iterable[Any]], Claimed | None]
"""Returns the shards whose rows can have values of a look-up key; ``None`` if they are not known."""


class Named(NamedTuple):
    """The shards that the criteria of a statement name.

    Attributes:
        shards: the shards that rows can come from; ``None`` if the criteria name none.
        lists: parameters of ``IN`` over IDs or keys, by their keys: the places of each shard's values.
        read: the statement with its values.
    """

    shards: Choice
    lists: Mapping[str, Mapping[int, list[int]]]
    read: Read


def narrowed(statement: Any, parameters: Any, named: Named, shard: int) -> tuple[Any, Any]:
    """Return the statement and its parameters with those values of IN lists that belong to the shard."""
    if not named.lists:
        return statement, parameters
    given = parameters if isinstance(parameters, Mapping) else {}

    def mine(key: str, values: Any) -> list[Any]:
        values = list(values)
        return [values[place] for place in named.lists[key].get(shard, ())]

    def narrow(parameter: BindParameter[Any]) -> None:
        if parameter.key in named.lists and parameter.key not in given:
            parameter.value = mine(parameter.key, parameter.effective_value)

    if named.lists.keys() - given.keys():
        statement = visitors.cloned_traverse(statement, {"maintain_key": True}, {"bindparam": narrow})
    narrow_given = {key: mine(key, given[key]) for key in named.lists.keys() & given.keys()}
    return statement, {**given, **narrow_given} if narrow_given else parameters


@dataclass(slots=True, kw_only=True)
class Reading:
    """The structure of a statement, apart from its values.

    Attributes:
        shards: returns the shards that the WHERE clause names, given the values of one execution, or that of
            a subquery in FROM; ``None`` if it names none, whatever its values are.
        mentioned: the same of every criterion anywhere in it, and of each alternative.
        name: the model or table that is written, for messages.
        telling: of an INSERT or UPDATE: how values of a row determine its shard, by attribute and column.
        written: of those, the ones that the statement sets itself, by the number of their literal.
        keys: the sharding keys of its rows themselves, by attribute and column.
        computed: one of those that an INSERT sets to an SQL expression; empty if it sets none.
        mappers: the classes that it is of.
        inner_lookup: a look-up key that an INSERT or UPDATE within the statement writes.
        selects: whether an INSERT may have a SELECT in a value or in RETURNING.
        of_references: whether it reads reference tables only; ``None`` if this was not checked.
        stays: whether it was found to read one shard when its criteria name one, with old IDs or without.
        is_fixed: whether only its LIMIT and OFFSET differ from execution to execution.
        kept: its plans for several shards, by those numbers.
    """

    shards: Callable[[Read], Choice] | None
    mentioned: Sequence[Callable[[Read], Choice]] = ()
    name: str = ""
    telling: Mapping[str, Tells] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    computed: str = ""
    mappers: Sequence[Mapper[Any]] = ()
    inner_lookup: Lookup | None = None
    selects: bool = False
    of_references: bool | None = None
    stays: set[bool] = field(default_factory=set)
    is_fixed: bool = False
    kept: dict[Any, Any] = field(default_factory=dict)


_KNOWN: Final[LRUCache[Any, Reading]] = LRUCache(500)


def reading_of(statement: Any) -> tuple[Reading, Sequence[BindParameter[Any]]]:
    """Return a statement's structure, and its literals and parameters."""
    # What SQLAlchemy finds the compiled statement by, and keeps: nothing public tells so quickly what two
    # statements have in common.
    generate = getattr(statement, "_generate_cache_key", None)
    key = None if generate is None else generate()
    reading = None if key is None else _KNOWN.get(key.key)
    if key is not None and reading is not None:
        return reading, key.bindparams
    binds: Sequence[BindParameter[Any]] = () if key is None else key.bindparams
    reader = _Reader(statement, binds)
    reading = reader.reading()
    if key is not None and len(reader.binds) == len(binds):
        _KNOWN[key.key] = reading
    return reading, reader.binds


class Read:
    """One statement with its values. An unreadable criterion names no shard: the answer is never too small.

    A statement runs within one shard at a time: a condition on any of its tables holds for all of them.

    Attributes:
        reading: its structure.
    """

    __slots__ = ("_binds", "_given", "_lists", "_look_up", "_statement", "finder", "reading")

    def __init__(
        self, statement: Any, parameters: Any, finder: ShardFinder, look_up: LookUp | None = None
    ) -> None:
        self.reading, self._binds = reading_of(statement)
        self._statement = statement
        self._given: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self.finder = finder
        self._look_up = look_up
        self._lists: dict[str, dict[int, list[int]]] = {}

    def named(self) -> Named:
        """Return the shards that the criteria name.

        Raises:
            BadArgument: an ID of no shard of this cluster.
            UnsupportedKey: a sharding key that has no hash.
        """
        return Named(None if self.reading.shards is None else self.reading.shards(self), self._lists, self)

    def mentioned(self) -> frozenset[int]:
        """Return the shards that its criteria name, also within subqueries. Raises as named()."""
        return frozenset[int]().union(*(read(self) or () for read in self.reading.mentioned))

    def in_one_shard(self, dialect: Callable[[], Dialect]) -> None:
        """Refuse a statement whose criteria name one shard, but which also reads rows of others.

        Raises:
            CannotCombine: a table or a subquery in it is not bound to the rows that the criteria are about.
        """
        by_table = self.finder.old_ids is not None
        if by_table not in self.reading.stays:
            Check(self._statement, dialect(), by_table=by_table).in_one_shard()
            self.reading.stays.add(by_table)

    def of_references(self, dialect: Callable[[], Dialect]) -> bool:
        """Return whether it reads reference tables only, which every node answers alike."""
        if self.reading.of_references is None:
            is_free = getattr(self._statement, "is_select", False) and self.reading.shards is None
            self.reading.of_references = bool(is_free) and reads_references(self._statement, dialect())
        return self.reading.of_references

    def rows(self, given: Any) -> Sequence[Mapping[str, Any]]:
        """Return the rows that an INSERT or UPDATE writes, as far as they are known."""
        written = {name: self.value(slot) for name, slot in self.reading.written.items()}
        if several := rows_in_values(self._statement):
            return [
                {name: value for name, value in row.items() if not isinstance(value, ClauseElement)}
                for row in several
            ]
        if isinstance(given, Mapping) and given:
            return [{**written, **given}]
        if isinstance(given, Sequence) and given:
            return [{**written, **row} for row in given] if written else given
        return [written]

    def numbers(self) -> tuple[Any, ...] | None:
        """Return its LIMIT and OFFSET if nothing else differs from execution to execution; or ``None``."""
        if not self.reading.is_fixed:
            return None
        values = tuple(map(self.value, range(len(self._binds))))
        return values if all(type(value) is int for value in values) else None

    def value(self, slot: int) -> Any:
        """Return the value of a literal or a parameter; ``None`` if it is not known."""
        bind = self._binds[slot]
        return self._given.get(bind.key, bind.effective_value) if self._given else bind.effective_value

    def shards_of(
        self, column: ColumnElement[Any], tells: Tells, given: Iterable[Any], slot: int, *, is_split: bool
    ) -> Choice:
        """Return the shards that values tell, and keep the places of each's; its error names the column."""
        bind, values = self._binds[slot], list(given)
        try:
            # The parameter's type, not the column's, decides what is sent.
            told = tells.shards([one for one in values if one is not None], self.finder, bind.type)
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None
        if is_split:
            shard_of, places = dict(told), defaultdict[int, list[int]](list)
            for place, value in enumerate(values):
                if value in shard_of:
                    places[shard_of[value]].append(place)
            self._lists[bind.key] = places
        return frozenset(shard for _, shard in told)

    def looked_up(self, lookup: Lookup, given: Iterable[Any], slot: int) -> Choice:
        """Return the shards whose rows can have values of a look-up key, which the nodes are asked for."""
        if self._look_up is None:
            return None
        type_ = self._binds[slot].type
        try:
            wanted = [claimed_value(lookup, value, type_) for value in given if value is not None]
        except BadArgument:
            return None  # A value of another type, of which PostgreSQL makes one.
        found = self._look_up(lookup, wanted)
        return None if found is None else frozenset(found.values())


_Told = Callable[[Read], Choice]
_Unite = Callable[[list[_Told | None]], _Told | None]


class _Reader:
    """A reader of a statement's structure: of the columns to compare, not of the values to compare with.

    Attributes:
        binds: the literals and parameters; the structure names them by their number.
    """

    def __init__(self, statement: Any, binds: Sequence[BindParameter[Any]]) -> None:
        self.binds = list(binds)
        self._statement = statement
        self._slots = {id(bind): slot for slot, bind in enumerate(self.binds)}
        places = Counter(one.key for one in visitors.iterate(statement) if isinstance(one, BindParameter))
        # No shard gets only its part of the values of a parameter that stands in several places.
        self._reused = {key for key, count in places.items() if count > 1}

    def reading(self) -> Reading:
        parts = list(_within(self._statement))
        reading = Reading(shards=self._rows_of(self._statement))
        reading.mentioned = [
            read
            for one in dict.fromkeys(_criteria(parts))
            if (read := self._read(one, united=_mentioned)) is not None
        ]
        reading.selects = any(isinstance(one, SelectBase | OnConflictDoUpdate) for one in parts)
        inside = (one for one in parts if isinstance(one, Insert | Update))
        lookups = (lookup for one in inside if one is not self._statement for lookup in lookups_of(one.table))
        reading.inner_lookup = next(lookups, None)
        columns = getattr(self._statement, "column_descriptions", ())
        found = (inspect(one.get("entity"), raiseerr=False) for one in columns)
        reading.mappers = [one.mapper for one in found if hasattr(one, "mapper")]
        numbers = {id(part_of(self._statement, name)) for name in ("limit_clause", "offset_clause")}
        reading.is_fixed = all(id(bind) in numbers for bind in self.binds)
        if isinstance(self._statement, UpdateBase) and (written := mapper_written(self._statement)):
            reading.mappers = [written]
        if isinstance(self._statement, Insert | Update):
            table, mapper = self._statement.table, mapper_written(self._statement)
            telling = {column.key: how_it_tells(column) for column in table.columns}
            keys = {column.key for column in table.columns if is_sharding_key(column)}
            reading.name = str(getattr(table, "name", table))
            if mapper is not None:
                telling |= dict(facts_of(mapper).telling)
                keys.add(facts_of(mapper).key or "")
                reading.name = facts_of(mapper).name
            reading.telling = {key: tells for key, tells in telling.items() if tells is not None}
            reading.keys = frozenset(keys)
            sets = {key: self._slot(value) for key, value in assigned(self._statement).items()}
            reading.written = {
                key: slot for key, slot in sets.items() if key in reading.telling and slot is not None
            }
            reading.computed = next((key for key in sets if key in keys and sets[key] is None), "")
        return reading

    def _slot(self, element: object) -> int | None:
        """Return the number of a literal or a parameter; ``None`` if the element is neither."""
        while isinstance(element, Grouping):
            element = element.element
        if not isinstance(element, BindParameter):
            return None
        if id(element) not in self._slots:
            self._slots[id(element)] = len(self.binds)
            self.binds.append(element)
        return self._slots[id(element)]

    def _rows_of(self, select: Any) -> _Told | None:
        """Read the criteria that each row of a statement fulfils, also within a subquery in FROM."""
        reads = [self._read(getattr(select, "whereclause", None))]
        sources = [*(part_of(select, "from_obj") or ()), *getattr(select, "columns_clause_froms", ())]
        joins = part_of(select, "setup_joins") or ()
        # The condition of an outer join discards no row of its other side.
        is_inner = not any(flags["isouter"] or flags["full"] for *_, flags in joins)
        if is_inner and not any(isinstance(one, Join) for one in sources):
            reads += [self._rows_of(one.element) for one in sources if isinstance(one, AliasedReturnsRows)]
        return _common(reads)

    def _read(self, element: object, united: _Unite | None = None) -> _Told | None:
        unite = united or _united
        read: _Told | None = None
        match element:
            case False_():
                read = _never
            case UnaryExpression() if element.operator is operators.is_true:
                read = self._read(element.element, united)
            case Grouping():
                read = self._read(element.element, united)
            case BooleanClauseList() if element.operator is operators.and_:
                read = _common(self._read(one, united) for one in element.clauses)
            case BooleanClauseList() if element.operator is operators.or_:
                read = unite([self._read(one, united) for one in element.clauses])
            case BinaryExpression() if element.operator is operators.in_op:
                read = self._compared(element.left, element.right, is_list=True)
            case BinaryExpression() if element.operator is operators.eq:
                sides = ((element.left, element.right), (element.right, element.left))
                read = _common([self._compared(column, other, is_list=False) for column, other in sides])
        return read

    def _compared(self, column: Any, other: object, *, is_list: bool) -> _Told | None:
        """Read a column that is equal to a value, or to one of a list."""
        base, slot = _base(column), self._slot(other)
        tells = how_it_tells(base)
        lookup = lookup_of(base) if tells is None else None
        if slot is None or (tells is None and lookup is None):
            return None
        is_split = is_list and isinstance(other, BindParameter) and other.key not in self._reused

        def read(values: Read) -> Choice:
            given = values.value(slot)
            is_several = isinstance(given, Collection) and not isinstance(given, str | bytes)
            if given is None or (is_list and not is_several):
                return None
            wanted = given if is_list else [given]
            if tells is None:
                return values.looked_up(lookup, wanted, slot)  # type: ignore[arg-type]  # one of both is there
            return values.shards_of(column, tells, wanted, slot, is_split=is_split)

        return read


def _within(statement: Any) -> Iterator[Any]:
    """Yield all parts of a statement, also CTEs that only its columns name."""
    todo, seen = [statement], set()
    while todo:
        for part in visitors.iterate(todo.pop()):
            yield part
            source = getattr(part, "table", None)
            if isinstance(source, AliasedReturnsRows) and source not in seen:
                seen.add(source)
                todo.append(source)


def _criteria(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield the conditions of all statements and joins among the parts of one."""
    for part in parts:
        yield from (getattr(part, "whereclause", None), getattr(part, "onclause", None))
        yield from part_of(part, "having_criteria") or ()
        yield from (on for _, on, *_ in part_of(part, "setup_joins") or ())


def _base(element: Any) -> Any:
    """Return the table's column that an expression is; ``None`` if it is of none or of several."""
    bases = list(getattr(element, "base_columns", ()))
    return bases[0] if len(bases) == 1 else None


def _never(_values: Read) -> Choice:
    return frozenset()


def _common(reads: Iterable[_Told | None]) -> _Told | None:
    """Return the function for the shards that all conditions name."""
    known = [read for read in reads if read is not None]
    if len(known) <= 1:
        return known[0] if known else None

    def read(values: Read) -> Choice:
        choices = [choice for one in known if (choice := one(values)) is not None]
        return frozenset.intersection(*choices) if choices else None

    return read


def _mentioned(reads: list[_Told | None]) -> _Told | None:
    """Return the function for the shards that some conditions name, whatever the others are."""
    return _united([read for read in reads if read is not None] or [None])


def _united(known: list[_Told | None]) -> _Told | None:
    """Return the function for the shards that any condition names; ``None`` if one names none."""
    if None in known:
        return None

    def read(values: Read) -> Choice:
        found: frozenset[int] = frozenset()
        for one in known:
            choice = one(values)  # type: ignore[misc]  # none is None
            if choice is None:
                return None
            found |= choice
        return found

    return read


def rows_in_values(statement: Any) -> list[dict[str, Any]]:
    """Return the rows of ``values([…])`` in an INSERT."""
    return [
        {str(getattr(column, "key", column)): value for column, value in row.items()}
        for rows in part_of(statement, "multi_values") or ()
        for row in rows
    ]
