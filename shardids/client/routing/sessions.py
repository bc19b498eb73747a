"""A session over all shards of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from random import choice
from typing import Any, Final, TypeVar, get_args
from weakref import WeakSet

from sqlalchemy import Engine, Result, event, inspect
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.horizontal_shard import ShardedQuery, ShardedSession, set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState, Session

from shardids.client.routing.claiming import Claiming, refuse_many
from shardids.client.routing.criteria import Named, Read
from shardids.client.routing.models import (
    Claimed,
    facts_of,
    is_sharding_key,
    refuse_reference_write,
    require_located,
)
from shardids.client.routing.nodes import FanOut, NodeSession, ShardConnection, Shards
from shardids.client.routing.one_shard import loads_more
from shardids.client.routing.placing import State, place, shard_of_identity
from shardids.client.routing.query_node import ENGINE, by_views
from shardids.client.routing.sent import assigned
from shardids.client.routing.statements import Execution
from shardids.client.routing.writes import (
    AssociationConnection,
    insert_rows,
    mappings_by_shard,
    objects_by_shard,
    update_by_key,
)
from shardids.errors import BadArgument, CannotCombine, UnknownId, WrongShard
from shardids.models.lookups import Lookup

Entity = TypeVar("Entity")


@cache
def session_class(ours: type[Session], theirs: type[Session] | None) -> type[Session]:
    """Returns a class with what a session class of shardids does and what the application's own adds."""
    if theirs is None or issubclass(ours, theirs):
        return ours
    if issubclass(theirs, ours):
        return theirs
    return type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__})


