"""A session over all shards of a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from random import choice
from typing import Any, Final, get_args
from weakref import WeakSet

from sqlalchemy import Engine, Result, event, inspect
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.horizontal_shard import set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState, Query, Session

from shardids.client.routing.claiming import Claiming, refuse_many
from shardids.client.routing.criteria import Named, Read
from shardids.client.routing.fanout import at_once
from shardids.client.routing.models import (
    Claimed,
    facts_of,
    refuse_reference_write,
    require_located,
)
from shardids.client.routing.nodes import SHARD, FanOut, NodeSession, ShardConnection, Shards, end_reading
from shardids.client.routing.one_shard import executed
from shardids.client.routing.placing import (
    State,
    described,
    place,
    set_default_key,
    shard_of_identity,
    shard_of_object,
)
from shardids.client.routing.query_node import ENGINE
from shardids.client.routing.sent import assigned, part_of
from shardids.client.routing.statements import Execution
from shardids.client.routing.writes import (
    AssociationConnection,
    computed_key,
    insert_rows,
    require_own_rows,
    sql_of,
    update_by_key,
)
from shardids.errors import BadArgument, CannotCombine, WrongShard
from shardids.models.lookups import Lookup

_FAN_OUTS: Final = get_args(FanOut)


@cache
def session_class(ours: type[Session], theirs: type[Session] | None) -> type[Session]:
    """Return a class that combines a session class of shardids with the application's own."""
    if theirs is None or issubclass(ours, theirs):
        return ours
    if issubclass(theirs, ours):
        return theirs
    return type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__})


class RoutedQuery(Query[Any]):
    """A query of a session over all shards."""

    def set_shard(self, shard: int) -> Any:
        """Return the query within one shard."""
        return self.execution_options(**{SHARD: shard})


