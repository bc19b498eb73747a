"""A session over all shards of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from random import choice
from typing import Any, Final, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Result, event, inspect
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.horizontal_shard import ShardedQuery, ShardedSession, set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState, Session

from shardids.client.routing.claiming import Flushed, refuse_many
from shardids.client.routing.criteria import Named, Read
from shardids.client.routing.models import facts_of, refuse_reference_write, require_located
from shardids.client.routing.one_shard import loads_more
from shardids.client.routing.placing import State, place, shard_of_identity
from shardids.client.routing.query_node import ENGINE, by_views
from shardids.client.routing.statements import (
    FanOut,
    Shards,
    check_assignments,
    execute,
    named_beside,
    validated,
)
from shardids.client.routing.twophase import Atomic, Part, Whole
from shardids.client.routing.writes import (
    AssociationConnection,
    BulkWrites,
    ShardConnection,
    insert_rows,
    update_by_key,
)
from shardids.errors import BadArgument, CannotCombine, ConnectionFailed, UnknownId


@cache
def session_class(ours: type[Session], theirs: type[Session] | None) -> type[Session]:
    """Returns a class with what a session class of shardids does and what the application's own adds."""
    if theirs is None or issubclass(ours, theirs):
        return ours
    if issubclass(theirs, ours):
        return theirs
    return type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__})


class Guarded:
    """A session that loads objects of several shards."""


_GUARDED: WeakSet[Mapper[Any]] = WeakSet()


def guard(mapper: Mapper[Any] | None) -> None:
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
    if isinstance(context.session, Guarded):
        require_located(inspect(type(target)))


Entity = TypeVar("Entity")