class RoutedSession(NodeSession, Claiming, ShardedSession):
    """A session over all shards; see :meth:`shardids.Cluster.sharded_session`.

    It has one connection and one transaction a node, whatever the number of shards that it uses there.
    """

    def __init__(self, shards: Shards, *, fan_out: FanOut = "all", **options: Any) -> None:
        if fan_out not in get_args(FanOut):
            raise BadArgument(f"fan_out={fan_out!r} is not known", hint='It is "all", "named" or "never".')
        # Not ShardedSession's own, which binds each shard and listens again for each session.
        Session.__init__(self, **{"query_cls": ShardedQuery, **options})
        self.shards = shards
        self.claims = shards.claims
        self.fan_out = fan_out
        self._levels = {}
        self.identity_chooser = lambda *_, **__: [None]
        self._placed: dict[State, int] | None = None
        self._at_hand: int | None = None
        self._isolations: dict[object, str] = {}

    # IDs tell rows of different shards apart, so there is one identity, not one for each shard to look up.
    # ShardedSession's own also forgets whether the database may be asked.
    _identity_lookup = Session._identity_lookup  # type: ignore[assignment]  # it takes no further arguments

    def get(self, entity: type[Entity] | Mapper[Entity], ident: Any, **options: Any) -> Entity | None:
        """As :meth:`sqlalchemy.orm.Session.get`, in the one shard that the primary key tells."""
        mapper = inspect(entity, raiseerr=False)
        if isinstance(mapper, Mapper) and not isinstance(ident, dict):
            try:
                shard = facts_of(mapper).shard_of_identity(
                    ident if isinstance(ident, tuple | list) else (ident,), self.shards
                )
            except UnknownId:
                return None
            if shard is not None:
                options["bind_arguments"] = {**(options.get("bind_arguments") or {}), "shard_id": shard}
        return super().get(entity, ident, **options)

    def get_bind(
        self,
        mapper: Any = None,
        *,
        shard_id: Any = None,
        instance: Any = None,
        clause: Any = None,
        **_: Any,
    ) -> Engine:
        """Returns the engine of the node that holds the shard, which all shards of the node share.

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
                "a session over all shards has no connection of its own",
                hint='Name the shard: bind_arguments={"shard_id": number}',
            )
        return self.engine_of(shard_id)

    def _instead(self, connection: Any) -> Engine:
        """Returns a bind that stands for a connection of ours, within a flush or a bulk operation alone."""
        bind: Any = object()
        # Those that the part of a transaction which a flush is keeps for itself are neither begun nor ended:
        # SQLAlchemy has no public way to give a flush a connection for rows that are no objects.
        self._transaction._connections[bind] = (connection, None, False, False)  # type: ignore[union-attr,assignment]  # see above
        return bind  # type: ignore[no-any-return]  # none, but used as one

    # SQLAlchemy takes its absence for leave to insert many rows at once.
    @property
    def connection_callable(self) -> Any:  # type: ignore[override]  # a method there, None in Session
        """What gives a flush the connection to write an object over; ``None`` during a bulk INSERT."""
        return self._connection_for if self._inserting is None and self._writing is None else None

    def _connection_for(self, mapper: Any = None, instance: Any = None, **_: Any) -> Any:
        return self.shard_connection(self.shard_of(instance))

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Any:
        """Returns a node's connection as seen from the shard in ``bind_arguments={"shard_id": …}``."""
        shard = (bind_arguments or {}).get("shard_id")
        self.fail_together()
        connection = super().connection(dict(bind_arguments or {}), execution_options)
        return connection if shard is None else ShardConnection(connection, self.within(shard))

    def shard_of(self, instance: object) -> int:
        """Returns the shard of a mapped object, also in the events that tell of its loading.

        Raises:
            BadArgument: nothing tells the shard of a new object.
        """
        state: State = inspect(instance)
        shard = (self._placed or {}).get(state)
        if shard is None:
            shard = shard_of_identity(state, self.shards)
        return place(self, self.shards)[state] if shard is None else shard

    def place(self) -> None:
        """Finds the shards of what is about to be flushed; raises before anything is written."""
        self._placed = placed = place(self, self.shards)
        # SQLAlchemy inserts neighbours together: one statement a shard, not one whenever the shard changes.
        new = [state for state in map(inspect, self.new) if state.insert_order is not None]
        orders = sorted(state.insert_order for state in new)
        for state, order in zip(sorted(new, key=lambda s: (placed[s], s.insert_order)), orders, strict=True):
            state.insert_order = order

    def end_flush(self) -> None:
        """Claims what a flush has written, and ends what :meth:`place` began."""
        try:
            self.claim_flushed(lambda state: self.shard_of(state.obj()))
        finally:
            self._placed = None

    def objects_by_shard(self, objects: Iterable[object]) -> dict[int, list[object]]:
        """Returns the objects of a bulk operation by their shards."""
        return objects_by_shard(objects, self.shards)

    def rows_by_shard(
        self, mapper: Mapper[Any], rows: Iterable[dict[str, Any]], *, are_new: bool
    ) -> dict[int, list[dict[str, Any]]]:
        """Returns the rows of a bulk operation by their shards."""
        return mappings_by_shard(mapper, rows, self.shards)

    def _flush_before(self, *, is_wanted: bool = True) -> None:
        if is_wanted and self.autoflush and not self.is_flushing:
            self.flush()

    def _look_up(self, lookup: Lookup, values: Iterable[Any]) -> Claimed | None:
        """Returns the shards of claimed values as the session sees them: with those it has yet to flush."""
        self._flush_before()
        isolations: dict[object, str] = {}
        for connection in self.begun:
            # It is the same to the end of the transaction: this is a query of it.
            transaction = connection.get_transaction()
            isolations[transaction] = self._isolations.get(transaction) or str(
                connection.exec_driver_sql("select current_setting('transaction_isolation')").scalar()
            )
        self._isolations = isolations
        # Others see rows as they were, and claims say where they are now.
        is_current = all(isolation == "read committed" for isolation in isolations.values())
        return self.claims.shards_of(lookup, values) if is_current else None

    def _read(self, statement: Any, parameters: Any) -> Read:
        return Read(statement, parameters, self.shards, self._look_up)

    def execute_chooser(self, context: ORMExecuteState) -> list[int]:
        """Returns the shards that a statement asks; all of them if it names none."""
        named = self._read(context.statement, context.parameters).named()
        return self.shards.placement.all_shards() if named.shards is None else sorted(named.shards)

    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        if options.get("_parent_execute_state") is not None:
            return super()._execute_internal(statement, params, **options)
        self.fail_together()
        shard = None if self.dispatch.do_orm_execute else self._only_shard(statement, params, options)
        if shard is None:
            # After all listeners of the application, which may change the statement, and before SQLAlchemy's
            # own: the event do_orm_execute has no public way to be the last.
            listener = options.get("_add_event")

            def route(context: ORMExecuteState) -> Result[Any] | None:
                routed = self._route(context)
                return listener(context) if routed is None and listener is not None else routed

            options["_add_event"] = route
        else:
            options["bind_arguments"] = {**(options.get("bind_arguments") or {}), "shard_id": shard}
            given = options.get("execution_options") or {}
            options["execution_options"] = {**given, **self._into(shard)}
        try:
            return super()._execute_internal(statement, params, **options)
        except PoolTimeout as error:
            raise self.without_connection() from error

    # ShardedQuery.set_shard() names a shard by _sa_shard_id, which the loaders of a statement inherit.
    def _into(self, shard: int) -> dict[str, Any]:
        """Returns the execution options of a statement that goes on by itself, into its only shard."""
        return {"_sa_shard_id": shard, ENGINE: "shard", **self.within(shard)}

    def _only_shard(self, statement: Any, params: Any, options: dict[str, Any]) -> int | None:
        """Returns the only shard of a SELECT, if that is plain to see: the quick way, and the usual one.

        Where nobody listens, no event has to be made of the statement, which takes longer than all of this.
        """
        if not getattr(statement, "is_select", False) or options.get("_add_event") is not None:
            return None
        if (
            "_sa_shard_id" in (options.get("execution_options") or _EMPTY)
            or "_sa_shard_id" in statement.get_execution_options()
            # Sessions have them from SQLAlchemy 2.1 on.
            or "_sa_shard_id" in getattr(self, "execution_options", _EMPTY)
            or _shard_option(statement) is not None
        ):
            return None
        read = self._read(statement, params)
        for mapper in read.reading.mappers:
            _guard(mapper)
        shard = (options.get("bind_arguments") or _EMPTY).get("shard_id")
        if shard is not None:
            return int(shard)
        named = read.named().shards
        if named is None or len(named) != 1:
            return None
        (shard,) = named
        try:
            self._require_one_shard(statement, read, shard)
        except CannotCombine:
            return None
        return shard

    def _require_one_shard(self, statement: Any, read: Read, shard: int) -> None:
        try:
            read.in_one_shard(partial(self._dialect_of, shard))
        except CannotCombine:
            if not loads_more(self, statement):
                raise

    def _dialect_of(self, shard: int) -> Dialect:
        return self.shards.engine(self.shards.node_of(shard)).dialect

    def _route(self, context: ORMExecuteState) -> Result[Any] | None:
        """Sends a statement into its shards; ``None`` if it goes on by itself, into its only one."""
        _guard(context.bind_mapper)
        shard = self._named_beside(context)
        if context.is_select and shard is not None:
            return self._go_on(context, shard)
        refuse_reference_write(context.statement)
        if context.is_insert and self._inserting is None:
            return insert_rows(context, shard)
        if context.is_update:
            _refuse_new_key(context)
        # Of joined inheritance, for one, SQLAlchemy loads columns by a statement within another.
        loads = getattr(context.statement, "element", None) if context.is_column_load else None
        read = self._read(context.statement if loads is None else loads, context.parameters)
        if shard is None and self._is_of_references(read):
            shard = self._at_hand
        if shard is not None:
            return self._go_on(context, shard)
        named = read.named()
        refused: CannotCombine | None = None
        only = 0
        if named.shards is not None and len(named.shards) <= 1:
            # Criteria that contradict each other find nothing, wherever they are asked.
            only = next(iter(named.shards), 0)
            try:
                self._require_one_shard(context.statement, read, only)
            except CannotCombine as error:
                if self.fan_out != "all" or not context.is_select:
                    raise
                refused = error
            else:
                return self._go_on(context, only)
        self._flush_before(is_wanted=context.execution_options.get("autoflush", True))
        if refused is not None:
            return by_views(context, context.statement, refused, only)
        return self._ask_several(context, named)

    def _ask_several(self, context: ORMExecuteState, named: Named) -> Result[Any]:
        if context.is_update:
            if isinstance(context.parameters, Sequence):
                return update_by_key(context)
            refuse_many(context.statement, context.parameters)
        return Execution(context).result(named)

    def _is_of_references(self, read: Read) -> bool:
        """Returns whether every node answers alike; this session asks one, which others share with it."""
        if self._at_hand is None:
            self._at_hand = choice(self.shards.placement.all_shards())  # noqa: S311 -- to spread sessions
        return read.of_references(partial(self._dialect_of, self._at_hand))

    def _named_beside(self, context: ORMExecuteState) -> int | None:
        """Returns the shard that is named beside a statement in one of SQLAlchemy's ways."""
        named = context.bind_arguments.get("shard_id")
        if named is None:
            named = _shard_option(context.statement)
        if named is None:
            named = context.execution_options.get("_sa_shard_id")
        if named is None and context.is_insert:
            named = self._inserting
        return None if named is None else int(named)

    def _go_on(self, context: ORMExecuteState, shard: int) -> Result[Any] | None:
        self._sent_to = shard
        context.bind_arguments["shard_id"] = shard
        context.update_execution_options(**self._into(shard))
        return None


