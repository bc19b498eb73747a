"""Inserts rows, each into its shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ClauseElement, CursorResult, Result
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Mapper, ORMExecuteState

from shardids.client.routing.models import ShardFinder, Tells, default_key, facts_of, how_it_tells
from shardids.client.routing.placing import shown_value
from shardids.client.routing.statements import Router
from shardids.errors import BadArgument, ShardidsError, WrongShard

_BESIDE: Final = "the session or bind_arguments"
"""What names a shard beside the statement."""


def insert(router: Router, context: ORMExecuteState, only: int | None) -> Result[Any]:
    """Inserts each row into its shard; ``only`` is the shard that was named beside the statement.

    Raises:
        WrongShard: a row of two shards, or of another shard than ``only``.
        BadArgument: nothing tells a row's shard, or an ID is of no shard of this cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    statement, given = _one_row_a_time(context)
    by_shard: dict[int, list[int]] = defaultdict(list)
    telling, name = what_tells(context)
    given = _with_default_keys(context, given)
    for number, row in enumerate(rows_of(statement, given)):
        by_shard[shard_of_row(row, telling, name, router.shards, only)].append(number)
    results = []
    for shard, numbers in by_shard.items():
        mine = [given[n] for n in numbers] if isinstance(given, Sequence) else given
        with router.inserting(shard):
            options = context.local_execution_options
            results.append(context.session.execute(statement, mine, execution_options=options))
    if len(results) == 1:
        return results[0]
    if len(context.statement.exported_columns):  # type: ignore[attr-defined]  # of an INSERT: RETURNING
        return _in_order_of(list(by_shard.values()), results)
    return results[0].merge(*results[1:]) if isinstance(results[0], CursorResult) else results[0]


def _with_default_keys(context: ORMExecuteState, given: Any) -> Any:
    """Gives rows without a sharding key the one that its default in Python makes."""
    mapper = context.bind_mapper
    facts = facts_of(mapper) if isinstance(mapper, Mapper) else None
    if facts is None or facts.key_column is None or facts.key_column.default is None or not given:
        return given
    column, key = facts.key_column, str(facts.key)

    def completed(row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row if key in row or column.key in row else {**row, key: default_key(column)}

    return list(map(completed, given)) if isinstance(given, Sequence) else completed(given)


def _in_order_of(numbers: list[list[int]], results: list[Result[Any]]) -> Result[Any]:
    """Returns the returned rows in the order of the rows that were given, where there is one for each."""
    frozen = [result.freeze() for result in results]
    rows = [row for one in frozen for row in one().all()]
    order = [number for of_shard in numbers for number in of_shard]
    if len(order) == len(rows):
        rows = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
    return frozen[0].with_new_rows(rows)()


def _one_row_a_time(context: ORMExecuteState) -> tuple[Any, Any]:
    """Returns the statement and its rows; those of ``values([…])`` become parameters.

    Raises:
        BadArgument: one of several rows has an SQL expression.
    """
    statement: Any = context.statement
    if context.parameters or not statement._multi_values:
        return statement, context.parameters
    rows = [
        {getattr(column, "key", column): value for column, value in row.items()}
        for rows in statement._multi_values
        for row in rows
    ]
    if any(
        hasattr(value, "__clause_element__") or isinstance(value, ClauseElement)
        for row in rows
        for value in row.values()
    ):
        raise BadArgument(
            "values([…]) with an SQL expression can't be sent to several shards",
            hint='Insert these rows one by one, or name the shard: bind_arguments={"shard_id": number}.',
        )
    statement = statement._generate()
    statement._multi_values = ()
    return statement, rows


def rows_of(statement: Any, given: Any) -> Sequence[Mapping[str, Any]]:
    """Returns the rows that an INSERT writes, as far as they are known."""
    if isinstance(given, Mapping) and given:
        return [given]
    if isinstance(given, Sequence) and given:
        return given
    # The dialect knows ON CONFLICT; nothing of what it writes but the values is used.
    return [statement.compile(dialect=postgresql.dialect()).params]  # type: ignore[no-untyped-call]  # there


def what_tells(context: ORMExecuteState) -> tuple[dict[str, Tells], str]:
    """Returns what in a row tells its shard, by attribute and column, and the model's name."""
    mapper = context.bind_mapper
    table = context.statement.table  # type: ignore[attr-defined]  # of an INSERT
    telling = {column.key: tells for column in table.columns if (tells := how_it_tells(column)) is not None}
    if not isinstance(mapper, Mapper):
        return telling, str(table.name)
    facts = facts_of(mapper)
    return telling | dict(facts.telling), facts.name


def shard_of_row(
    row: Mapping[str, Any], telling: Mapping[str, Tells], name: str, finder: ShardFinder, only: int | None
) -> int:
    """Returns the shard of a row; ``only`` is the one that was named beside it. Raises as :func:`insert`."""
    told = {} if only is None else {_BESIDE: only}
    for key, tells in telling.items():
        value = row.get(key)
        if value is not None:
            try:
                told[key] = tells.shard(value, finder)
            except ShardidsError as error:
                what = f"{key} {shown_value(value)} of a row of {name}: {error.message}"
                raise type(error)(what, hint=error.hint) from None
    shards = list(dict.fromkeys(told.values()))
    if len(shards) == 1:
        return shards[0]
    said = ", ".join(
        f"{key if key == _BESIDE else f'{key} {shown_value(row.get(key))}'} names shard {shard}"
        for key, shard in told.items()
    )
    if shards:
        raise WrongShard(
            f"a row of {name} would belong to two shards: {said}",
            hint="Foreign keys can't cross shards. Nothing was written.",
        )
    raise BadArgument(
        f"nothing tells the shard of a row of {name}",
        hint=f"Give one of {', '.join(telling) or 'sharding_key() or primary_key()'}, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )
