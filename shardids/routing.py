"""A session over all shards of a cluster, and one that keeps to a single shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from sqlalchemy import Connection, Engine, Executable, Result, event, inspect
from sqlalchemy.ext.horizontal_shard import ShardedQuery, ShardedSession, set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState, Session

from shardids.criteria import shards_named
from shardids.errors import BadArgument
from shardids.models import ShardFinder, facts_of
from shardids.placing import State, keep_home, place, shard_of_identity
from shardids.topology import Node

FanOut = Literal["allow", "error"]
"""What becomes of a statement that names no shard: it asks all shards, or it is refused."""


class Shards(ShardFinder, Protocol):
    """What a session over all shards asks the cluster."""

    def node_of(self, shard: int) -> Node:
        """The node that holds a shard now."""

    def engine(self, node: Node) -> Engine:
        """The engine of a node."""

    def schema_of(self, shard: int) -> str:
        """The schema of a shard."""


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


class RoutedSession(ShardedSession):
    """A session over all shards; see :meth:`shardids.Cluster.sharded_session`.

    It has one connection and one transaction a node, whatever the number of shards that it uses there.
    """

    def __init__(self, shards: Shards, *, fan_out: FanOut = "allow", **options: Any) -> None:
        # Not ShardedSession's own, which binds each shard and listens anew for each session.
        Session.__init__(self, **{"query_cls": ShardedQuery, **options})
        self.shards = shards
        self.fan_out = fan_out
        self.identity_chooser = self._tokens
        self._placed: dict[State, int] = {}

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
        """The engine of the node that holds the shard, which all shards of the node share.

        Raises:
            BadArgument: no shard is named.
        """
        if shard_id is None and instance is not None:
            shard_id = self._shard_of(inspect(instance))
        if shard_id is None:
            raise BadArgument(
                "a session over all shards has no connection of its own",
                hint='Name the shard: bind_arguments={"shard_id": number}',
            )
        return self.shards.engine(self.shards.node_of(shard_id))

    def connection_callable(
        self, mapper: Any = None, instance: Any = None, shard_id: Any = None, **_: Any
    ) -> Any:
        """The connection that a flush writes an object over."""
        shard = self._shard_of(inspect(instance)) if shard_id is None else shard_id
        connection = self.connection(bind_arguments={"bind": self.get_bind(shard_id=shard)})
        return ShardConnection(connection, self.options_of(shard))

    def options_of(self, shard: int) -> dict[str, Any]:
        """The execution options that send a statement into a shard."""
        return {"schema_translate_map": {None: self.shards.schema_of(shard)}}

    def _shard_of(self, state: State) -> int:
        """The shard of an object that is being flushed, or was."""
        shard = self._placed.get(state)
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

    def _tokens(
        self, mapper: Mapper[Any], primary_key: Any, *, lazy_loaded_from: State | None = None, **_: Any
    ) -> Iterable[str | None]:
        """The identity tokens that a row of this primary key may have: see :func:`token`."""
        return [None]

    def place(self) -> None:
        """Finds the shards of what is about to be flushed; raises before anything is written."""
        self._placed = place(self, self.shards)

    def forget(self) -> None:
        """Ends what :meth:`place` began."""
        self._placed = {}

    def route(self, context: ORMExecuteState) -> Result[Any] | None:
        """Sends a statement into its shards; ``None`` if it goes on by itself, into its only one."""
        shard = self._named(context)
        if shard is not None:
            self._go_on(context, shard)
            return None
        where = getattr(context.statement, "whereclause", None)
        named = shards_named(where, context.parameters, self.shards)
        if named.shards is not None and len(named.shards) <= 1:
            # Criteria that contradict each other find nothing, wherever they are asked.
            self._go_on(context, next(iter(named.shards), 0))
            return None
        raise BadArgument("the statement does not name a single shard")

    def _go_on(self, context: ORMExecuteState, shard: int) -> None:
        context.bind_arguments["shard_id"] = shard
        context.update_execution_options(_sa_shard_id=shard, **self.options_of(shard))

    def _named(self, context: ORMExecuteState) -> int | None:
        """The shard that is named beside the statement, in one of SQLAlchemy's ways."""
        # SQLAlchemy has no public way to see the options of its own extension.
        for option in context._non_compile_orm_options:
            if isinstance(option, set_shard_id):
                return int(option.shard_id)
        named = context.bind_arguments.get("shard_id", context.execution_options.get("_sa_shard_id"))
        return None if named is None else int(named)


class HomeSession(Session):
    """A plain session on one shard that writes no object of another; see :meth:`shardids.Cluster.session`."""

    def __init__(self, bind: Engine, *, finder: ShardFinder, shard: int, **options: Any) -> None:
        super().__init__(bind, **options)
        self.finder = finder
        self.shard = shard


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


@event.listens_for(HomeSession, "before_flush")
def _keep_home(session: Any, *_: object) -> None:
    keep_home(session, session.finder, session.shard)
