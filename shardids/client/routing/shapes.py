"""Which statements are right when each shard executes them on its own rows: a list, and nothing else.

The check walks the statement as it is sent, with all that SQLAlchemy added to it. What is not on the list is
refused by name, so that a kind of element that nobody thought of gives an error, not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from sqlalchemy import Table
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.elements import FunctionFilter
from sqlalchemy.sql.selectable import ScalarSelect

from shardids.client.routing.expressions import IN_PYTHON, Around, ExpressionCheck, arguments, refuse
from shardids.client.routing.folds import without_not, without_zero
from shardids.client.routing.functions import Kind, KindOf
from shardids.client.routing.models import how_it_tells
from shardids.client.routing.sent import Sent, as_sent
from shardids.client.routing.sources import Scope, Source, Trait, unlocated
from shardids.errors import CannotCombine
from shardids.models.references import is_reference


def check_select(statement: Any, dialect: Dialect, *, folded: bool, kind_of: KindOf, by_table: bool) -> bool:
    """Refuses a SELECT whose answers from the shards do not make the answer of one database.

    Args:
        statement: what each shard is asked.
        dialect: of the server.
        folded: whether all its columns are aggregates of which :mod:`folds` makes one row.
        kind_of: what a function computes.
        by_table: whether two tables may have rows of the same ID in different shards.

    Returns:
        whether it reads a table at all.

    Raises:
        CannotCombine: it has an element that is not on the list.
    """
    check = _Check(as_sent(statement, dialect), kind_of, by_table=by_table)
    scope, _ = check.read(statement, Around(), top=True, folded=folded)
    if scope.sources and not scope.located:
        raise unlocated(next(iter(scope.sources.values())))
    return bool(scope.sources) or folded


def check_change(statement: Any, dialect: Dialect, kind_of: KindOf, *, by_table: bool) -> None:
    """Refuses an UPDATE or DELETE that would change other rows, or in another way, than in one database.

    Raises:
        CannotCombine: it has an element that is not on the list.
    """
    _Check(as_sent(statement, dialect), kind_of, by_table=by_table).change()


def check_in_one_shard(statement: Any, dialect: Dialect, *, by_table: bool) -> None:
    """Refuses a statement whose criteria name one shard, but which also reads rows of others.

    Only what it reads from is looked at: of rows that are all in one shard PostgreSQL computes anything.

    Raises:
        CannotCombine: a table or a subquery in it is not bound to the rows that the criteria are about.
    """
    sent = as_sent(statement, dialect)
    check = _OneShardCheck(sent, lambda _: Kind.SCALAR, by_table=by_table)
    if getattr(statement, "is_select", False):
        if id(statement) in sent.parts:
            check.read(statement, Around(), top=True)
    else:
        check.change()


def reads_references(statement: Any, dialect: Dialect) -> bool:
    """Returns whether a SELECT reads reference tables and nothing else: every node has the same answer."""
    parts = as_sent(statement, dialect).parts.values()
    sources = [source for _, core, froms in parts for source in (froms if core is not None else [None])]
    tables = [table for source in sources for table in _tables(source)]
    return bool(tables) and all(map(is_reference, tables))


def _tables(source: Any) -> Iterator[Any]:
    """Yields the tables in an item of FROM, and what may be none; SELECTs in it are parts of their own."""
    kind = getattr(source, "__visit_name__", None)
    if kind == "join":
        yield from _tables(source.left)
        yield from _tables(source.right)
    elif kind in ("alias", "grouping"):
        yield from _tables(source.element)
    elif not (kind in ("subquery", "cte") and getattr(source.element, "is_select", False)):
        yield source


class _Check(ExpressionCheck):
    in_one_shard = False

    def __init__(self, sent: Sent, kind_of: KindOf, *, by_table: bool) -> None:
        super().__init__(kind_of)
        self._sent = sent
        self._by_table = by_table
        self._derived: dict[Any, Scope] = {}

    def subquery(self, select: Any, around: Around, equal: tuple[Any, Any] | None) -> tuple[Scope, bool]:
        """Checks a SELECT in an expression, which has to be bound to the row around it."""
        tested = None if equal is None else equal[0] == equal[1]
        return self.read(select, around, tested=tested, must_be_bound=True)

    def read(
        self,
        select: Any,
        around: Around,
        *,
        tested: Any = None,
        must_be_bound: bool = False,
        top: bool = False,
        folded: bool = False,
    ) -> tuple[Scope, bool]:
        """Checks a SELECT; ``tested`` is a condition that the statement around sets its rows.

        A SELECT that is bound to the row around it sees all the rows that it would see in one database, so it
        may compute over them. Any other has to give its rows one by one.
        """
        _, core, froms = self._sent.parts.get(id(select), (None, None, []))
        if core is None:
            refuse(select)
        if not self.in_one_shard:
            _check_clauses(core)
        scope = Scope(outer=around.scope, by_table=self._by_table)
        for source in froms:
            self._source(source, scope, optional=False)
        scope.bind(core._where_criteria)
        bound = scope.is_bound or (top and self.in_one_shard)
        scope.bind([] if tested is None else [tested])
        if must_be_bound and not scope.is_bound:
            _refuse_subquery(scope)
        scope.check()
        if not bound:
            _check_rows(core, scope, top=top)
        self._clauses(core, Around(scope=scope, bound=bound), folded=folded)
        return scope, bound

    def _clauses(self, core: Any, within: Around, *, folded: bool) -> None:
        scope: Any = within.scope
        self.check_all(core._where_criteria, replace(within, filters=True))
        for condition, filters in scope.conditions:
            self.check(condition, replace(within, filters=filters))
        grouped = replace(within, grouped=bool(core._group_by_clauses))
        for column in core.inner_columns:
            if folded:
                self._folded(column, within)
            else:
                self.check(column, grouped)
        self.check_all(core._having_criteria, grouped)
        self.check_all(core._order_by_clauses, grouped)
        for rest in (core._group_by_clauses, core._distinct_on):
            self.check_all(rest, within)
        for number in (core._limit_clause, core._offset_clause):
            if number is not None:
                self.check(number, within)

    def _folded(self, column: Any, within: Around) -> None:
        element = without_zero(column)
        if isinstance(element, FunctionFilter):
            self.check(element.criterion, within)
            element = element.func
        exists = without_not(element)[0]
        if exists is not None:
            if not self.read(exists, Around(scope=Scope(outer=None, by_table=self._by_table)))[0].located:
                raise unlocated(exists)
            return
        self.check_all(arguments(element), within)

    def change(self) -> None:
        """Checks an UPDATE or DELETE."""
        statement = self._sent.statement
        if not self.in_one_shard and (statement._prefixes or statement._hints or statement._independent_ctes):
            raise CannotCombine("a prefix, hint or CTE of an UPDATE or DELETE", hint=IN_PYTHON)
        conditions = [] if statement.whereclause is None else [statement.whereclause]
        values = list(_assigned(statement))
        scope = Scope(outer=None, by_table=self._by_table)
        target = statement.table
        for source in dict.fromkeys(
            [target, *(s for one in (*conditions, *values) for s in one._from_objects)]
        ):
            if source not in scope.sources:
                self._source(source, scope, optional=False)
        scope.bind(conditions)
        scope.check()
        if not scope.sources[target].located:
            raise unlocated(target)
        within = Around(scope=scope, bound=self.in_one_shard)
        self.check_all(conditions, replace(within, filters=True))
        self.check_all((*values, *statement._returning), within)

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
        if inner.__visit_name__ in ("subquery", "cte") and not getattr(inner, "recursive", False):
            return scope.add(element, self._subquery_source(element, inner, optional=optional))
        refuse(inner)
        return []

    def _subquery_source(self, element: Any, inner: Any, *, optional: bool) -> Source:
        if inner not in self._derived:
            self._derived[inner], _ = self.read(inner.element, Around())
        there = self._derived[inner]
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
        )


class _OneShardCheck(_Check):
    in_one_shard = True

    def check(self, element: Any, around: Around) -> None:
        """Looks for SELECTs in an expression, whatever else it is made of."""
        if isinstance(element, ScalarSelect):
            self.subquery(element.element, around, None)
        elif element.__visit_name__ in ("binary", "unary"):
            self.check_parts(element, around)
        elif element.__visit_name__ != "column":
            self.check_all(element.get_children(), replace(around, filters=False))

    def knows(self, _operator: Any) -> bool:
        """Returns true: PostgreSQL computes it, of rows that are all in one shard."""
        return True


def _assigned(statement: Any) -> Iterator[Any]:
    """Yields the expressions that an UPDATE sets."""
    values = {**(getattr(statement, "_values", None) or {})}
    values |= dict(getattr(statement, "_ordered_values", None) or ())
    for value in values.values():
        element = value.__clause_element__() if hasattr(value, "__clause_element__") else value
        if hasattr(element, "__visit_name__"):
            yield element


def _check_clauses(core: Any) -> None:
    if core._fetch_clause is not None:
        raise CannotCombine("FETCH over several shards is not supported", hint="Use limit().")
    for name in ("_prefixes", "_suffixes", "_hints", "_statement_hints", "_independent_ctes"):
        if getattr(core, name, None):
            raise CannotCombine(
                f"{name.strip('_').replace('_', ' ')} of a SELECT over several shards", hint=IN_PYTHON
            )


def _check_rows(core: Any, scope: Scope, *, top: bool) -> None:
    """Refuses what is computed over more rows than those of one shard."""
    if not top and (core._limit_clause is not None or core._offset_clause is not None):
        _refuse_subquery(scope)
    if core._group_by_clauses:
        if not scope.tells_shard(core._group_by_clauses):
            raise CannotCombine(
                "GROUP BY over several shards would give a group for each shard",
                hint="Group by the sharding key or an ID that is never NULL, or add the groups up in Python.",
            )
    elif core._having_criteria:
        raise CannotCombine(
            "HAVING over several shards would see one shard at a time", hint="Group by an ID."
        )
    distinct = list(core._distinct_on) or (list(core.inner_columns) if core._distinct else [])
    if distinct and not scope.tells_shard(distinct):
        raise CannotCombine(
            "DISTINCT over several shards would be distinct within each shard",
            hint="Select the sharding key or an ID that is never NULL too, or make a set() of the rows.",
        )


def _refuse_subquery(scope: Scope) -> NoReturn:
    names = ", ".join(dict.fromkeys(source.name for source in scope.sources.values())) or "nothing"
    raise CannotCombine(
        f"the subquery on {names} would give another answer in each shard",
        hint="Bind it to the row around it by an ID or a sharding key; or execute it first, and put its"
        " result into the statement; or name the shard.",
    )
