"""How the answers of several shards to one SELECT become one answer, or why they can't."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Column, Select, TableClause
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import FunctionFilter, Label, Over, UnaryExpression
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import CTE, Exists, Join, Subquery

from shardids.client.routing.models import how_it_tells
from shardids.client.routing.order import OrderKey, check_sortable, order_keys
from shardids.errors import CannotCombine

_MERGEABLE = ("count", "sum", "min", "max")
_AGGREGATES = {
    *_MERGEABLE,
    *("avg", "array_agg", "string_agg", "bool_and", "bool_or", "every", "bit_and", "bit_or", "bit_xor"),
    *("any_value", "json_agg", "jsonb_agg", "json_object_agg", "jsonb_object_agg", "xmlagg", "range_agg"),
    *("stddev", "stddev_pop", "stddev_samp", "variance", "var_pop", "var_samp", "corr", "aggregate_strings"),
    *("mode", "percentile_cont", "percentile_disc", "rank", "dense_rank", "percent_rank", "cume_dist"),
}

Fold = Callable[[list[Any]], Any]
"""Makes one value of those of all shards; NULLs are left out, and of none it makes NULL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to combine.

    Attributes:
        branch: the statement for each shard: all rows that can be among the first ``offset + limit``.
        keys: what to merge rows by; none if any order does.
        limit, offset: applied to the merged rows.
        folds: for a statement of aggregates, how to fold each column's values; otherwise empty.
        locks: whether it locks rows, which PostgreSQL can't do in a UNION.
    """

    branch: Select[Any]
    keys: tuple[OrderKey, ...]
    limit: int | None
    offset: int
    folds: tuple[Fold, ...]
    locks: bool


KEY_NAME = "shardids_key_{}"
"""The name of a column that a branch has for merging only."""


def plan(statement: Any, parameters: Any, *, several_nodes: bool) -> Plan:
    """Plans a SELECT that asks several shards.

    Args:
        statement: as the application gave it.
        parameters: given beside it.
        several_nodes: whether rows of different servers are to be merged, which Python has to compare.

    Raises:
        CannotCombine: the shards' answers can't be combined, or not by Python; the hint says what to do.
    """
    if not isinstance(statement, Select):
        raise CannotCombine(
            f"a {type(statement).__name__} can't be sent to several shards",
            hint="Name the shard: bind_arguments={'shard_id': number}; or write one select() a part.",
        )
    # Applications have no public way to read these parts of a SELECT; dialects read them by these names.
    keys = tuple(order_keys(statement))
    limit = _number(statement._limit_clause, parameters, "LIMIT")
    offset = _number(statement._offset_clause, parameters, "OFFSET") or 0
    if not check_subqueries(statement):
        raise CannotCombine(
            "the statement names no table, and so no shard",
            hint="Name the shard: bind_arguments={'shard_id': number}",
        )
    folds = _folds(statement)
    if folds:
        # One row a shard, and one in the end: there is nothing to sort or to skip.
        keys, statement = (), statement.order_by(None)
    if statement._fetch_clause is not None:
        raise CannotCombine("FETCH over several shards is not supported", hint="Use limit().")
    if offset and not keys:
        raise CannotCombine("OFFSET over several shards needs an order", hint="Add order_by().")
    if several_nodes:
        for key in keys:
            check_sortable(key.expression)
    branch = statement
    if offset:
        branch = branch.limit(None if limit is None else limit + offset).offset(None)
    branch = branch.add_columns(*(key.expression.label(KEY_NAME.format(n)) for n, key in enumerate(keys)))
    return Plan(
        branch=branch,
        keys=keys,
        limit=limit,
        offset=offset,
        folds=folds,
        locks=statement._for_update_arg is not None,
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


# What is computed over rows.


def _folds(statement: Select[Any]) -> tuple[Fold, ...]:
    """Returns how the columns of a statement of aggregates fold; empty if it has none."""
    columns = list(statement.inner_columns)
    if not (statement._group_by_clauses or _is_distinct(statement)) and all(
        isinstance(column, Column) for column in columns
    ):
        return ()
    if any(isinstance(e, Over) and not _tells_shard(_partition(e)) for c in columns for e in _inside(c)):
        raise CannotCombine(
            "a window over several shards would see one shard at a time",
            hint="Partition it by the sharding key or an ID, or compute it in Python.",
        )
    if statement._group_by_clauses:
        if not _tells_shard(statement._group_by_clauses):
            raise CannotCombine(
                "GROUP BY over several shards would give a group for each shard",
                hint="Group by the sharding key or an ID as well, or add the groups up in Python.",
            )
        return ()
    folds = [_fold(column) for column in columns]
    if all(fold is not None for fold in folds) and folds:
        if statement._having_criteria:
            raise CannotCombine("HAVING over several shards would see one shard at a time")
        return tuple(fold for fold in folds if fold is not None)
    for column in columns:
        if _is_aggregate(column):
            raise CannotCombine(
                f"{column} over several shards can't be made of the shards' own",
                hint="count(), sum(), min(), max() and exists() can, alone in their columns: select sum() and"
                " count() for an average, and the distinct values to count them.",
            )
    if _is_distinct(statement) and not _tells_shard(_distinct_by(statement)):
        raise CannotCombine(
            "DISTINCT over several shards would be distinct within each shard",
            hint="Select the sharding key or an ID too, or make a set() of the rows in Python.",
        )
    return ()


def _fold(column: Any) -> Fold | None:
    """Returns how the shards' values of an aggregate combine; ``None`` if they cannot."""
    element = column.element if isinstance(column, Label) else column
    negated = False
    while isinstance(element, UnaryExpression) and element.operator is operators.inv:
        element, negated = element.element, not negated
        element = getattr(element, "element", element) if element.__visit_name__ == "grouping" else element
    if isinstance(element, Exists):
        return all if negated else any
    if isinstance(element, FunctionFilter):
        element = element.func
    if negated or not isinstance(element, FunctionElement):
        return None
    name, arguments = _name(element), list(element.clauses)
    repeated = any(getattr(one, "operator", None) is operators.distinct_op for one in arguments)
    if name not in _MERGEABLE or (repeated and name not in ("min", "max")):
        return None
    if name in ("count", "sum"):
        return _total
    for one in arguments:
        check_sortable(one)
    return min if name == "min" else max


