"""The check that shards can answer a statement from their own rows: each table is bound to one shard's rows.

The check walks the statement as it is sent, with all that SQLAlchemy added to it. If the rows are all in
one shard, PostgreSQL may compute anything over them. Over several shards each row is computed by itself, from
a list of elements; the check refuses other elements by name, and the query node executes the statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from sqlalchemy import BindParameter, Column, Select, Table, Update
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, ColumnClause, Grouping
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import ScalarSelect, SelectStatementGrouping

from shardids.client.routing.aggregates import fold_of
from shardids.client.routing.models import Tells, how_it_tells
from shardids.client.routing.orders import require_clear_names
from shardids.client.routing.sent import (
    ELEMENTS,
    Clauses,
    Kind,
    KindOf,
    Sent,
    as_sent,
    assigned,
    clauses_of,
    compiles_itself,
    plain,
)
from shardids.errors import CannotCombine
from shardids.models.columns import is_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """The known properties of a column.

    Attributes:
        tells: how its value determines the shard of its row.
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
        is_of_one: whether it is a subquery that reads rows of one shard only, whichever is asked.
    """

    name: str
    located: bool
    traits: Mapping[Any, Trait] | None = None
    optional: bool = False
    everywhere: bool = False
    is_of_one: bool = False

    def trait(self, column: Any) -> Trait:
        """Return the known properties of one of its columns."""
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
        """Add an item of FROM."""
        self.sources[element] = source
        return [source]

    def trait(self, column: Any) -> tuple[Source, Trait] | None:
        """Return the source of a column and its known properties; ``None`` if it is an expression."""
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

    def is_of_one(self, where: Iterable[Any]) -> bool:
        """Return whether all its rows live in the shard that one value tells.

        A list is not enough: the shards of its values differ from execution to execution.
        """
        if any(source.is_of_one and not source.optional for source in self.sources.values()):
            return True
        return any(
            found is not None and found[1].tells is not None and found[0] in self.located
            for condition in conjuncts(where)
            if isinstance(condition, BinaryExpression) and condition.operator is operators.eq
            for one, other in ((condition.left, condition.right), (condition.right, condition.left))
            if isinstance(plain(other), BindParameter)
            for found in (self.trait(one),)
        )

    def tells_shard(self, columns: Iterable[Any]) -> bool:
        """Return whether rows of two shards always differ in one of the columns: NULL does not differ."""
        found = map(self.trait, columns)
        return any(one is not None and one[1].required and one[1].tells is not None for one in found)

    def join(self, join: Any, left: list[Source], right: list[Source]) -> list[Source]:
        """Join two parts of FROM.

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
        """Note what conditions that every row fulfils bind together."""
        links = list(self._links(conjuncts(where)))
        for one, other, refers in (*links, *links):
            self._note(one, other, refers)

    def check(self) -> None:
        """Refuse sources that do not live together.

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
        """Yield pairs of sources that equalities bind, and whether the first refers to the second."""
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
    """Yield the conditions that all have to hold."""
    for condition in conditions:
        if isinstance(condition, BooleanClauseList) and condition.operator is operators.and_:
            yield from conjuncts(condition.clauses)
        elif isinstance(condition, Grouping):
            yield from conjuncts([condition.element])
        else:
            yield condition


def _refers(one: Trait, other: Trait) -> bool:
    return one.base is not None and other.base is not None and one.base.references(other.base)


def _not_together(source: Source) -> CannotCombine:
    if source.located:
        return CannotCombine(
            f"{source.name} is joined over several shards by columns that do not determine the shard",
            hint="Join it along a foreign key to an ID or by sharding keys, or execute a select() per table.",
        )
    return unlocated(source)


def unlocated(table: Any) -> CannotCombine:
    """Return the error for a table, or a source, whose rows could be in any shard."""
    return CannotCombine(
        f"cannot determine the shard of the rows of {getattr(table, 'name', 'a subquery')}",
        hint="Join it along a foreign key from a table that has an ID or a sharding key, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )


_IN_PYTHON: Final = (
    'Select the rows and compute it in Python, or name the shard: bind_arguments={"shard_id": number}.'
)
_CONSTANT: Final = re.compile(r"\s*(\*|-?\d+(\.\d+)?|'[^'\\]*'|null|true|false)\s*", re.IGNORECASE)
_OPERATOR: Final = re.compile(r"[-+*/<>=~!@#%^&|`?]+")
"""What PostgreSQL takes for an operator; anything else could hold a subquery."""

_LISTED: Final = ELEMENTS | {"collation", "table", "slice", "array", "textual_label_reference"}

_AGGREGATING: Final = frozenset(("funcfilter", "withingroup", "aggregate_order_by"))
"""Elements that compute one value of several rows, besides windows and functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The place of an expression in its statement.

    Attributes:
        scope: the sources whose columns it may use.
        aggregates: whether all rows of its SELECT, or those of each group, are in one shard, so that it may
            aggregate them.
        windows: whether all rows of its SELECT are in one shard, or in each: a window goes over all groups.
        filters: whether it is a condition that discards rows, and treats NULL as false.
    """

    scope: Scope | None
    aggregates: bool
    windows: bool
    filters: bool = False


class Check:
    """A check of one statement.

    Args:
        statement: as the application, or SQLAlchemy, made it.
        dialect: of the server.
        by_table: whether two tables may have rows of the same ID in different shards.
        kind_of: returns the kind of a function; ``None`` if all rows are in one shard.

    Attributes:
        top: the sources of a SELECT that was checked.
    """

    top: Scope

    def __init__(
        self, statement: Any, dialect: Dialect, *, by_table: bool, kind_of: KindOf | None = None
    ) -> None:
        self._given = statement
        self._sent: Sent = as_sent(statement, dialect)
        self._by_table = by_table
        self._kind_of = kind_of
        self._derived: dict[Any, tuple[Scope, bool]] = {}

    def select(self, folded: Callable[[Any], Iterable[Any]] | None = None) -> bool:
        """Check a SELECT; ``folded`` gives what each shard computes an aggregate's column of.

        Returns:
            whether it reads a table at all.

        Raises:
            CannotCombine: its rows are not each of one shard, or are not computed one by one.
        """
        scope, _ = self._read(self._given, None, top=True, folded=folded)
        self._require_read()
        self.top = scope
        if scope.sources and not scope.located:
            raise unlocated(next(iter(scope.sources.values())))
        if scope.sources or folded is None or not self._sent.sources:
            return bool(scope.sources)
        # Only EXISTS reads tables: an aggregate is of one row, and each shard has that row.
        for column in self._sent.part(self._given).core.inner_columns:
            if not any(isinstance(one, Select) for one in folded(column)):
                raise CannotCombine(
                    f"{column} has no FROM, and EXISTS beside it asks several shards", hint=_IN_PYTHON
                )
        return True

    def in_one_shard(self) -> None:
        """Check a statement whose criteria name one shard: does it also read rows of others?

        Raises:
            CannotCombine: a table or a subquery in it is not bound to the rows that the criteria are about.
        """
        if not getattr(self._given, "is_select", False):
            self.change()
        elif id(self._given) in self._sent.parts:
            self._read(self._given, None, top=True)

    def change(self) -> None:
        """Check an UPDATE or DELETE.

        Raises:
            CannotCombine: it would change other rows, or in another way, than in one database.
        """
        statement = self._sent.statement
        conditions = [] if statement.whereclause is None else [statement.whereclause]
        values = [
            value.__clause_element__() if hasattr(value, "__clause_element__") else value
            for value in (assigned(statement) if isinstance(statement, Update) else {}).values()
            if hasattr(value, "__clause_element__") or hasattr(value, "__visit_name__")
        ]
        scope = Scope(outer=None, by_table=self._by_table)
        target = statement.table
        for source in dict.fromkeys([target, *self._sent.others]):
            if source not in scope.sources:
                self._source(source, scope, optional=False)
        scope.bind(conditions)
        scope.check()
        if not scope.sources[target].located:
            raise unlocated(target)
        is_one = self._kind_of is None
        within = _Around(scope=scope, aggregates=is_one, windows=is_one)
        self._all(conditions, replace(within, filters=True))
        self._all((*values, *statement.exported_columns), within)
        self._require_read()

    # SELECT.

    def _read(
        self,
        select: Any,
        outer: Scope | None,
        *,
        tested: Any = None,
        must_be_bound: bool = False,
        top: bool = False,
        folded: Callable[[Any], Iterable[Any]] | None = None,
    ) -> tuple[Scope, bool]:
        """Check a SELECT; ``tested`` is a condition that the statement around sets its rows.

        A SELECT that is bound to the row around it sees all the rows that it would see in one database, so it
        may compute over them; so may one in FROM that names a shard itself, if the statement goes to one.
        Any other has to give its rows one by one.
        """
        _, core, froms = self._sent.part(select)
        if core is None:
            _refuse(select)
        clauses = clauses_of(core)
        scope = Scope(outer=outer, by_table=self._by_table)
        for source in froms:
            self._source(source, scope, optional=False)
        conditions = [] if core.whereclause is None else [core.whereclause]
        scope.bind(conditions)
        # The criteria around are about the same shard, or about rows that these are not joined with. That is
        # not enough within an expression: NOT IN of nothing is true.
        is_of_one = top or (outer is None and scope.is_of_one(conditions))
        bound = scope.is_bound or (self._kind_of is None and is_of_one)
        scope.bind([] if tested is None else [tested])
        if must_be_bound and not scope.is_bound:
            _refuse_subquery(scope)
        scope.check()
        if not bound:
            _require_rows(clauses, list(core.inner_columns), scope, top=top)
        if top and not bound:
            require_clear_names(select)
        is_one = bound or self._kind_of is None
        # A subquery in FROM may read more rows than those that the criteria around it are about.
        windows = bound or (is_one and all(source.everywhere for source in scope.sources.values()))
        within = _Around(scope=scope, aggregates=is_one, windows=windows)
        self._all(conditions, replace(within, filters=True))
        for condition, filters in scope.conditions:
            self._check(condition, replace(within, filters=filters))
        # Each group is of one shard.
        grouped = replace(within, aggregates=is_one or bool(clauses.group_by))
        # What can be made of the shards' own is not what is refused.
        for column in sorted(core.inner_columns, key=lambda one: fold_of(one) is not None):
            self._all([column] if folded is None else folded(column), grouped)
        self._all((*clauses.having, *clauses.order_by), grouped)
        numbers = [one for one in (clauses.limit, clauses.offset, clauses.fetch) if one is not None]
        self._all((*clauses.group_by, *clauses.distinct_on, *numbers), within)
        return scope, bound

    def _require_read(self) -> None:
        """Refuse a statement of several shards with anything that was not among its expressions."""
        if self._kind_of is None:
            return
        for named in self._sent.unread:
            raise _not_known(named)
        read = {id(one.element) for one in self._derived}
        for found, one in self._sent.ctes.items():
            if found not in read:
                _refuse(one)

    # Expressions.

    def _all(self, elements: Iterable[Any], around: _Around) -> None:
        for element in elements:
            if isinstance(element, Select):
                # Of EXISTS, which each shard is asked: any of them has such rows.
                if not self._read(element, None)[0].located:
                    raise unlocated(element)
            else:
                self._check(element, around)

    def _check(self, element: Any, around: _Around) -> None:
        """Refuse an expression with an element that is not on the list, or a SELECT that is not bound."""
        kind = element.__visit_name__
        # The latter is EXISTS of SQLAlchemy 2.0.
        if isinstance(element, ScalarSelect | SelectStatementGrouping):
            self._read(element.element, around.scope, must_be_bound=True)
            return
        if self._kind_of is not None:
            self._require_listed(element, around)
        elif kind == "over":
            _require_own_rows(element, around)
        if kind == "column":
            return
        operator = getattr(element, "operator", None)
        if operator in (operators.in_op, operators.not_in_op):
            select = plain(element.right)
            select = select.element if isinstance(select, ScalarSelect) else select
            if isinstance(select, Select):
                self._member(element, select, around)
                return
        keeps = operator in (operators.and_, operators.or_) or kind == "grouping"
        self._all(element.get_children(), around if keeps else replace(around, filters=False))

    def _member(self, element: Any, select: Any, around: _Around) -> None:
        """``x IN (SELECT y …)``: right if equal values are in one shard, and NULL makes no difference."""
        self._check(element.left, replace(around, filters=False))
        columns = list(select.selected_columns)
        tested = element.left == columns[0] if len(columns) == 1 else None
        scope, bound = self._read(select, around.scope, tested=tested, must_be_bound=True)
        if bound or (around.filters and element.operator is operators.in_op):
            return
        given, found = around.scope and around.scope.trait(element.left), scope.trait(columns[0])
        if not (given and given[1].required and found and found[1].required):
            raise CannotCombine(
                f"{element.left} IN (SELECT …) over several shards works only in WHERE: it may be NULL",
                hint="Use it in where(), joined with and_() or or_(), or exists() with both tables.",
            )

    def _require_listed(self, element: Any, around: _Around) -> None:
        kind = element.__visit_name__
        operator = getattr(element, "operator", None) or getattr(element, "modifier", None)
        written = getattr(operator, "opstring", None)
        if compiles_itself(element):
            _refuse(element)
        elif isinstance(element, FunctionElement):
            self._require_known(element, around)
        elif kind == "over" or kind in _AGGREGATING:
            if not (around.windows if kind == "over" else around.aggregates):
                named = "a window function" if kind == "over" else "an aggregate"
                raise CannotCombine(f"{named} over several shards is not supported", hint=_IN_PYTHON)
        elif kind not in _LISTED or (kind == "column" and not _is_known(element)):
            _refuse(element)
        elif written is not None and not _OPERATOR.fullmatch(written):
            raise CannotCombine(f"operator {written} over several shards is not supported", hint=_IN_PYTHON)

    def _require_known(self, function: Any, around: _Around) -> None:
        name = getattr(function, "name", "")
        kind = self._kind_of(function) if self._kind_of else Kind.SCALAR
        if kind is Kind.UNKNOWN:
            raise CannotCombine(
                f"{name}() over several shards is not supported: it may depend on more than its arguments",
                hint=f"Declare it IMMUTABLE on the nodes if it is. {_IN_PYTHON}",
            )
        if kind is Kind.SCALAR:
            return
        columns = [one for one in visitors.iterate(function) if one.__visit_name__ == "column"]
        mine = around.scope.sources if around.scope is not None else {}
        # PostgreSQL computes an aggregate of the columns of a SELECT around it over the rows of that.
        is_own = any(getattr(one, "table", None) in mine for one in columns)
        computes = around.windows if kind is Kind.WINDOW else around.aggregates
        if not computes or not (is_own or all(getattr(one, "table", None) is None for one in columns)):
            raise CannotCombine(
                f"{name}() over several shards can't be combined from the shards' results", hint=_IN_PYTHON
            )

    # FROM.

    def _source(self, element: Any, scope: Scope, *, optional: bool) -> list[Source]:
        kind = element.__visit_name__
        if kind == "join":
            left = self._source(element.left, scope, optional=optional or element.full)
            either = optional or element.isouter or element.full
            return scope.join(element, left, self._source(element.right, scope, optional=either))
        if kind == "grouping":
            return self._source(element.element, scope, optional=optional)
        inner = element
        while inner.__visit_name__ == "alias":
            inner = inner.element
        if isinstance(inner, Table):
            located = inner.schema is None and any(how_it_tells(column) for column in inner.columns)
            everywhere = is_reference(inner)
            return scope.add(
                element, Source(name=inner.name, located=located, optional=optional, everywhere=everywhere)
            )
        if inner.__visit_name__ not in ("subquery", "cte") or getattr(inner, "recursive", False):
            _refuse(inner)
        return scope.add(element, self._subquery_source(element, inner, optional=optional))

    def _subquery_source(self, element: Any, inner: Any, *, optional: bool) -> Source:
        if inner not in self._derived:
            self._derived[inner] = self._read(inner.element, None)
        there, is_of_one = self._derived[inner]
        columns, given = list(element.c), list(inner.element.selected_columns)
        traits: dict[Any, Trait] = {}
        if len(columns) == len(given):
            found = ((column, there.trait(one)) for column, one in zip(columns, given, strict=True))
            traits = {column: one[1] for column, one in found if one is not None}
        return Source(
            name="a subquery",
            located=bool(there.located),
            traits=traits,
            optional=optional,
            everywhere=bool(there.sources) and all(one.everywhere for one in there.sources.values()),
            is_of_one=is_of_one,
        )


def _require_rows(clauses: Clauses, columns: Sequence[Any], scope: Scope, *, top: bool) -> None:
    """Refuse clauses that compute over the rows of several shards."""
    if not top and clauses.are_cut:
        _refuse_subquery(scope)
    distinct = clauses.distinct_on or (columns if clauses.distinct else ())
    for keys, what in ((clauses.group_by, "GROUP BY"), (distinct, "DISTINCT")):
        if keys and not scope.tells_shard(keys):
            raise CannotCombine(f"{what} over several shards would see one shard at a time", hint=_IN_PYTHON)
    if clauses.having and not clauses.group_by:
        raise CannotCombine("HAVING over several shards would see one shard at a time", hint=_IN_PYTHON)


def _require_own_rows(window: Any, around: _Around) -> None:
    """Refuse a window over rows of several shards in a statement whose criteria name one."""
    parts = () if window.partition_by is None else window.partition_by
    if around.windows or (around.scope is not None and around.scope.tells_shard(parts)):
        return
    raise CannotCombine(
        "a window function in a subquery over several shards is not supported", hint=_IN_PYTHON
    )


def reads_references(statement: Any, dialect: Dialect) -> bool:
    """Return whether a SELECT reads reference tables and nothing else: every node has the same answer."""
    tables = [table for source in as_sent(statement, dialect).sources for table in _tables(source)]
    return bool(tables) and all(map(is_reference, tables))


def _tables(source: Any) -> Iterator[Any]:
    """Yield the tables in an item of FROM, and items that may be none; its SELECTs are separate parts."""
    kind = getattr(source, "__visit_name__", None)
    if kind == "join":
        yield from _tables(source.left)
        yield from _tables(source.right)
    elif kind in ("alias", "grouping"):
        yield from _tables(source.element)
    elif not (kind in ("subquery", "cte") and getattr(source.element, "is_select", False)):
        yield source


def _is_known(column: Any) -> bool:
    if getattr(column, "is_literal", False):
        return _CONSTANT.fullmatch(column.name) is not None
    return column.table is not None


def _refuse(element: Any) -> NoReturn:
    named = type(element).__name__.removeprefix("Annotated")
    raise _not_known(
        f"{named} {str(element)!r}" if element.__visit_name__ in ("textclause", "column") else named
    )


def _not_known(named: str) -> CannotCombine:
    return CannotCombine(
        f"{named} over several shards is not supported",
        hint="Write it with SQLAlchemy's expressions over mapped columns, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )


def _refuse_subquery(scope: Scope) -> NoReturn:
    refuse_subquery(source.name for source in scope.sources.values())


def refuse_subquery(names: Iterable[str]) -> NoReturn:
    """Refuse a subquery on these tables, which would see the rows of one shard."""
    raise CannotCombine(
        f"the subquery on {', '.join(dict.fromkeys(names)) or 'nothing'} would have a different result in"
        " each shard",
        hint="Bind it to the row around it by an ID or a sharding key; or execute it first, and put its"
        " result into the statement; or name the shard.",
    )