class RoutedSession(BulkWrites, Atomic, ShardedSession, Guarded):
    """A session over all shards; see :meth:`shardids.Cluster.sharded_session`.

    It has one connection and one transaction a node, whatever the number of shards that it uses there.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        fan_out: FanOut = "all",
        **options: Any,
    ) -> None:
        # Not ShardedSession's own, which binds each shard and listens again for each session.
        Session.__init__(self, **{"query_cls": ShardedQuery, **options})
        self.shards = shards
        self.claims = shards.claims
        self._flushed = Flushed(self)
        self.fan_out = validated(fan_out)
        self._levels = {}
        self.identity_chooser = lambda *_, **__: [None]
        self._placed: dict[State, int] | None = None
        self._whole: tuple[object, Whole] | None = None
        self._at_hand: int | None = None
        self._wanted = ""

    # IDs tell rows of different shards apart, so there is one identity, not one for each shard to look up.
    _identity_lookup = Session._identity_lookup  # type: ignore[assignment]  # it takes no further arguments

    def get(self, entity: type[Entity] | Mapper[Entity], ident: Any, **options: Any) -> Entity | None:
        """As :meth:`sqlalchemy.orm.Session.get`, in the one shard that the primary key tells."""
        try:
            shard = self._shard_of_key(inspect(entity, raiseerr=False), ident)
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
            shard_id = self._shard_of(inspect(instance))
        if shard_id is None and self._writing is not None:
            return self._instead(self._shard_connection(self._writing))
        if shard_id is None:
            shard_id = self._inserting
        if shard_id is None and self._placed is not None:
            return self._instead(AssociationConnection(self))
        if shard_id is None:
            raise BadArgument(
                "a session over all shards has no connection of its own",
                hint='Name the shard: bind_arguments={"shard_id": number}',
            )
        node = self.shards.node_of(shard_id)
        self._wanted = node.name
        engine = self.shards.engine(node)
        return self.shards.decisions.engine(engine, node) if self.twophase else engine

    def join(self, connection: Connection) -> None:
        """Makes the transaction on a node one part of the session's; see :mod:`.twophase`."""
        part, root = connection.get_transaction(), self.get_transaction()
        if not isinstance(part, Part) or part.whole is not None:
            return
        if self._whole is None or self._whole[0] is not root:
            self._whole = (root, Whole(self.shards.decisions))
        self._whole[1].add(part)
        self.shards.decisions.require_fit(part.node, connection)

    def _instead(self, connection: Any) -> Engine:
        """Returns a bind that stands for a connection of ours, within a flush or a bulk operation alone."""
        bind: Any = object()
        # Those that the part of a transaction which a flush is keeps for itself are neither begun nor ended.
        self._transaction._connections[bind] = (connection, None, False, False)  # type: ignore[union-attr,assignment]  # see above
        return bind  # type: ignore[no-any-return]  # none, but used as one

    # SQLAlchemy takes its absence for leave to insert many rows at once.
    @property
    def connection_callable(self) -> Any:  # type: ignore[override]  # a method there, None in Session
        """What gives a flush the connection to write an object over; ``None`` during a bulk INSERT."""
        return self._connection_for if self._inserting is None and self._writing is None else None

    def _connection_for(self, mapper: Any = None, instance: Any = None, **_: Any) -> Any:
        return self._shard_connection(self._shard_of(inspect(instance)))

    def _shard_connection(self, shard: int) -> Any:
        return ShardConnection(self.node_connection(shard), self.options_of(shard))

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Any:
        """Returns a node's connection as seen from the shard in ``bind_arguments={"shard_id": …}``."""
        shard = (bind_arguments or {}).get("shard_id")
        self.fail_together()
        connection = super().connection(dict(bind_arguments or {}), execution_options)
        return connection if shard is None else ShardConnection(connection, self.options_of(shard))

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""
        try:
            return super().connection(bind_arguments={"bind": self.get_bind(shard_id=shard)})
        except PoolTimeout as error:
            raise self._no_connection() from error

    def _no_connection(self) -> ConnectionFailed:
        return ConnectionFailed(
            f'no connection of the pool to node "{self._wanted}" became free; this session holds those to'
            f" {len(self.begun)} nodes meanwhile",
            hint="A session over all shards holds a connection per node to the end of its transaction, so"
            " sessions can wait for each other: give Cluster.connect() a pool_size of at least the number of"
            " sessions at a time, or end sessions sooner.",
        )

    connection_to = node_connection

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""
        return {"schema_translate_map": {None: self.shards.schema_of(shard)}}

    def shard_of(self, instance: object) -> int:
        """Returns the shard of a mapped object, also in the events that tell of its loading.

        Raises:
            BadArgument: nothing tells the shard of a new object.
        """
        return self._shard_of(inspect(instance))

    def _shard_of(self, state: State) -> int:
        """Returns the shard of an object that is being flushed, or was."""
        shard = (self._placed or {}).get(state)
        if shard is None:
            shard = shard_of_identity(state, self.shards)
        if shard is None:
            shard = place(self, self.shards)[state]
        return shard

    def _shard_of_key(self, mapper: Any, ident: Any) -> int | None:
        if not isinstance(mapper, Mapper) or isinstance(ident, dict):
            return None
        facts = facts_of(mapper)
        identity = ident if isinstance(ident, tuple | list) else (ident,)
        if len(identity) != len(facts.identity):
            return None
        return facts.shard_of_identity(identity, self.shards)

    def place(self) -> None:
        """Finds the shards of what is about to be flushed; raises before anything is written."""
        self._placed = placed = place(self, self.shards)
        # SQLAlchemy inserts neighbours together: one statement a shard, not one whenever the shard changes.
        new = [state for state in map(inspect, self.new) if state.insert_order is not None]
        orders = sorted(state.insert_order for state in new)
        for state, order in zip(sorted(new, key=lambda s: (placed[s], s.insert_order)), orders, strict=True):
            state.insert_order = order

    def forget(self) -> None:
        """Ends what :meth:`place` began."""
        self._placed = None

    def _autoflushes(self, context: ORMExecuteState) -> bool:
        wanted = self.autoflush and context.execution_options.get("autoflush", True)
        return bool(wanted) and self._placed is None

    def execute_chooser(self, context: ORMExecuteState) -> list[int]:
        """Returns the shards that a statement asks; all of them if it names none."""
        named = Read(context.statement, context.parameters, self.shards, self._flushed).named()
        return self.shards.placement.all_shards() if named.shards is None else sorted(named.shards)

    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        if options.get("_parent_execute_state") is not None:
            return super()._execute_internal(statement, params, **options)
        self.fail_together()
        shard = None if self.dispatch.do_orm_execute else self._only_shard(statement, params, options)
        if shard is None:
            # After all listeners of the application, which may change the statement.
            options["_add_event"] = self._routing_before(options.get("_add_event"))
            return self._execute_with(statement, params, options)
        options["bind_arguments"] = {**(options.get("bind_arguments") or {}), "shard_id": shard}
        given = options.get("execution_options") or {}
        options["execution_options"] = {
            **given,
            "_sa_shard_id": shard,
            ENGINE: "shard",
            **self.options_of(shard),
        }
        return self._execute_with(statement, params, options)

    def _execute_with(self, statement: Any, params: Any, options: dict[str, Any]) -> Any:
        try:
            return super()._execute_internal(statement, params, **options)
        except PoolTimeout as error:
            raise self._no_connection() from error

    def _only_shard(self, statement: Any, params: Any, options: dict[str, Any]) -> int | None:
        """Returns the only shard of a SELECT, if that is plain to see: the quick way, and the usual one.

        Where nobody listens, no event has to be made of the statement, which takes longer than all of this.
        """
        given = (
            options.get("execution_options") or _EMPTY,
            getattr(statement, "_execution_options", _EMPTY),
            getattr(self, "execution_options", _EMPTY),  # Sessions have them from SQLAlchemy 2.1 on.
        )
        if (
            not getattr(statement, "is_select", False)
            or options.get("_add_event") is not None
            or any("_sa_shard_id" in one for one in given)
            or any(isinstance(option, set_shard_id) for option in getattr(statement, "_with_options", ()))
        ):
            return None
        subject = statement._propagate_attrs.get("plugin_subject")
        guard(None if subject is None else subject.mapper)
        shard = (options.get("bind_arguments") or _EMPTY).get("shard_id")
        if shard is not None:
            return int(shard)
        read = Read(statement, params, self.shards, self._flushed)
        named = read.named().shards
        if named is None or len(named) != 1:
            return None
        (shard,) = named
        try:
            if not loads_more(statement):
                read.in_one_shard(statement, partial(self._dialect_of, shard))
        except CannotCombine:
            return None
        return int(shard)

    def _dialect_of(self, shard: int) -> Dialect:
        return self.shards.engine(self.shards.node_of(shard)).dialect

    def _routing_before(self, listener: Any) -> Callable[[ORMExecuteState], Result[Any] | None]:
        """Returns what routes a statement and then calls a listener of SQLAlchemy's own, if there is one."""
        if listener is None:
            return self._route

        def route(context: ORMExecuteState) -> Result[Any] | None:
            routed = self._route(context)
            return listener(context) if routed is None else routed

        return route

    def _route(self, context: ORMExecuteState) -> Result[Any] | None:
        """Sends a statement into its shards; ``None`` if it goes on by itself, into its only one."""
        guard(context.bind_mapper)
        shard = named_beside(context, self.shards, self._inserting)
        if context.is_select and shard is not None:
            self._go_on(context, shard)
            return None
        refuse_reference_write(context.statement)
        if context.is_insert and self._inserting is None:
            return insert_rows(self, context, shard)
        if context.is_update:
            check_assignments(context)
        read = Read(context.statement, context.parameters, self.shards, self._flushed)
        shard = self._shard_at_hand(context.statement, read) if shard is None else shard
        if shard is not None:
            self._go_on(context, shard)
            return None
        named = read.named()
        if named.shards is not None and len(named.shards) <= 1:
            # Criteria that contradict each other find nothing, wherever they are asked.
            only = next(iter(named.shards), 0)
            try:
                if not loads_more(context.statement):
                    read.in_one_shard(context.statement, partial(self._dialect_of, only))
            except CannotCombine as error:
                if self.fan_out != "all" or not context.is_select:
                    raise
                refused = error
            else:
                self._go_on(context, only)
                return None
            if self._autoflushes(context):
                self.flush()
            return by_views(self, context, context.statement, refused, only)
        if self._autoflushes(context):
            self.flush()
        return self._ask_several(context, named)

    def _ask_several(self, context: ORMExecuteState, named: Named) -> Result[Any]:
        if context.is_update:
            if isinstance(context.parameters, Sequence):
                return update_by_key(self, context)
            refuse_many(context.statement, context.parameters)
        return execute(self, context, named)

    def _shard_at_hand(self, statement: Any, read: Read) -> int | None:
        """Returns the shard whose node this session asks for what every node has; ``None`` for the rest."""
        if self._at_hand is None:
            self._at_hand = choice(self.shards.placement.all_shards())  # noqa: S311 -- to spread sessions
        dialect = partial(self._dialect_of, self._at_hand)
        return self._at_hand if read.of_references(statement, dialect) else None

    def _go_on(self, context: ORMExecuteState, shard: int) -> None:
        self._sent_to = shard
        context.bind_arguments["shard_id"] = shard
        context.update_execution_options(_sa_shard_id=shard, **{ENGINE: "shard"}, **self.options_of(shard))


_EMPTY: Final[dict[str, Any]] = {}


@event.listens_for(RoutedSession, "after_begin")
def _join(session: Any, _transaction: object, connection: Connection) -> None:
    session.join(connection)


@event.listens_for(RoutedSession, "before_flush")
def _place(session: Any, *_: object) -> None:
    session.place()


@event.listens_for(RoutedSession, "after_flush")
def _forget(session: Any, *_: object) -> None:
    try:
        session.claim_flushed(session._shard_of)
    finally:
        session.forget()
