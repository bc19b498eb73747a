"""Writes of rows, each into its shard: INSERT, UPDATE by keys, association tables, and in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from sqlalchemy import BindParameter, ClauseElement, Column, CursorResult, Insert, Result, SelectBase, Table
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
from sqlalchemy.orm import ORMExecuteState
from sqlalchemy.sql import visitors

from shardids.client.routing.criteria import Read, rows_in_values
from shardids.client.routing.models import (
    ShardFinder,
    Tells,
    default_key,
    facts_of,
    is_sharding_key,
    mapper_written,
)
from shardids.client.routing.nodes import NodeSession, everywhere
from shardids.client.routing.placing import shown_value
from shardids.client.routing.sent import clauses_of, part_of, with_parts
from shardids.client.routing.shapes import refuse_subquery
from shardids.client.routing.statements import Execution
from shardids.errors import BadArgument, CannotCombine, ShardidsError, WrongShard

_BESIDE: Final = "the session or bind_arguments"
"""What names a shard beside the statement."""


def insert_rows(context: ORMExecuteState, only: int | None) -> Result[Any]:
    """Insert each row into its shard; ``only`` is the shard that was named beside the statement.

    Raises:
        WrongShard: a row of two shards, or of another shard than ``only``.
        BadArgument: nothing determines a row's shard, or an ID is of no shard of this cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    session: NodeSession = context.session  # type: ignore[assignment]  # it is one
    statement: Any = context.statement
    if only is None and statement.select is not None:
        return _insert_selected(context, session, statement)
    given: Any = context.parameters
    if not given and (rows := rows_in_values(statement)):
        statement, given = _one_row_a_time(statement, rows), rows
    given = keyed(statement, given)
    read = Read(statement, given, session.shards)
    by_shard: dict[int, list[int]] = defaultdict(list)
    for number, values in enumerate(read.rows(given)):
        by_shard[shard_of_row(values, read, only)].append(number)

    def into(shard: int) -> Result[Any]:
        mine = [given[n] for n in by_shard[shard]] if isinstance(given, Sequence) else given
        with session.inserting(shard):
            return session.execute(statement, mine, execution_options=context.local_execution_options)

    if only is None:
        _require_known_keys(statement, read, by_shard)
    if only is None and read.reading.selects:
        require_own_rows(statement.get_children(), given, session, by_shard)
    results = session.in_each(by_shard, into)
    if len(results) > 1 and len(statement.exported_columns):
        return _in_order_of(list(by_shard.values()), results)
    merged: Any = _merged(results)
    if not hasattr(merged, "rowcount"):
        merged.rowcount = -1  # As the driver counts several rows.
    return merged  # type: ignore[no-any-return]  # a result


def _require_known_keys(statement: Any, read: Read, shards: Collection[int]) -> None:
    """Refuse sharding keys that would be of another shard than their rows, which nobody would find by them.

    Raises:
        BadArgument: SQL computes one.
        WrongShard: ON CONFLICT sets one that is of another shard.
    """
    reading, conflict = read.reading, part_of(statement, "post_values_clause")
    if reading.computed:
        raise computed_key(reading.computed, f"a row of {reading.name}")
    if not isinstance(conflict, OnConflictDoUpdate):
        return
    for column, value in dict(conflict.update_values_to_set).items():
        name = str(getattr(column, "key", column))
        if name in reading.keys and not (isinstance(value, Column) and value.key == name):
            if not (isinstance(value, BindParameter) and value.unique):
                raise computed_key(name, f"a row of {reading.name}")
            given = value.effective_value
            there = reading.telling[name].shard(given, read.finder)
            if {*shards} != {there}:
                raise WrongShard(
                    f"ON CONFLICT sets {name} of a row of {reading.name} to {shown_value(given)},"
                    f" which names shard {there}, and the row is in another",
                    hint=f"Leave out {name}, or set it to excluded.{name}. Nothing was written.",
                )


def computed_key(key: str, of: str) -> BadArgument:
    """Return the error for a sharding key that SQL computes."""
    return BadArgument(
        f"the sharding key {key} of {of} is an SQL expression, whose shard is not known before it is written",
        hint="Give the value itself; or name the shard: session.execute(insert(…), …,"
        ' bind_arguments={"shard_id": number}).',
    )


