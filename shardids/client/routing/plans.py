"""How the answers of several shards to one SELECT become one answer: in which order, how many, folded how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Column, Select, TableClause
from sqlalchemy.sql import visitors

from shardids.client.routing.folds import Fold, fold_of
from shardids.client.routing.order import OrderKey, check_sortable, order_keys
from shardids.errors import CannotCombine


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
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


def plan(statement: Any, parameters: Any, *, in_python: bool) -> MergePlan:
    """Plans a SELECT that asks several shards; whether its shape is right is for :mod:`shapes` to say.

    Args:
        statement: as the application gave it.
        parameters: given beside it.
        in_python: whether Python has to compare rows, as it does with those of several servers.

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
    keys = tuple(order_keys(statement))
    limit = _number(statement._limit_clause, parameters, "LIMIT")
    offset = _number(statement._offset_clause, parameters, "OFFSET") or 0
    folds = _folds(statement)
    if folds:
        # One row a shard, and one in the end: there is nothing to sort, and limits are for that one.
        keys, branch = (), statement.order_by(None).limit(None).offset(None)
    else:
        branch = _branch(statement, keys, limit, offset, in_python=in_python)
    return MergePlan(
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


def _branch(
    statement: Select[Any], keys: tuple[OrderKey, ...], limit: int | None, offset: int, *, in_python: bool
) -> Select[Any]:
    if offset and not keys:
        raise CannotCombine("OFFSET over several shards needs an order", hint="Add order_by().")
    for key in keys:
        # Each shard has an enum of its own: PostgreSQL merges their values as text.
        if in_python or getattr(key.expression.type, "native_enum", False):
            check_sortable(key.expression)
    branch = statement
    if offset:
        branch = branch.limit(None if limit is None else limit + offset).offset(None)
    return branch.add_columns(*(key.expression.label(KEY_NAME.format(n)) for n, key in enumerate(keys)))


def _number(clause: Any, parameters: Any, what: str) -> int | None:
    if clause is None:
        return None
    value = None
    if isinstance(clause, BindParameter):
        value = (parameters or {}).get(clause.key, clause.effective_value)
    if not isinstance(value, int):
        raise CannotCombine(f"{what} over several shards must be a number, not an expression")
    return value


def _folds(statement: Select[Any]) -> tuple[Fold, ...]:
    """Returns how the columns of a statement of aggregates fold; empty if it is none."""
    if statement._group_by_clauses or statement._distinct:
        return ()
    folds = []
    for column in statement.inner_columns:
        fold = None if isinstance(column, Column) else fold_of(column)
        if fold is None:
            return ()
        folds.append(fold)
    return tuple(folds)
