"""A session over all shards of a cluster, and one that keeps to a single shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Result, event, inspect
from sqlalchemy.ext.horizontal_shard import ShardedQuery, ShardedSession, set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState, Session

from shardids.client.routing.connection import ShardConnection
from shardids.client.routing.criteria import shards_named
from shardids.client.routing.inserts import insert
from shardids.client.routing.models import ShardFinder, facts_of, require_located
from shardids.client.routing.one_shard import refuse_objects, refuse_statement
from shardids.client.routing.placing import State, place, shard_of_identity
from shardids.client.routing.statements import FanOut, Shards, check_assignments, execute
from shardids.errors import BadArgument


class RoutedSession(ShardedSession):
    """A session over all shards; see :meth:`shardids.Cluster.sharded_session`.

    It has one connection and one transaction a node, whatever the number of shards that it uses there.
    """

    def __init__(self, shards: Shards, *, fan_out: FanOut = "allow", **options: Any) -> None:
        # Not ShardedSession's own, which binds each shard and listens anew for each session.
        Session.__init__(self, **{"query_cls": ShardedQuery, **options})
        self.shards = shards
        self.fan_out = fan_out
        self.identity_chooser = lambda *_, **__: [None]
        self._placed: dict[State, int] | None = None
        self._inserting: int | None = None

    # IDs tell rows of different shards apart, so there is one identity, not one for each shard to look up.
    _identity_lookup = Session._identity_lookup  # type: ignore[assignment]  # it takes no further arguments

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        """As :meth:`sqlalchemy.orm.Session.get`, in the one shard that the primary key tells."""
        shard = self._shard_of_key(inspect(entity, raiseerr=False), ident)
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
        if shard_id is None:
            shard_id = self._inserting
        if shard_id is None:
            raise BadArgument(
                "a session over all shards has no connection of its own",
                hint='Name the shard: bind_arguments={"shard_id": number}',
            )
        return self.shards.engine(self.shards.node_of(shard_id))

    # SQLAlchemy takes its absence for leave to insert many rows at once.
    @property
    def connection_callable(self) -> Any:  # type: ignore[override]  # a method there, None in Session
        """What gives a flush the connection to write an object over; ``None`` during a bulk INSERT."""
        return self._connection_for if self._inserting is None else None

    def _connection_for(self, mapper: Any = None, instance: Any = None, **_: Any) -> Any:
        shard = self._shard_of(inspect(instance))
        return ShardConnection(self.node_connection(shard), self.options_of(shard))

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Any:
        """Returns a node's connection as seen from the shard in ``bind_arguments={"shard_id": …}``."""
        shard = (bind_arguments or {}).get("shard_id")
        connection = super().connection(dict(bind_arguments or {}), execution_options)
        return connection if shard is None else ShardConnection(connection, self.options_of(shard))

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""
        return super().connection(bind_arguments={"bind": self.get_bind(shard_id=shard)})

    @contextmanager
    def inserting(self, shard: int) -> Iterator[None]:
        """While rows are inserted into one shard, not objects into any."""
        self._inserting = shard
        try:
            yield
        finally:
            self._inserting = None

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""
        return {"schema_translate_map": {None: self.shards.schema_of(shard)}}

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
        named = shards_named(getattr(context.statement, "whereclause", None), context.parameters, self.shards)
        return sorted(self.shards.placement.node_of if named.shards is None else named.shards)

    def route(self, context: ORMExecuteState) -> Result[Any] | None:
        """Sends a statement into its shards; ``None`` if it goes on by itself, into its only one."""
        if context.bind_mapper not in _GUARDED:
            _guard(context.bind_mapper)
        if context.is_select and "shard_id" in context.bind_arguments:
            # All that get() needs: this is the quick way through.
            self._go_on(context, int(context.bind_arguments["shard_id"]))
            return None
        shard = self._named(context)
        if context.is_insert and self._inserting is None:
            return insert(self, context, shard)
        if context.is_update:
            check_assignments(context)
        if shard is not None:
            self._go_on(context, shard)
            return None
        where = getattr(context.statement, "whereclause", None)
        named = shards_named(where, context.parameters, self.shards)
        if named.shards is not None and len(named.shards) <= 1:
            # Criteria that contradict each other find nothing, wherever they are asked.
            self._go_on(context, next(iter(named.shards), 0))
            return None
        if self._autoflushes(context):
            self.flush()
        return execute(self, context, named)

    def _go_on(self, context: ORMExecuteState, shard: int) -> None:
        context.bind_arguments["shard_id"] = shard
        context.update_execution_options(_sa_shard_id=shard, **self.options_of(shard))

    def _named(self, context: ORMExecuteState) -> int | None:
        """Returns the shard that is named beside the statement, in one of SQLAlchemy's ways."""
        named = context.bind_arguments.get("shard_id")
        if named is None:
            # SQLAlchemy has no public way to see the options of its own extension.
            options = context._non_compile_orm_options
            named = next((option.shard_id for option in options if isinstance(option, set_shard_id)), None)
        if named is None:
            named = context.execution_options.get("_sa_shard_id")
        if named is None and context.is_insert:
            named = self._inserting
        return None if named is None else int(named)


class ShardSession(Session):
    """A plain session on one shard, which refuses objects of others; see :meth:`shardids.Cluster.session`."""

    def __init__(self, bind: Engine, *, finder: ShardFinder, shard: int, **options: Any) -> None:
        super().__init__(bind, **options)
        self.finder = finder
        self.shard = shard


@cache
def session_class(ours: type[Session], theirs: type[Session] | None) -> type[Session]:
    """Returns a class with what a session class of shardids does and what the application's own adds."""
    if theirs is None or issubclass(ours, theirs):
        return ours
    if issubclass(theirs, ours):
        return theirs
    return type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__})


_GUARDED: WeakSet[Mapper[Any]] = WeakSet()


def _guard(mapper: Mapper[Any] | None) -> None:
    """Sees to it that no session over all shards loads objects which it could not tell apart.

    It looks at all models that are declared together with this one, for a join may load any of them.
    """
    if mapper is None:
        return
    for model in mapper.registry.mappers:
        if model not in _GUARDED and not facts_of(model).located:
            event.listen(model, "load", _refuse)
        _GUARDED.add(model)


def _refuse(target: object, context: Any) -> None:
    if isinstance(context.session, RoutedSession):
        require_located(inspect(type(target)))


@event.listens_for(RoutedSession, "do_orm_execute", retval=True)
def _route(context: ORMExecuteState) -> Result[Any] | None:
    session: Any = context.session
    routed: Result[Any] | None = session.route(context)
    return routed


@event.listens_for(RoutedSession, "before_flush")
def _place(session: Any, *_: object) -> None:
    session.place()


@event.listens_for(RoutedSession, "after_flush")
def _forget(session: Any, *_: object) -> None:
    session.forget()


@event.listens_for(ShardSession, "before_flush")
def _keep_to_shard(session: Any, *_: object) -> None:
    refuse_objects(session, session.finder, session.shard)


@event.listens_for(ShardSession, "do_orm_execute")
def _keep_statement_to_shard(context: ORMExecuteState) -> None:
    session: Any = context.session
    if not (context.is_column_load or context.is_relationship_load):
        refuse_statement(context, session.finder, session.shard)