class RoutedSession(NodeSession, Claiming):
    """A session over all shards; see :meth:`shardids.Cluster.sharded_session`.

    It has one connection and one transaction a node, whatever the number of shards that it uses there.
    """

    def __init__(self, shards: Shards, *, fan_out: FanOut = "all", **options: Any) -> None:
        if fan_out not in _FAN_OUTS:
            raise BadArgument(f'fan_out must be "all", "named" or "never", not {fan_out!r}')
        super().__init__(**{"query_cls": RoutedQuery, **options})
        self.shards = self.finder = shards
        self.claims = shards.claims
        self.fan_out = fan_out
        self._levels = {}
        self.begun = []
        self._lent = []
        self._placed: dict[State, int] | None = None
        self._at_hand: int | None = None

    def get_bind(
        self,
        mapper: Any = None,
        *,
        shard_id: Any = None,
        instance: Any = None,
        clause: Any = None,
        **_: Any,
    ) -> Engine:
        """Return the engine of the node that holds the shard, which all shards of the node share.

        Raises:
            BadArgument: no shard is named.
        """
        if shard_id is None and instance is not None:
            shard_id = self.shard_of(instance)
        if shard_id is None and self._writing is not None:
            return self._instead(self.shard_connection(self._writing))
        if shard_id is None:
            shard_id = self._inserting
        if shard_id is None and self._placed is not None:
            return self._instead(AssociationConnection(self))
        if shard_id is None:
            raise BadArgument(
                "a session over all shards does not have one connection",
                hint='Name the shard: bind_arguments={"shard_id": number}',
            )
        return self.engine_of(shard_id)

    def _instead(self, connection: Any) -> Engine:
        """Return a bind that stands for our connection, only within a flush or a bulk operation."""
        bind: Any = object()
        # Those that the part of a transaction which a flush is keeps for itself are neither begun nor ended:
        # SQLAlchemy has no public way to give a flush a connection for rows that are no objects.
        part: Any = self.innermost
        part._connections[bind] = (connection, None, False, False)
        self._lent.append((part._connections, bind))
        return bind  # type: ignore[no-any-return]  # none, but used as one

    # SQLAlchemy takes its absence for leave to insert many rows at once.
    @property
    def connection_callable(self) -> Any:  # type: ignore[override]  # a method there, None in Session
        """The function that gives a flush the connection of an object; ``None`` during a bulk INSERT."""
        return self._connection_for if self._inserting is None and self._writing is None else None

    def _connection_for(self, mapper: Any = None, instance: Any = None, **_: Any) -> Any:
        return self.shard_connection(self.shard_of(instance))

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Any:
        """Return a node's connection as seen from the shard in ``bind_arguments={"shard_id": …}``."""
        shard = (bind_arguments or {}).get("shard_id")
        self.only_merges = False
        self.fail_together()
        connection = super().connection(dict(bind_arguments or {}), execution_options)
        return connection if shard is None else ShardConnection(connection, self.within(shard))

    def close(self) -> None:
        """Close the session; a transaction that only merged rows ends on all nodes at once, by COMMIT."""
        try:
            if self.only_merges and self.begun and not self.twophase:
                parts = [partial(end_reading, connection) for connection in self.begun]
                # While the interpreter ends there are no new threads.
                with suppress(RuntimeError):
                    at_once(parts, is_async=self.begun[0].dialect.is_async)
        finally:
            super().close()

    def shard_of(self, instance: object) -> int:
        """Return the shard of a mapped object, also in the events of its loading.

        Raises:
            BadArgument: nothing determines the shard of a new object.
        """
        state: State = inspect(instance)
        shard = (self._placed or {}).get(state)
        if shard is None:
            shard = shard_of_identity(state, self.shards)
        return place(self, self.shards)[state] if shard is None else shard

    def place(self) -> None:
        """Find the shards of the objects to flush; raise before anything is written."""
        self.only_merges = False
        self._placed = placed = place(self, self.shards)
        for state, shard in placed.items():
            if found := [one for value in state.dict.values() if (one := sql_of(value)) is not None]:
                _refuse_computed_key(state)
                require_own_rows(found, None, self, [shard])
        # SQLAlchemy inserts neighbours together: one statement a shard, not one whenever the shard changes.
        new = [state for state in placed if state.key is None and state.insert_order is not None]
        if len(new) > 1:
            orders = sorted(state.insert_order or 0 for state in new)
            for state, order in zip(
                sorted(new, key=lambda s: (placed[s], s.insert_order)), orders, strict=True
            ):
                state.insert_order = order

    def end_flush(self) -> None:
        """Claim the rows that a flush has written, and end the work of :meth:`place`."""
        try:
            self.claim_flushed(lambda state: self.shard_of(state.obj()))
        finally:
            self._placed = None
            self._lent.clear()

    def objects_by_shard(self, objects: Iterable[object]) -> dict[int, list[object]]:
        """Return the objects of a bulk operation by their shards. Relationships don't count."""
        by_shard: dict[int, list[object]] = defaultdict(list)
        for one in objects:
            state: State = inspect(one)
            set_default_key(state)
            _refuse_computed_key(state)
            by_shard[shard_of_object(state, self.shards)].append(one)
        return by_shard

    def _look_up(self, lookup: Lookup, values: Iterable[Any]) -> Claimed | None:
        """Return the shards of claimed values as the session sees them: with those it has yet to flush."""
        if self.autoflush and not self.is_flushing:
            self.flush()
        # Kept snapshots see rows as they were, and claims say where they are now.
        return None if self.keeps_snapshots() else self.claims.shards_of(lookup, values)

    def _read(self, statement: Any, parameters: Any) -> Read:
        return Read(statement, parameters, self.shards, self._look_up)

    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        if options.get("_parent_execute_state") is not None:
            return super()._execute_internal(statement, params, **options)
        if len(self.begun) > 1:
            self.fail_together()
        told, self._getting = self._getting, None
        shard, read = None, None
        # Where nobody listens, no event has to be made of the statement, which takes longer than all of this.
        if not self.dispatch.do_orm_execute and options.get("_add_event") is None:
            by_table = self.shards.old_ids is not None
            if told is not None and by_table in told[0].stays:
                shard = told[1]
            elif getattr(statement, "is_select", False):
                given, binds = options.get("execution_options"), options.get("bind_arguments")
                shard, read = self._only(executed(self, statement, params, given, binds))
                if told is not None and shard is not None:
                    told[0].stays.add(by_table)
        if shard is None:
            # After all listeners of the application, which may change the statement, and before SQLAlchemy's
            # own: the event do_orm_execute has no public way to be the last.
            listener = options.get("_add_event")

            def route(context: ORMExecuteState) -> Result[Any] | None:
                routed = self._route(context, read)
                return listener(context) if routed is None and listener is not None else routed

            options["_add_event"] = route
            self.only_merges &= read is not None
        else:
            self.only_merges = False
            binds, given = options.get("bind_arguments") or {}, options.get("execution_options") or {}
            options["bind_arguments"] = {**binds, "shard_id": shard}
            options["execution_options"] = {**given, **self._into(shard, binds)}
        try:
            if told is not None and shard is not None:
                # It writes nothing that would have to be claimed.
                return super(Claiming, self)._execute_internal(statement, params, **options)
            return super()._execute_internal(statement, params, **options)
        except PoolTimeout as error:
            raise self.without_connection() from error

    def _into(self, shard: int, binds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the execution options of a statement that goes on by itself, into its only shard.

        Its loaders' statements get them as well: they follow the shard that the application named beside it,
        and otherwise their own criteria.
        """
        named = {} if binds.get("shard_id") is None else {SHARD: shard}
        return {**named, ENGINE: "shard", **self.within(shard)}

    def _route(self, context: ORMExecuteState, read: Read | None) -> Result[Any] | None:
        """Send a statement into its shards; ``None`` if it goes on by itself, into its only one.

        ``read`` is a SELECT that was found to concern several, before its event.
        """
        if "sa_top_level_orm_context" in context.execution_options:
            # SQLAlchemy 2.0 hands yield_per down to the statements of loaders, which it then refuses.
            context.update_execution_options(yield_per=None)
        if read is None:
            shard, read = self._only(context)
            if shard is not None:
                context.update_execution_options(**self._into(shard, context.bind_arguments))
                self._sent_to = context.bind_arguments["shard_id"] = shard
                return None
            if context.is_insert:
                return insert_rows(context, self._named_beside(context))
        if self.autoflush and not self.is_flushing and context.execution_options.get("autoflush", True):
            self.flush()
        return self._ask_several(context, read.named())

    def _ask_several(self, context: ORMExecuteState, named: Named) -> Result[Any]:
        if context.is_update:
            if isinstance(context.parameters, Sequence):
                return update_by_key(context)
            refuse_many(context.statement, context.parameters)
        return Execution(context).result(named)

    def _only(self, context: ORMExecuteState) -> tuple[int | None, Read]:
        """Return the only shard of a statement; ``None`` if it concerns several, or is an INSERT."""
        read = self._read(context.statement, context.parameters)
        # Of joined inheritance, for one, SQLAlchemy loads columns by a statement within another.
        loads = getattr(context.statement, "element", None) if context.is_column_load else None
        within = read if loads is None else self._read(loads, context.parameters)
        return self._shard_of_statement(context, within), read

    def _shard_of_statement(self, context: ORMExecuteState, read: Read) -> int | None:
        for mapper in read.reading.mappers:
            _guard(mapper)
        shard = self._named_beside(context)
        if not context.is_select:
            refuse_reference_write(context.statement)
            if context.is_insert and self._inserting is None:
                return None
            if context.is_update:
                _refuse_new_key(context.statement, read)
        elif shard is None and self._is_of_references(read):
            return self._at_hand
        if shard is not None:
            return shard
        named = read.named().shards
        if named is None or len(named) > 1:
            return None
        # Criteria that contradict each other find nothing, wherever they are asked.
        only = next(iter(named), 0)
        try:
            read.in_one_shard(partial(self._dialect_of, only))
        except CannotCombine:
            if self.fan_out != "all":
                raise
            return None
        return only

    def _dialect_of(self, shard: int) -> Dialect:
        return self.shards.engine(self.shards.node_of(shard)).dialect

    def _is_of_references(self, read: Read) -> bool:
        """Return whether every node answers alike; this session asks one, which others share with it."""
        if read.reading.of_references is False:
            return False
        if self._at_hand is None:
            self._at_hand = choice(self.shards.placement.all_shards())  # noqa: S311 -- to spread sessions
        return read.of_references(partial(self._dialect_of, self._at_hand))

    def _named_beside(self, context: ORMExecuteState) -> int | None:
        """Return the shard that is named beside a statement in one of SQLAlchemy's ways."""
        named = context.bind_arguments.get("shard_id")
        options = part_of(context.statement, "with_options")
        if named is None and options:
            named = next((one.shard_id for one in options if isinstance(one, set_shard_id)), None)
        if named is None:
            # Sessions have them from SQLAlchemy 2.1 on.
            of_session: Mapping[str, Any] = getattr(self, "execution_options", _EMPTY)
            named = context.execution_options.get(SHARD, of_session.get(SHARD))
        if named is None and context.is_insert:
            named = self._inserting
        return None if named is None else int(named)


_EMPTY: Final[dict[str, Any]] = {}
_GUARDED: Final[WeakSet[Mapper[Any]]] = WeakSet()


def _guard(mapper: Mapper[Any]) -> None:
    """See to it that no session over all shards loads objects which it could not tell apart.

    It looks at all models that are declared together with this one, for a join may load any of them.
    """
    if mapper in _GUARDED:
        return
    for model in mapper.registry.mappers:
        if model not in _GUARDED and not facts_of(model).located:
            event.listen(model, "load", _refuse_load)
        _GUARDED.add(model)


def _refuse_load(target: object, context: Any) -> None:
    if isinstance(context.session, RoutedSession):
        require_located(inspect(type(target)))


def _refuse_new_key(statement: Any, read: Read) -> None:
    """Refuse an UPDATE that sets a sharding key: its rows would be looked for in another shard.

    Raises:
        WrongShard: it does.
    """
    for name in assigned(statement):
        if name in read.reading.keys:
            raise WrongShard(
                f"the UPDATE sets the sharding key {name} of {statement.table.name}",
                hint="A row can't leave its shard: insert another row, and delete this one.",
            )


def _refuse_computed_key(state: State) -> None:
    key = facts_of(state.mapper).key
    if key is not None and sql_of(state.dict.get(key)) is not None:
        raise computed_key(key, described(state))


event.listen(RoutedSession, "before_flush", lambda session, *_: session.place())
event.listen(RoutedSession, "after_flush", lambda session, *_: session.end_flush())