def _total(values: list[Any]) -> Any:
    return sum(values[1:], values[0])


def _name(function: Any) -> str:
    return str(getattr(function, "name", "")).lower()


def _is_aggregate(element: Any) -> bool:
    return any(isinstance(e, FunctionElement) and _name(e) in _AGGREGATES for e in _inside(element))


def _inside(element: Any) -> Iterator[Any]:
    """Returns an expression's parts, without those of subqueries."""
    yield element
    for child in element.get_children():
        if not isinstance(child, Select) and child.__visit_name__ not in ("select", "subquery", "table"):
            yield from _inside(child)


def _partition(over: Over[Any]) -> list[Any]:
    return list(over.partition_by.clauses) if over.partition_by is not None else []


def _is_distinct(statement: Any) -> bool:
    return bool(statement._distinct)


def _distinct_by(statement: Any) -> Sequence[Any]:
    return list(statement._distinct_on) or list(statement.inner_columns)


def _tells_shard(columns: Iterable[Any]) -> bool:
    """Returns whether rows of two shards always differ in one of the columns."""
    for column in columns:
        element = column.element if isinstance(column, Label) else column
        bases = list(element.base_columns)
        if len(bases) == 1 and how_it_tells(bases[0]) is not None:
            return True
    return False


def check_subqueries(statement: Any) -> bool:
    """Refuses a subquery that stands for itself and would be another in each shard.

    Returns:
        whether there is a table in the statement at all.

    Raises:
        CannotCombine: there is such a subquery.
    """
    parts = list(visitors.iterate(statement))[1:]
    has_table = any(isinstance(part, TableClause) for part in parts)
    subqueries = [part for part in parts if isinstance(part, Select)]
    if not subqueries:
        return has_table
    tables = {part.element for part in parts if isinstance(part, Subquery | CTE)}
    around = _sources(statement) if isinstance(statement, Select) else {statement.table}
    for part in subqueries:
        limited = part._limit_clause is not None or part._offset_clause is not None
        computed = any(map(_is_aggregate, part.inner_columns)) and not _tells_shard(part._group_by_clauses)
        repeated = _is_distinct(part) and not _tells_shard(_distinct_by(part))
        if (limited or computed or repeated) and (part in tables or not _is_correlated(part, around)):
            raise CannotCombine(
                f"the subquery on {', '.join(tables_of(part))} would give another answer in each shard",
                hint="Execute it first, and put its result into the statement; or name the shard.",
            )
    return has_table


def _is_correlated(subquery: Select[Any], around: set[Any]) -> bool:
    """Returns whether it refers to the rows around it, as SQLAlchemy sees it: by a table that both have."""
    own = _sources(subquery)
    return bool(own & around) and bool(own - around)


def _sources(statement: Select[Any]) -> set[Any]:
    found: set[Any] = set()
    todo = list(statement.get_final_froms())
    while todo:
        source = todo.pop()
        if isinstance(source, Join):
            todo += [source.left, source.right]
        else:
            found.add(source)
    return found
