"""What a SELECT reads from, and whether the rows that it joins always live in one shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, ColumnClause, Grouping, Label

from shardids.client.routing.models import Tells, how_it_tells
from shardids.errors import CannotCombine


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What is known of a column.

    Attributes:
        tells: how its value tells the shard of its row.
        base: the table's column that it is.
        required: whether it is never NULL.
    """

    tells: Tells | None
    base: Column[Any] | None
    required: bool


_NOTHING = Trait(tells=None, base=None, required=False)


@dataclass(eq=False, slots=True, kw_only=True)
class Source:
    """One item of FROM.

    Attributes:
        name: for messages.
        located: whether each of its rows lives in one shard; otherwise nothing says where they live, and
            every shard may have the same ones.
        traits: of a subquery's columns; ``None`` for a table.
        optional: whether an outer join may leave its columns NULL.
        everywhere: whether every shard has the same rows of it, as of reference tables.
    """

    name: str
    located: bool
    traits: Mapping[Any, Trait] | None = None
    optional: bool = False
    everywhere: bool = False

    def trait(self, column: Any) -> Trait:
        """Returns what is known of one of its columns."""
        if self.traits is None:
            (base,) = column.base_columns
            if not isinstance(base, Column):
                return _NOTHING
            found = Trait(tells=how_it_tells(base), base=base, required=not base.nullable)
        else:
            found = self.traits.get(column, _NOTHING)
        if self.optional and found.required:
            return Trait(tells=found.tells, base=found.base, required=False)
        return found


@dataclass(slots=True, kw_only=True)
class Scope:
    """The sources of one SELECT, and which of them are known to live together.

    Attributes:
        outer: the scope of the statement around it.
        sources: by the element of FROM.
        conditions: the conditions of joins, each with whether it filters rows, as in an inner join.
        by_table: whether two tables may have rows of the same ID in different shards.
    """

    outer: Scope | None
    by_table: bool
    sources: dict[Any, Source] = field(default_factory=dict)
    conditions: list[tuple[Any, bool]] = field(default_factory=list)
    _parent: dict[Source, Source] = field(default_factory=dict)
    _attached: set[Source] = field(default_factory=set)
    _around: Source = field(default_factory=lambda: Source(name="the statement around", located=True))

    @property
    def located(self) -> list[Source]:
        """The sources whose rows live in one shard each."""
        return [source for source in self.sources.values() if source.located]

    @property
    def is_bound(self) -> bool:
        """Whether all its rows live in the shard of the row of the statement around."""
        return self.outer is not None and all(
            self._root(source) is self._root(self._around) for source in self.located
        )

    def add(self, element: Any, source: Source) -> list[Source]:
        """Adds an item of FROM."""
        self.sources[element] = source
        return [source]

    def trait(self, column: Any) -> tuple[Source, Trait] | None:
        """Returns where a column comes from and what is known of it; ``None`` if it is an expression."""
        column = plain(column)
        if not isinstance(column, ColumnClause):
            return None
        scope: Scope | None = self
        while scope is not None:
            source = scope.sources.get(column.table)
            if source is not None:
                mine = source if scope is self or not source.located else self._around
                return mine, source.trait(column)
            scope = scope.outer
        return None

    def tells_shard(self, columns: Iterable[Any]) -> bool:
        """Returns whether rows of two shards always differ in one of the columns: NULL does not differ."""
        found = map(self.trait, columns)
        return any(one is not None and one[1].required and one[1].tells is not None for one in found)

    def join(self, join: Any, left: list[Source], right: list[Source]) -> list[Source]:
        """Joins two parts of FROM.

        Raises:
            CannotCombine: an outer join that would look for partners in one shard only.
        """
        inner = not (join.isouter or join.full)
        self.conditions.append((join.onclause, inner))
        mine = {*left, *right}
        for one, other, refers in self._links(conjuncts([join.onclause])):
            # The condition of an outer join discards no row of its left side.
            if inner or (one in mine and other in mine and not (one in left and other in left)):
                self._note(one, other, refers)
        if not inner:
            roots = {self._root(source) for source in left if source.located}
            lonely = [s for s in right if s.located and self._root(s) not in roots]
            lonely += [s for s in right if not (s.located or s.everywhere or s in self._attached)]
            if join.full:
                lonely += [source for source in (*left, *right) if not source.located]
                lonely += left[1:] if len(roots) > 1 else []
            if lonely:
                raise _not_together(lonely[0])
        return [*left, *right]

    def bind(self, where: Iterable[Any]) -> None:
        """Notes what conditions that every row fulfils bind together."""
        links = list(self._links(conjuncts(where)))
        for one, other, refers in (*links, *links):
            self._note(one, other, refers)

    def check(self) -> None:
        """Refuses sources that do not live together.

        Raises:
            CannotCombine: there are such.
        """
        located = self.located
        for source in located[1:]:
            if self._root(source) is not self._root(located[0]):
                raise _not_together(source)
        for source in self.sources.values():
            known = source.located or source.everywhere or source in self._attached
            if not known and (located or self.outer is not None):
                raise _not_together(source)

    def _links(self, conditions: Iterable[Any]) -> Iterator[tuple[Source, Source, bool]]:
        """Yields pairs of sources that equalities bind, and whether the first refers to the second."""
        for condition in conditions:
            if not (isinstance(condition, BinaryExpression) and condition.operator is operators.eq):
                continue
            left, right = self.trait(condition.left), self.trait(condition.right)
            if left is None or right is None:
                continue
            for (one, its), (other, others) in ((left, right), (right, left)):
                if (
                    one.located
                    and other.located
                    and its.tells
                    and others.tells
                    and its.tells.alike(others.tells, by_table=self.by_table)
                ):
                    yield one, other, False
                elif not other.located and _refers(its, others):
                    yield one, other, True

    def _note(self, one: Source, other: Source, refers: bool) -> None:
        if refers:
            if one.located or one in self._attached:
                self._attached.add(other)
            return
        self._parent[self._root(one)] = self._root(other)

    def _root(self, source: Source) -> Source:
        while source in self._parent and self._parent[source] is not source:
            source = self._parent[source]
        return source


def conjuncts(conditions: Iterable[Any]) -> Iterator[Any]:
    """Yields the conditions that all have to hold."""
    for condition in conditions:
        if isinstance(condition, BooleanClauseList) and condition.operator is operators.and_:
            yield from conjuncts(condition.clauses)
        elif isinstance(condition, Grouping):
            yield from conjuncts([condition.element])
        else:
            yield condition


def _refers(one: Trait, other: Trait) -> bool:
    return one.base is not None and other.base is not None and one.base.references(other.base)


def plain(element: Any) -> Any:
    """Returns an expression without its label and parentheses."""
    while isinstance(element, Label | Grouping):
        element = element.element
    return element


def _not_together(source: Source) -> CannotCombine:
    if source.located:
        return CannotCombine(
            f"{source.name} is joined over several shards by something else than what tells the shard",
            hint="Join it along a foreign key to an ID or by sharding keys, or execute one select() a table.",
        )
    return unlocated(source)


def unlocated(table: Any) -> CannotCombine:
    """Returns the error for a table, or a source, of which nothing says where its rows live."""
    return CannotCombine(
        f"nothing says in which shard the rows of {getattr(table, 'name', 'a subquery')} live",
        hint="Join it along a foreign key from a table that has an ID or a sharding key, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )
