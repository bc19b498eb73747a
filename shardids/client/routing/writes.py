"""Writes rows, each into its shard: INSERT, UPDATE by keys, association tables, and in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from sqlalchemy import ClauseElement, Connection, CursorResult, Executable, Insert, Result, insert, inspect
from sqlalchemy.orm import Mapper, ORMExecuteState

from shardids.client.routing.claiming import Claiming
from shardids.client.routing.criteria import Read, Reading, rows_in_values
from shardids.client.routing.models import ModelFacts, ShardFinder, Tells, default_key, facts_of
from shardids.client.routing.placing import set_default_key, shard_of_object, shown_value
from shardids.client.routing.statements import Router, Shards, asked, check_of
from shardids.errors import BadArgument, ShardidsError, WrongShard


class ShardConnection:
    """A node's connection as the flush of one shard's objects sees it.

    What it executes has the shard's ``schema_translate_map``; all else is the node's connection's own.
    SQLAlchemy puts rows whose connections are equal into one INSERT, so two of these are equal only if their
    shards are.
    """

    __slots__ = ("_connection", "_options")

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._connection = connection
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardConnection)
            and self._connection is other._connection
            and self._options == other._options
        )

    def __hash__(self) -> int:
        return hash(self._connection)

    def execute(
        self,
        statement: Executable,
        parameters: Any = None,
        *,
        execution_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """As :meth:`sqlalchemy.Connection.execute`, in the shard."""
        options = {**(execution_options or {}), **self._options}
        return self._connection.execute(statement, parameters, execution_options=options)

    def scalar(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalar`, in the shard."""
        return self.execute(statement, parameters, **options).scalar()

    def scalars(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalars`, in the shard."""
        return self.execute(statement, parameters, **options).scalars()


_BESIDE: Final = "the session or bind_arguments"
"""What names a shard beside the statement."""


def insert_rows(router: Router, context: ORMExecuteState, only: int | None) -> Result[Any]:
    """Inserts each row into its shard; ``only`` is the shard that was named beside the statement.

    Raises:
        WrongShard: a row of two shards, or of another shard than ``only``.
        BadArgument: nothing tells a row's shard, or an ID is of no shard of this cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    if only is None and context.statement.select is not None:  # type: ignore[attr-defined]  # of an INSERT
        return _insert_selected(router, context)
    statement, given = _one_row_a_time(context)
    by_shard: dict[int, list[int]] = defaultdict(list)
    read = Read(statement, given, router.shards)
    given = _with_default_keys(context, given)
    for number, row in enumerate(rows_of(statement, read, given)):
        by_shard[shard_of_row(row, read.reading, router.shards, only)].append(number)

    def into(shard: int) -> Result[Any]:
        mine = [given[n] for n in by_shard[shard]] if isinstance(given, Sequence) else given
        with router.inserting(shard):
            options = context.local_execution_options
            return context.session.execute(statement, mine, execution_options=options)

    results = router.in_each(by_shard, into)
    if len(results) > 1 and len(context.statement.exported_columns):  # type: ignore[attr-defined]  # RETURNING
        return _in_order_of(list(by_shard.values()), results)
    return _merged(results)


def _insert_selected(router: Router, context: ORMExecuteState) -> Result[Any]:
    """INSERT … SELECT in each shard, of rows that are of that shard.

    Raises:
        BadArgument: nothing shows that the rows are of the shards that they are read in.
        CannotCombine: the SELECT reads rows of several shards for one row, or computes over them.
    """
    statement: Any = context.statement
    telling = Read(statement, None, router.shards).reading.telling
    check = check_of(router, statement.select)
    check.select()
    found = []
    for name, column in zip(statement._select_names, statement.select.selected_columns, strict=True):
        if name in telling:
            source, trait = check.top.trait(column) or (None, None)
            if not (source and trait and trait.required and trait.tells and source.located) or not (
                trait.tells.alike(telling[name], by_table=router.shards.old_ids is not None)
            ):
                raise BadArgument(
                    f"INSERT … SELECT over several shards: nothing says that {name} of {statement.table.name}"
                    " is of the shard of the row that is read",
                    hint="Select an ID or a sharding key for it; or select the rows, and insert them.",
                )
            found.append(name)
    if not found:
        raise BadArgument(
            f"nothing names the shard of a row of {statement.table.name} in INSERT … SELECT",
            hint=f'Select one of {", ".join(telling)}, or name the shard: bind_arguments={{"shard_id": n}}.',
        )
    shards = asked(router, context, Read(statement.select, context.parameters, router.shards).named())

    def into(shard: int) -> Result[Any]:
        with router.inserting(shard):
            options = {**context.local_execution_options, "preserve_rowcount": True}
            return context.session.execute(statement, context.parameters, execution_options=options)

    return _merged(router.in_each(shards, into))


def update_by_key(router: Router, context: ORMExecuteState) -> Result[Any]:
    """UPDATE of rows that are given by their primary keys, each in its shard. Raises as that does."""
    given: Any = context.parameters
    read = Read(context.statement, None, router.shards)
    by_shard: dict[int, list[Any]] = defaultdict(list)
    for row in given:
        by_shard[shard_of_row(row, read.reading, router.shards, None)].append(row)

    def into(shard: int) -> Result[Any]:
        with router.writing_to(shard):
            return context.session.execute(
                context.statement,
                by_shard[shard],
                execution_options=context.local_execution_options,
                bind_arguments={"shard_id": shard},
            )

    return _merged(router.in_each(by_shard, into))


def _merged(results: list[Result[Any]]) -> Result[Any]:
    several = len(results) > 1 and isinstance(results[0], CursorResult)
    return results[0].merge(*results[1:]) if several else results[0]


def _with_default_keys(context: ORMExecuteState, given: Any) -> Any:
    mapper = context.bind_mapper
    if not isinstance(mapper, Mapper) or not given:
        return given
    facts = facts_of(mapper)
    if facts.key_column is None or facts.key_column.default is None:
        return given
    rows = [dict(row) for row in given] if isinstance(given, Sequence) else [dict(given)]
    for row in rows:
        with_default_key(facts, row)
    return rows if isinstance(given, Sequence) else rows[0]


def with_default_key(facts: ModelFacts, row: dict[str, Any]) -> None:
    """Gives a row without a sharding key the one that its default in Python makes."""
    column, key = facts.key_column, str(facts.key)
    if column is not None and column.default is not None and not (key in row or column.key in row):
        row[key] = default_key(column)


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
    rows = rows_in_values(statement)
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


def rows_of(statement: Any, read: Read, given: Any) -> Sequence[Mapping[str, Any]]:
    """Returns the rows that an INSERT or UPDATE writes, as far as they are known."""
    written = read.written()
    several = rows_in_values(statement)
    if several:
        return [
            {name: value for name, value in row.items() if not isinstance(value, ClauseElement)}
            for row in several
        ]
    if isinstance(given, Mapping) and given:
        return [{**written, **given}]
    if isinstance(given, Sequence) and given:
        return [{**written, **row} for row in given] if written else given
    return [written]


def shard_of_row(row: Mapping[str, Any], reading: Reading, finder: ShardFinder, only: int | None) -> int:
    """Returns the shard of a row; ``only`` is the one that was named beside it. Raises as that does."""
    return shard_told(row, reading.telling, reading.name, finder, only=only)


def shard_told(
    row: Mapping[str, Any], telling: Mapping[str, Tells], name: str, finder: ShardFinder, *, only: int | None
) -> int:
    """Returns the shard that a row of the table or model of that name tells. Raises as that does."""
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


class Writer(Protocol):
    """What is needed of the session over all shards."""

    @property
    def shards(self) -> ShardFinder:
        """Who knows the shards of IDs and keys."""

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""


class Matched:
    """How many rows the shards say that they changed."""

    def __init__(self, results: Iterable[Any]) -> None:
        found = list(results)
        self.rowcount = sum(result.rowcount for result in found)
        self._is_sane = all(result.supports_sane_multi_rowcount() for result in found)

    def supports_sane_multi_rowcount(self) -> bool:
        """Returns whether the count can be relied on."""
        return self._is_sane


class AssociationConnection:
    """What a flush writes the rows of association tables over: each into the shard that its keys name."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def execute(self, statement: Any, rows: Sequence[Mapping[str, Any]]) -> Matched:
        """Executes an INSERT, UPDATE or DELETE of rows of an association table.

        Raises:
            WrongShard: the keys of a row name two shards.
            BadArgument: they name none.
        """
        by_shard: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            by_shard[self._shard_of(statement, row)].append(row)
        return Matched(
            ShardConnection(self._writer.node_connection(shard), self._writer.options_of(shard)).execute(
                statement, of_shard
            )
            for shard, of_shard in by_shard.items()
        )

    def _shard_of(self, statement: Any, row: Mapping[str, Any]) -> int:
        read = Read(statement, row, self._writer.shards)
        if isinstance(statement, Insert):
            return shard_of_row(row, read.reading, self._writer.shards, None)
        named = read.named().shards
        if named is None or len(named) != 1:
            raise BadArgument(
                f"the keys of a row of {statement.table.name} do not name one shard",
                hint="Each row of an association table lives where the objects are that it connects: make"
                " its columns foreign keys to their IDs.",
            )
        return next(iter(named))


class BulkWrites(Claiming):
    """Bulk operations of a session over all shards."""

    shards: Shards
    _writing: int | None = None
    _inserting: int | None = None

    def bulk_save_objects(self, objects: Any, *arguments: Any, **options: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_save_objects`, each object into its shard."""
        for shard, some in objects_by_shard(objects, self.shards).items():
            with self.writing_to(shard):
                super().bulk_save_objects(some, *arguments, **options)
            self.claim_objects(some, shard)

    def bulk_insert_mappings(self, mapper: Any, mappings: Any, *arguments: Any, **options: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_insert_mappings`, each row into its shard."""
        for shard, some in mappings_by_shard(inspect(mapper).mapper, mappings, self.shards).items():
            with self.writing_to(shard):
                super().bulk_insert_mappings(mapper, some, *arguments, **options)
            self.claim_rows(inspect(mapper).mapper, some, shard, are_new=True)

    def bulk_update_mappings(self, mapper: Any, mappings: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_update_mappings`, each row in its shard."""
        for shard, some in mappings_by_shard(inspect(mapper).mapper, mappings, self.shards).items():
            with self.writing_to(shard):
                super().bulk_update_mappings(mapper, some)
            self.claim_rows(inspect(mapper).mapper, some, shard, are_new=False)

    @contextmanager
    def writing_to(self, shard: int) -> Iterator[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""
        self._writing = shard
        try:
            yield
        finally:
            self._writing = None

    @contextmanager
    def inserting(self, shard: int) -> Iterator[None]:
        """While rows are inserted into one shard, not objects into any."""
        self._inserting = shard
        try:
            yield
        finally:
            self._inserting = None


def objects_by_shard(objects: Iterable[object], finder: ShardFinder) -> dict[int, list[object]]:
    """Returns the objects of a bulk operation by their shards. Relationships, not written, don't count.

    Raises:
        BadArgument: nothing tells an object's shard, or an ID is of no shard of the cluster.
        WrongShard: two things tell different ones.
        UnsupportedKey: a sharding key that has no hash.
    """
    by_shard: dict[int, list[object]] = defaultdict(list)
    for one in objects:
        state = inspect(one)
        set_default_key(state)
        by_shard[shard_of_object(state, finder)].append(one)
    return by_shard


def mappings_by_shard(
    mapper: Mapper[Any], rows: Iterable[dict[str, Any]], finder: ShardFinder
) -> dict[int, list[dict[str, Any]]]:
    """Returns the rows of a bulk operation by their shards. Raises as :func:`objects_by_shard` does."""
    reading = Read(insert(mapper), None, finder).reading
    by_shard: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        with_default_key(facts_of(mapper), row)
        by_shard[shard_of_row(row, reading, finder, None)].append(row)
    return by_shard
