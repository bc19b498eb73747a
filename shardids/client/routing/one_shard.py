"""A session on one shard, which refuses objects, rows and criteria of other shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstanceState, Mapper, ORMExecuteState, Session, SessionTransaction
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.util import immutabledict

from shardids.client.routing.claiming import Claiming
from shardids.client.routing.criteria import Read
from shardids.client.routing.models import (
    Claimant,
    ShardFinder,
    facts_of,
    is_filled,
    mapper_written,
    refuse_reference,
)
from shardids.client.routing.placing import Sign, described, new_relatives, set_default_key, signs_of
from shardids.client.routing.writes import keyed, shard_of_row
from shardids.errors import BadArgument, ShardidsError, WrongShard

After = int | Iterable[int]
"""The IDs, one or several, that the IDs of a session sort after."""

_READ_ONLY: Final = "25006"
_ADVANCE_PAST: Final = text("select shardids.advance_past(:shard, :id)")


def advance_past(connection: Connection, shard: int, id_: int) -> None:
    """Raise a shard of the connection's node past an ID, if it is not past it.

    Raises:
        BadArgument: the shard is not past it, and the transaction is read-only.
        TooFarAhead: the ID leads by more than ``max_past``.
        UnknownShard, ShardFenced, ShardMoved, CopyNotActivated: the shard issues no IDs here.
    """
    try:
        connection.execute(_ADVANCE_PAST, {"shard": shard, "id": id_})
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _READ_ONLY:
            raise
        raise BadArgument(
            f"shard {shard} is not past ID {id_} yet, and neither a read-only transaction nor a standby can"
            " raise it",
            hint="Leave after= out of a session that only reads. To raise the shard, run in one that writes:"
            f" cluster.at(shard={shard}, after={id_}).reserve(1)",
        ) from error


def _refuse_earlier_statement(statement: Any, rows: Iterable[Mapping[str, Any]], latest: int) -> None:
    """Refuse rows of an INSERT, of a mapped class or a table, as :func:`refuse_earlier_value` does."""
    mapper = mapper_written(statement)
    for row in rows:
        if mapper is not None:
            _refuse_earlier(mapper, row, latest)
        for column in statement.table.primary_key if mapper is None else ():
            if is_filled(column):
                refuse_earlier_value(statement.table.name, column.key, row.get(column.key), latest)


def _refuse_earlier(mapper: Mapper[Any], values: Mapping[str, Any], latest: int) -> None:
    for column in mapper.primary_key:
        if isinstance(column, Column) and is_filled(column):
            key = mapper.get_property_by_column(column).key
            refuse_earlier_value(mapper.class_.__name__, key, values.get(key), latest)


def refuse_earlier_value(name: str, key: str, value: Any, latest: int) -> None:
    """Refuse the key of a new row if it is an ID that does not sort after ``latest``.

    Raises:
        BadArgument: it is one.
    """
    is_id = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
    if is_id and int(value) <= latest:
        raise BadArgument(
            f"{key} {value} of a new row of {name} does not sort after {latest}, as after= requires",
            hint="Leave the ID to the shard, or reserve new IDs:"
            " cluster.at(shard=…, after=…).reserve(count). Nothing was written.",
        )


State = InstanceState[Any]


class ShardSession(Claiming):
    """A plain session on one shard, which refuses objects of others; see :meth:`shardids.Cluster.session`."""

    def __init__(
        self,
        bind: Engine,
        *,
        finder: ShardFinder,
        claims: Claimant,
        shard: int,
        after: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(bind, **options)
        self.finder = finder
        self.claims = claims
        self.shard = shard
        self.after = after
        if after is not None:
            event.listen(self, "after_begin", _advance)

    def connection_to(self, shard: int) -> Connection:
        """Return the session's connection."""
        return self.connection()

    def _shard_written(self) -> int:
        return self.shard

    def objects_by_shard(self, objects: Iterable[object]) -> dict[int, list[object]]:
        """Return the objects of a bulk operation; those of other shards are refused."""
        mine = list(objects)
        for one in mine:
            state: State = inspect(one)
            set_default_key(state)
            refuse_others(state, signs_of(state, self.finder), self.shard)
            if self.after is not None and state.key is None:
                _refuse_earlier(state.mapper, state.dict, self.after)
        return {self.shard: mine}

    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        told, self._getting = self._getting, None
        if told is not None:
            if told[1] != self.shard:
                raise _of_others(str(told[1]), self.shard)
            return super(Claiming, self)._execute_internal(statement, params, **options)
        params = keyed(statement, params)
        # What SQLAlchemy does for the event do_orm_execute would take several times as long as the check.
        try:
            refuse_statement(statement, params, self.finder, self.shard)
        except ShardidsError as error:
            context = executed(self, statement, params, None, None)
            # What belongs to an object that the session has, and is in no shard.
            is_load = context.is_column_load or context.is_relationship_load
            if isinstance(error, WrongShard) or not is_load:
                raise
        if self.after is not None and getattr(statement, "is_insert", False):
            rows = Read(statement, params, self.finder).rows(params)
            _refuse_earlier_statement(statement, rows, self.after)
        return super()._execute_internal(statement, params, **options)