def require_own_rows(
    written: Iterable[Any], given: Any, session: NodeSession, shards: Collection[int]
) -> None:
    """Refuse SELECTs in values to write that read other rows than those of the only shard.

    Raises:
        CannotCombine: there is one that neither names that shard nor reads reference tables only.
    """
    for part in written:
        for select in _selects(part):
            read, dialect = Read(select, given, session.shards), session.engine_of(min(shards)).dialect
            # SQLAlchemy writes no schema there.
            is_left_out = isinstance(part, OnConflictDoUpdate)
            if not is_left_out and len(shards) == 1 and read.named().shards == frozenset(shards):
                read.in_one_shard(lambda dialect=dialect: dialect)  # type: ignore[misc]  # a dialect
            elif is_left_out or not read.of_references(lambda dialect=dialect: dialect):  # type: ignore[misc]
                refuse_subquery(one.name for one in visitors.iterate(select) if isinstance(one, Table))


def sql_of(value: Any) -> ClauseElement | None:
    """Return the element of SQL that a value to write is; ``None`` if it is a value of Python."""
    if not _is_sql(type(value)):  # type: ignore[arg-type]  # a class can be hashed
        return None
    element: ClauseElement = value if isinstance(value, ClauseElement) else value.__clause_element__()
    return element


@lru_cache(500)
def _is_sql(type_: type) -> bool:
    return issubclass(type_, ClauseElement) or hasattr(type_, "__clause_element__")


def _selects(element: Any) -> Iterator[Any]:
    """Yield the outermost SELECTs in an element of SQL."""
    if isinstance(element, SelectBase):
        yield element
    elif isinstance(element, OnConflictDoUpdate):
        # SQLAlchemy 2.0 does not give them as its children.
        values = (*dict(element.update_values_to_set).values(), element.update_whereclause)
        yield from chain.from_iterable(_selects(one) for one in values if isinstance(one, ClauseElement))
    else:
        yield from chain.from_iterable(map(_selects, element.get_children()))


def _insert_selected(context: ORMExecuteState, session: NodeSession, statement: Any) -> Result[Any]:
    """INSERT … SELECT in each shard, of rows that are of that shard.

    Raises:
        BadArgument: nothing shows that the rows are of the shards that they are read in.
        CannotCombine: the SELECT reads rows of several shards for one row, or computes over them.
    """
    execution = Execution(context)
    read = Read(statement, None, session.shards)
    telling = read.reading.telling
    check = execution.check(statement.select)
    check.select()
    found = []
    names = part_of(statement, "select_names")
    missing = [
        one.key
        for one in statement.table.columns
        if is_sharding_key(one) and one.default and one.key not in names
    ]
    if missing:
        raise BadArgument(
            f"INSERT … SELECT over several shards would give one {missing[0]} to the rows of all shards",
            hint="Select it.",
        )
    for name, column in zip(names, statement.select.selected_columns, strict=True):
        if name in telling:
            source, trait = check.top.trait(column) or (None, None)
            if not (source and trait and trait.required and trait.tells and source.located) or not (
                trait.tells.alike(telling[name], by_table=session.shards.old_ids is not None)
            ):
                raise BadArgument(
                    f"INSERT … SELECT over several shards: {name} of {statement.table.name} may belong to"
                    " another shard than the selected row",
                    hint="Select an ID or a sharding key for it; or select the rows, and insert them.",
                )
            found.append(name)
    if not found:
        raise BadArgument(
            f"cannot determine the shard of a row of {statement.table.name} in INSERT … SELECT",
            hint=f'Select one of {", ".join(telling)}, or name the shard: bind_arguments={{"shard_id": n}}.',
        )
    named = Read(statement.select, context.parameters, session.shards).named()
    shards = execution.asked(named)
    if len(shards) > 1 and clauses_of(statement.select).are_cut:
        raise CannotCombine(
            f"INSERT … SELECT into {statement.table.name} concerns {len(shards)} shards, and each would apply"
            " its LIMIT or OFFSET",
            hint="Select the limited IDs first, and insert the rows that have them: where(….in_(ids)).",
        )
    _require_known_keys(statement, read, shards)
    beside = [one for one in statement.get_children() if one is not statement.select]
    require_own_rows(beside, context.parameters, session, shards)

    def into(shard: int) -> Result[Any]:
        with session.inserting(shard):
            options = {**context.local_execution_options, "preserve_rowcount": True}
            return session.execute(statement, context.parameters, execution_options=options)

    results = execution.in_each(named, shards, into)
    return _in_order_of([], results) if len(statement.exported_columns) else _merged(results)