_EMPTY: Final[dict[str, Any]] = {}
_GUARDED: Final[WeakSet[Mapper[Any]]] = WeakSet()


def _guard(mapper: Mapper[Any] | None) -> None:
    """Sees to it that no session over all shards loads objects which it could not tell apart.

    It looks at all models that are declared together with this one, for a join may load any of them.
    """
    if mapper is None or mapper in _GUARDED:
        return
    for model in mapper.registry.mappers:
        if model not in _GUARDED and not facts_of(model).located:
            event.listen(model, "load", _refuse_load)
        _GUARDED.add(model)


def _refuse_load(target: object, context: Any) -> None:
    if isinstance(context.session, RoutedSession):
        require_located(inspect(type(target)))


def _shard_option(statement: Any) -> Any:
    """Returns the shard of a statement's option ``set_shard_id()``; ``None`` if it has none."""
    # SQLAlchemy has no public way to see the options of its own extension.
    options = getattr(statement, "_with_options", ())
    if not options:
        return None
    return next((option.shard_id for option in options if isinstance(option, set_shard_id)), None)


def _refuse_new_key(context: ORMExecuteState) -> None:
    """Refuses an UPDATE that sets a sharding key: its rows would be looked for in another shard.

    Raises:
        WrongShard: it does.
    """
    statement: Any = context.statement
    keys = {column.key for column in statement.table.columns if is_sharding_key(column)}
    if isinstance(context.bind_mapper, Mapper):
        keys.add(facts_of(context.bind_mapper).key or "")
    for name in assigned(statement):
        if name in keys:
            raise WrongShard(
                f"the sharding key {name} of {statement.table.name} is among what the UPDATE sets",
                hint="A row can't leave its shard: insert another row, and delete this one.",
            )


@event.listens_for(RoutedSession, "before_flush")
def _place(session: Any, *_: object) -> None:
    session.place()


@event.listens_for(RoutedSession, "after_flush")
def _end_flush(session: Any, *_: object) -> None:
    session.end_flush()