# If SQLAlchemy renamed it, nothing would be checked: this fails then, when the module is imported.
Session._execute_internal  # noqa: B018  -- see above


def refuse_objects(session: Session, finder: ShardFinder, only: int) -> None:
    """Refuse a flush that holds an object of another shard than the session's only one.

    Raises:
        BadArgument: an object of another shard, or an ID of no shard of the cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    silent: dict[Mapper[Any], frozenset[str] | None] = {}
    for one in chain(session.new, session.dirty):
        state: State = instance_state(one)
        # Most objects of a large flush say nothing yet; this finds them in a microsecond.
        mapper = state.mapper
        if mapper not in silent:
            facts = facts_of(mapper)
            silent[mapper] = None if facts.streamed or facts.is_reference else facts.of_interest
        names = silent[mapper]
        if names is None:
            refuse_reference(state, session)
        set_default_key(state)
        if state.key is None and names is not None and names.isdisjoint(state.dict):
            continue
        refuse_others(state, signs_of(state, finder), only)
        for relative in new_relatives(state):
            refuse_others(state, signs_of(relative, finder), only)


def refuse_others(state: State, signs: Iterable[Sign], only: int) -> None:
    """Refuse an object that one of the signs puts into another shard than ``only``, the session's.

    Raises:
        WrongShard: there is such a sign.
    """
    for sign in signs:
        if sign.shard != only:
            raise WrongShard(
                f"{described(state)} can't be written in a session of shard {only}: {sign}",
                hint="Foreign keys can't cross shards. Open the session on the object's own shard, or on"
                " all of them: cluster.sharded_session(). Nothing was written.",
            )


def refuse_statement(statement: Any, given: Any, finder: ShardFinder, only: int) -> None:
    """Refuse a statement that is about rows of other shards than ``only``, the session's.

    Raises:
        WrongShard: its criteria name other shards, or a row that it writes belongs to one.
        BadArgument: an ID of no shard of the cluster.
    """
    read = Read(statement, given, finder)
    if read.reading.telling:
        for row in read.rows(given):
            shard_of_row(row, read, only)
    if others := read.mentioned() - {only}:
        raise _of_others(", ".join(map(str, sorted(others)[:3])), only)


def _of_others(named: str, only: int) -> WrongShard:
    return WrongShard(
        f"the statement's criteria name shard {named}, and this session is on shard {only}",
        hint="Open the session on the rows' own shard, or on all of them: cluster.sharded_session().",
    )


def executed(session: Session, statement: Any, given: Any, options: Any, binds: Any) -> ORMExecuteState:
    """Return the state that ``do_orm_execute`` would pass for a statement, if no listener wants it."""
    return ORMExecuteState(session, statement, given, options or immutabledict(), binds or {}, statement, [])


@event.listens_for(ShardSession, "before_flush")
def _keep_to_shard(session: Any, *_: object) -> None:
    refuse_objects(session, session.finder, session.shard)
    for one in session.new if session.after is not None else ():
        state: State = inspect(one)
        _refuse_earlier(state.mapper, state.dict, session.after)


def _advance(session: Any, transaction: SessionTransaction, connection: Connection) -> None:
    # Once a transaction: the session may begin the next on a server that was started since.
    if not transaction.nested:
        advance_past(connection, session.shard, session.after)


event.listen(ShardSession, "after_flush", lambda session, *_: session.claim_flushed(lambda _: session.shard))