def update_by_key(context: ORMExecuteState) -> Result[Any]:
    """UPDATE of rows that are given by their primary keys, each in its shard. Raises as insert_rows()."""
    session: NodeSession = context.session  # type: ignore[assignment]  # it is one
    read = Read(context.statement, None, session.shards)
    by_shard: dict[int, list[Any]] = defaultdict(list)
    if read.reading.selects:
        require_own_rows(
            [context.statement], None, session, everywhere(session.shards, session.settled()).shards
        )
    for row in context.parameters or ():
        by_shard[shard_of_row(row, read, None)].append(row)  # type: ignore[arg-type]  # a mapping

    def into(shard: int) -> Result[Any]:
        with session.writing_to(shard):
            return session.execute(
                context.statement,
                by_shard[shard],
                execution_options=context.local_execution_options,
                bind_arguments={"shard_id": shard},
            )

    return _merged(session.in_each(by_shard, into))


def _merged(results: list[Result[Any]]) -> Result[Any]:
    several = len(results) > 1 and isinstance(results[0], CursorResult)
    return results[0].merge(*results[1:]) if several else results[0]


def keyed(statement: Any, given: Any) -> Any:
    """Return the rows of an INSERT with the sharding keys that the default of the column makes in Python."""
    mapper = mapper_written(statement) if given and isinstance(statement, Insert) else None
    column = None if mapper is None else facts_of(mapper).key_column
    if mapper is None or column is None or column.default is None:
        return given
    names = {column.key, key := str(facts_of(mapper).key)}
    rows = given if isinstance(given, Sequence) else [given]
    rows = [{**row, key: default_key(column)} if names.isdisjoint(row) else row for row in rows]
    return rows if isinstance(given, Sequence) else rows[0]


def _in_order_of(numbers: list[list[int]], results: list[Result[Any]]) -> Result[Any]:
    """Return the returned rows in the order of the rows that were given, where there is one for each."""
    frozen = [result.freeze() for result in results]
    rows = [row for one in frozen for row in one().all()]
    order = [number for of_shard in numbers for number in of_shard]
    if len(order) == len(rows):
        rows = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
    return frozen[0].with_new_rows(rows)()


def _one_row_a_time(statement: Any, rows: list[dict[str, Any]]) -> Any:
    """Return an INSERT without the rows of ``values([…])``, which become its parameters.

    Raises:
        BadArgument: one of several rows has an SQL expression.
    """
    if any(sql_of(value) is not None for row in rows for value in row.values()):
        raise BadArgument(
            "values([…]) with an SQL expression can't be sent to several shards",
            hint='Insert these rows one by one, or name the shard: bind_arguments={"shard_id": number}.',
        )
    return with_parts(statement, multi_values=())


def shard_of_row(row: Mapping[str, Any], read: Read, only: int | None) -> int:
    """Return the shard of a row; ``only`` is the one that was named beside it. Raises as insert_rows()."""
    return shard_told(row, read.reading.telling, read.reading.name, read.finder, only=only)


def shard_told(
    row: Mapping[str, Any], telling: Mapping[str, Tells], name: str, finder: ShardFinder, *, only: int | None
) -> int:
    """Return the shard that a row of the table or model of that name tells. Raises as insert_rows()."""
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
        f"cannot determine the shard of a row of {name}",
        hint=f"Give one of {', '.join(telling) or 'sharding_key() or primary_key()'}, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )


class _Matched:
    """The number of rows that the shards report as changed."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.rowcount = sum(result.rowcount for result in results)
        self._is_sane = all(result.supports_sane_multi_rowcount() for result in results)

    def supports_sane_multi_rowcount(self) -> bool:
        """Return whether the count can be relied on."""
        return self._is_sane


class AssociationConnection:
    """A connection for the rows of association tables in a flush: each into the shard that its keys name."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session

    def execute(self, statement: Any, rows: Sequence[Mapping[str, Any]]) -> _Matched:
        """Execute an INSERT, UPDATE or DELETE of rows of an association table.

        Raises:
            WrongShard: the keys of a row name two shards.
            BadArgument: they name none.
        """
        by_shard: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            by_shard[self._shard_of(statement, row)].append(row)
        connect = self._session.shard_connection
        return _Matched([connect(shard).execute(statement, some) for shard, some in by_shard.items()])

    def _shard_of(self, statement: Any, row: Mapping[str, Any]) -> int:
        read = Read(statement, row, self._session.shards)
        if isinstance(statement, Insert):
            return shard_of_row(row, read, None)
        named = read.named().shards
        if named is None or len(named) != 1:
            raise BadArgument(
                f"the keys of a row of {statement.table.name} do not name one shard",
                hint="Each row of an association table lives where the objects are that it connects: make"
                " its columns foreign keys to their IDs.",
            )
        return next(iter(named))
