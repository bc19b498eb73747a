"""The claims of a session on the values of look-up keys that it writes: after the rows, before COMMIT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, TypeVar
from weakref import WeakSet

import psycopg
from sqlalchemy import (
    BindParameter,
    Connection,
    Engine,
    Insert,
    Update,
    event,
    insert,
    inspect,
    text,
    update,
)
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import InstanceState, Mapper, PassiveFlag, Session
from sqlalchemy.orm.attributes import get_history

from shardids.catalog.lookups import MARK
from shardids.client.routing.criteria import reading_of, rows_in_values
from shardids.client.routing.models import (
    Claimant,
    ModelFacts,
    ShardFinder,
    claimed_value,
    facts_of,
    mapper_written,
)
from shardids.client.routing.sent import assigned
from shardids.errors import BadArgument, UnknownId
from shardids.models.lookups import Lookup, lookups_are_defined, lookups_of, lookups_of_mapper

Entity = TypeVar("Entity")

_IS_CLAIMED: Final[ContextVar[bool]] = ContextVar("shardids_is_claimed", default=False)
_WAITING: Final[WeakSet[Engine]] = WeakSet()


@contextmanager
def writing() -> Iterator[None]:
    """Let the session claim the rows that are written inside, after they are written."""
    _mark_waiting()
    token = _IS_CLAIMED.set(True)
    try:
        yield
    finally:
        _IS_CLAIMED.reset(token)


def mark_writes(engine: Engine) -> None:
    """Make an engine, and all that are derived from it, mark what sessions claim.

    Until a look-up key is defined it only waits: a listener adds to the cost of each statement.
    """
    _WAITING.add(engine)
    _mark_waiting()


def _mark_waiting() -> None:
    if _WAITING and lookups_are_defined():
        for engine in list(_WAITING):
            event.listen(engine, "before_cursor_execute", _marked, retval=True)
            _WAITING.discard(engine)


def _marked(
    _connection: object, _cursor: object, sql: str, parameters: Any, context: Any, _is_many: object
) -> tuple[str, Any]:
    if _IS_CLAIMED.get() and (context.isinsert or context.isupdate):
        statement = getattr(context.compiled, "statement", None)
        if lookups_of(getattr(statement, "table", None)):
            return MARK + sql, parameters
    return sql, parameters


class Claiming(Session):
    """A session that claims the values of look-up keys that it writes."""

    claims: Claimant
    finder: ShardFinder
    is_flushing = False
    _sent_to: int | None = None
    _getting: tuple[ModelFacts, int] | None = None

    def get(self, entity: type[Entity] | Mapper[Entity], ident: Any, **options: Any) -> Entity | None:
        """Act as :meth:`sqlalchemy.orm.Session.get`, in the one shard that the primary key determines."""
        outer, self._getting = self._getting, None if options else self._told(entity, ident)
        try:
            return super().get(entity, ident, **options)
        finally:
            self._getting = outer

    def _told(self, entity: Any, ident: Any) -> tuple[ModelFacts, int] | None:
        """Return the shard that a primary key tells; ``None`` if that is to be read from the statement."""
        mapper = getattr(entity, "__mapper__", None)
        if mapper is None or isinstance(ident, dict):
            return None
        facts = facts_of(mapper)
        try:
            shard = facts.shard_of_identity(
                ident if isinstance(ident, tuple | list) else (ident,), self.finder
            )
        except UnknownId:
            return None
        return None if shard is None else (facts, shard)

    def connection_to(self, shard: int) -> Connection:
        """Return the session's connection to the node that holds a shard."""
        raise NotImplementedError

    def _shard_written(self) -> int | None:
        """Return the shard that this statement was sent to; ``None`` if its rows are claimed already."""
        return self._sent_to

    def writing_to(self, shard: int) -> AbstractContextManager[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""
        return nullcontext()

    def objects_by_shard(self, objects: Iterable[object]) -> Mapping[int, Sequence[object]]:
        """Return the objects of a bulk operation by their shards."""
        raise NotImplementedError

    # All of SQLAlchemy's ways to execute meet in it, also those that a class of the application's own adds.
    # A statement with a parent is routed already: a listener executes it.
    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        if not lookups_are_defined() or options.get("_parent_execute_state") is not None:
            return super()._execute_internal(statement, params, **options)
        _refuse_inside(statement)
        written = written_by(statement, params)
        # Executing one statement can execute others: what an autoflush calls, relationships that load.
        outer, self._sent_to = self._sent_to, None
        try:
            with writing() if written else nullcontext():
                result = super()._execute_internal(statement, params, **options)
            shard = self._shard_written()
        finally:
            self._sent_to = outer
        if shard is not None:
            self._claim_beside(written, shard)
        return result

    def flush(self, objects: Any = None) -> None:
        """Write objects, as :meth:`sqlalchemy.orm.Session.flush` does, and claim their look-up keys."""
        outer, self.is_flushing = self.is_flushing, True
        try:
            if lookups_are_defined():
                with writing():
                    super().flush(objects)
            else:
                super().flush(objects)
        finally:
            self.is_flushing = outer

    def bulk_save_objects(self, objects: Any, *arguments: Any, **options: Any) -> None:
        """Act as :meth:`sqlalchemy.orm.Session.bulk_save_objects`, each object in its shard."""
        for shard, some in self.objects_by_shard(objects).items():
            with writing(), self.writing_to(shard):
                super().bulk_save_objects(some, *arguments, **options)
            states: Iterator[InstanceState[Any]] = map(inspect, some)
            self._claim_beside((pair for one in states for pair in _written_of(one)), shard)

    def bulk_insert_mappings(
        self, mapper: Any, mappings: Any, return_defaults: bool = False, render_nulls: bool = False
    ) -> None:
        """Act as :meth:`sqlalchemy.orm.Session.bulk_insert_mappings`, each row into its shard."""
        rows, statement, options = list(mappings), insert(mapper), {"render_nulls": render_nulls}
        if rows and return_defaults:
            key = inspect(mapper).mapper.primary_key
            statement = statement.returning(*key, sort_by_parameter_order=True)
            keys = self.execute(statement, rows, execution_options=options).mappings()
            for row, made in zip(rows, keys, strict=True):
                row.update(made)
        elif rows:
            self.execute(statement, rows, execution_options=options)

    def bulk_update_mappings(self, mapper: Any, mappings: Any) -> None:
        """Act as :meth:`sqlalchemy.orm.Session.bulk_update_mappings`, each row in its shard."""
        if rows := list(mappings):
            self.execute(update(mapper), rows)

    def claim_flushed(self, shard_of: Callable[[InstanceState[Any]], int]) -> None:
        """Claim the rows that a flush has written. Raises as :meth:`Claimant.claim` does."""
        if not lookups_are_defined():
            return
        states: Iterator[InstanceState[Any]] = map(inspect, (*self.new, *self.dirty))
        self._claim((lookup, value, shard_of(one)) for one in states for lookup, value in _written_of(one))

    def _claim_beside(self, written: Iterable[tuple[Lookup, Any]], shard: int) -> None:
        """Claim rows that were written into a shard, and not by a flush."""
        found = [(lookup, value, shard) for lookup, value in written]
        if not found:
            return
        # As a failed flush does, it rolls back to the last savepoint, and COMMIT is refused until rollback():
        # what was written can't be committed. A part of a transaction without a savepoint has no public name.
        around: Any = self.get_nested_transaction() or self.get_transaction()
        transaction = around._begin()
        try:
            self._claim(found)
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()

    def _claim(self, written: Iterable[tuple[Lookup, Any, int]]) -> None:
        wanted: dict[Lookup, dict[Any, int]] = {}
        for lookup, given, shard in written:
            value, rows = claimed_value(lookup, given), wanted.setdefault(lookup, {})
            if rows.setdefault(value, shard) != shard:
                raise taken(lookup, value)
        connections = map(self.connection_to, {shard for rows in wanted.values() for shard in rows.values()})
        if any(connection.connection.autocommit for connection in connections):
            raise BadArgument(
                f"rows of {next(iter(wanted)).table} can't be written in AUTOCOMMIT: it has a look-up key",
                hint="Use another isolation level: values are claimed between the write and COMMIT.",
            )
        for lookup in sorted(wanted, key=str):
            self.claims.claim(lookup, wanted[lookup])


_UNKNOWN: Final = text("DEFAULT")
"""Stands for a value that a default makes: the session does not see it."""


def _written_of(state: InstanceState[Any]) -> Iterator[tuple[Lookup, Any]]:
    for key, lookup in lookups_of_mapper(state.mapper).items():
        if state.key is None:
            yield lookup, state.dict.get(key, _UNKNOWN)
        else:
            added = get_history(state.obj(), key, PassiveFlag.PASSIVE_NO_INITIALIZE).added
            yield from ((lookup, value) for value in added or ())


def _refuse_inside(statement: Any) -> None:
    """Refuse an INSERT or UPDATE of a look-up key within another statement: its values would not be claimed.

    Raises:
        BadArgument: a CTE or ``from_statement()`` has one.
    """
    if (inside := reading_of(statement)[0].inner_lookup) is not None:
        raise BadArgument(
            f"an INSERT or UPDATE within another statement writes look-up key {inside}",
            hint="Execute it separately: a session claims the values of insert() and update().",
        )


def written_by(statement: Any, given: Any) -> list[tuple[Lookup, Any]]:
    """Return the values of look-up keys that an INSERT or UPDATE writes, as far as it writes any.

    Raises:
        BadArgument: only the database knows them.
    """
    if not isinstance(statement, Insert | Update):
        return []
    lookups = lookups_of(statement.table)
    return list(_written(statement, given, lookups)) if lookups else []


def _written(statement: Any, given: Any, lookups: Sequence[Lookup]) -> Iterator[tuple[Lookup, Any]]:
    mapper = mapper_written(statement)
    attributes = {} if mapper is None else lookups_of_mapper(mapper)
    # What the rows of the statement can call each: the attribute or the column.
    names: dict[Lookup, tuple[str, ...]] = {
        one: (*(key for key, there in attributes.items() if there == one), one.key, one.column)
        for one in lookups
    }
    if getattr(statement, "select", None) is not None:
        raise BadArgument(
            f"the values of look-up key {lookups[0]} can't be claimed in INSERT … SELECT: only the database"
            " knows them",
            hint="Select the rows first, and insert them with their values.",
        )
    own = assigned(statement)
    given_rows: list[Any] = [given] if isinstance(given, Mapping) else list(given or ())
    rows = rows_in_values(statement) or given_rows
    for row in ({**own, **row} for row in rows or [{}]):
        for lookup in lookups:
            key = next((name for name in names[lookup] if name in row), None)
            if key is not None:
                yield lookup, _literal(row[key], row)
            elif isinstance(statement, Insert):
                raise BadArgument(
                    f"an INSERT gives no value for look-up key {lookup}",
                    hint="Give the value in the statement: the session can't claim a server's default.",
                )
        yield from _conflicting(statement, row, names)


def _literal(value: Any, row: Mapping[str, Any]) -> Any:
    """Return the value of a literal or a parameter."""
    if isinstance(value, BindParameter):
        return row.get(value.key, value.effective_value)
    return value


def _conflicting(
    statement: Any, row: Mapping[str, Any], names: Mapping[Lookup, Sequence[str]]
) -> Iterator[tuple[Lookup, Any]]:
    """Yield what ON CONFLICT DO UPDATE sets; ``excluded`` has the value of the row itself."""
    clauses = (one for one in statement.get_children() if isinstance(one, OnConflictDoUpdate))
    for column, value in (pair for one in clauses for pair in dict(one.update_values_to_set).items()):
        key = str(getattr(column, "key", column))
        for lookup in (lookup for lookup, known in names.items() if key in known):
            is_own = getattr(getattr(value, "table", None), "name", None) == "excluded"
            if not (is_own and value.name == lookup.column):
                yield lookup, _literal(value, row)


def refuse_many(statement: Any, given: Any) -> None:
    """Refuse an UPDATE over several shards that sets a look-up key: rows in two would have one value.

    Raises:
        BadArgument: it does.
    """
    for lookup, _ in written_by(statement, given):
        raise BadArgument(
            f"an UPDATE over several shards sets look-up key {lookup}, whose values are unique",
            hint="Name the row by its ID or its sharding key.",
        )


def taken(lookup: Lookup, value: object) -> IntegrityError:
    """Return the error for a value that a row of another shard has, as PostgreSQL words its own."""
    return IntegrityError(
        None,
        None,
        ValueTaken(
            f'duplicate key value violates look-up "{lookup}"\n'
            f"DETAIL:  Key ({lookup.column})=({shown(value)}) already exists in another shard."
        ),
    )


def shown(value: object) -> str:
    """Return a value for a message, of bounded length."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class ValueTaken(psycopg.errors.UniqueViolation):
    """The ``orig`` of the ``IntegrityError`` for a value that another row has."""
