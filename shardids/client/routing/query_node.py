"""Gives the query node the statements whose answers from shards can't be combined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO
from typing import Any, Final, Literal, Protocol
from weakref import WeakKeyDictionary

import psycopg.errors
from sqlalchemy import Connection, Engine, Result, Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import ORMExecuteState
from sqlalchemy.sql import visitors
from sqlalchemy.util import await_only

from shardids.catalog.statement_log import shown_statement
from shardids.catalog.topology import Node, Placement
from shardids.client.routing.fanout import ANY_SHARD, compiled, fetched
from shardids.client.routing.functions import kinds_on
from shardids.client.routing.replay import STAND_IN, Replay
from shardids.client.routing.sent import as_sent
from shardids.client.routing.two_steps import in_two_steps
from shardids.errors import (
    BadArgument,
    CannotCombine,
    ClusterConflict,
    ConnectionFailed,
    MissingPrivilege,
)
from shardids.logs import logger

EngineChoice = Literal["merge", "views", "refuse"]
"""What becomes of a statement over several shards: what is known to be right is merged, and the rest refused;
or the query node has the rest; or all are refused."""

ENGINE: Final = "shardids_engine"
"""The execution option that says which way a statement went: ``shard``, ``merge`` or ``views``."""

_VIEWS: Final = "shardids_query"
"""The schema of the query node whose views are named as the tables are."""
_PARTITIONED: Final = "shardids_nodes"
"""The schema of its views that have a column for the node, too."""
_PATIENCE_S: Final = 5.0
"""How long to wait for a query node that does not read by this process's placement."""
_PAUSE_S: Final = 0.1
_HINT: Final = "If tables have changed: shardids view refresh. Or select the rows and compute it in Python."

_log = logger("client")

_NOT_THERE: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.GroupingError,
    psycopg.errors.WrongObjectType,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.InvalidFunctionDefinition,
)
"""What the query node, or a node behind it, says of what it does not have or does not do."""


class Shards(Protocol):
    """What is asked of the cluster."""

    @property
    def placement(self) -> Placement:
        """Which node holds which shard."""

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard now."""

    def query_node(self) -> Node | None:
        """Returns the query node, if there is one."""

    def refresh(self) -> bool:
        """Reads the placement and the query node's address again."""

    def engine(self, node: Node) -> Engine:
        """Returns the engine of a database."""


class Router(Protocol):
    """What is asked of the session over all shards."""

    @property
    def shards(self) -> Shards:
        """The cluster."""

    @property
    def begun(self) -> list[Connection]:
        """The connections that the session's transaction uses."""

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""


def by_views(router: Router, context: ORMExecuteState, refused: CannotCombine, shard: int) -> Result[Any]:
    """Executes a SELECT on the query node, in a transaction of its own that only reads.

    Args:
        router: the session.
        context: the statement.
        refused: why the shards' answers can't be combined.
        shard: any that the statement concerns.

    Raises:
        CannotCombine: there is no query node, or it lacks what the statement names, or it would not see
            what the session's transaction sees.
        ClusterConflict: the query node does not read the shards where they are.
        MissingPrivilege: the role may not read the views.
    """
    node = router.shards.query_node()
    if node is None:
        raise CannotCombine(
            refused.message,
            hint=f"{refused.hint} A query node could: shardids view create --all".strip(),
        ) from refused
    _require_same_view(router, refused)
    engine = router.shards.engine(node)
    try:
        rows, description = _answer(router, engine, context)
    except DBAPIError as error:
        explained = _explained(error, refused)
        if explained is None:
            raise
        router.shards.refresh()
        raise explained from error
    # The shard's node is not asked: the statement is loaded from the rows that are there.
    if _log.isEnabledFor(INFO):
        _log.info("views: %s rows of the query node: %s", len(rows), shown_statement(str(context.statement)))
    replay = Replay.of(rows, description)
    return context.invoke_statement(
        bind_arguments={"shard_id": shard},
        execution_options={STAND_IN: replay, ENGINE: "views", **router.options_of(shard)},
    )


def _answer(router: Router, engine: Engine, context: ORMExecuteState) -> tuple[list[Any], Any]:
    """Asks the nodes all at once; and one after another where postgres_fdw can't.

    It uses one connection a node, also for a subquery while an asynchronous scan waits there for rows.
    """
    try:
        with _reading(router, engine) as connection:
            return _asked(connection, context)
    except ConnectionFailed as error:
        if not _is_said_by_server(error):
            raise
    with _reading(router, engine) as connection:
        connection.execute(_ONE_AFTER_ANOTHER)
        return _asked(connection, context)


_ONE_AFTER_ANOTHER: Final = text("select pg_catalog.set_config('enable_async_append', 'off', true)")


def _is_said_by_server(error: ConnectionFailed) -> bool:
    """Whether the query node itself answers, and says so of a connection of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, psycopg.Error):
        cause = cause.__cause__ or cause.__context__
    return isinstance(cause, psycopg.errors.ConnectionFailure) and cause.diag.sqlstate is not None


def _require_same_view(router: Router, refused: CannotCombine) -> None:
    """Refuses where the session's transaction would see something else than the query node's.

    The server is asked, for it alone knows what triggers and cascades have written.
    """
    for connection in router.begun:
        has_written, isolation = connection.execute(_SEEN).one()
        if has_written or isolation != "read committed":
            what = (
                "the session has written what is not committed yet, which the query node does not see"
                if has_written
                else f"the session's transaction is {isolation}, and the query node sees a later moment"
            )
            raise CannotCombine(
                f"{refused.message}; and {what}",
                hint="Commit first, or ask in another session." if has_written else refused.hint,
            ) from refused


_SEEN: Final = text(
    "select pg_catalog.pg_current_xact_id_if_assigned() is not null,"
    " pg_catalog.current_setting('transaction_isolation')"
)


@contextmanager
def _reading(router: Router, engine: Engine) -> Iterator[Connection]:
    """Opens a transaction on a query node that reads every shard from its owner.

    Each statement has its own: on the nodes, postgres_fdw keeps the snapshots of the first, and a shard that
    came to a node later is not in them.

    Raises:
        ClusterConflict: it does not.
    """
    deadline = time.monotonic() + _PATIENCE_S
    reading = engine.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=True)
    with reading.connect() as connection:
        while True:
            digest = connection.scalar(_BEGIN)
            if digest != _digest(router.shards.placement):
                router.shards.refresh()
            if digest == _digest(router.shards.placement):
                break
            connection.rollback()
            if time.monotonic() > deadline:
                raise ClusterConflict(
                    "the query node does not read every shard from its owner",
                    hint="Refresh it: shardids view refresh",
                )
            _pause(connection)
        yield connection
        connection.rollback()


_BEGIN: Final = text("""
    select shardids_query.shardids_placement(),
           pg_catalog.set_config('enable_partitionwise_join', 'on', true),
           pg_catalog.set_config('enable_partitionwise_aggregate', 'on', true),
           pg_catalog.set_config('search_path', pg_catalog.concat_ws(
             ', ', 'shardids_query', nullif(pg_catalog.current_setting('search_path'), '')), true)""")


def _pause(connection: Connection) -> None:
    if connection.dialect.is_async:
        await_only(asyncio.sleep(_PAUSE_S))
    else:
        time.sleep(_PAUSE_S)


_last_digest: tuple[Placement, str] | None = None


def _digest(placement: Placement) -> str:
    global _last_digest  # noqa: PLW0603 -- one placement at a time is in use, and its digest is 1 ms of work
    known = _last_digest
    if known is None or known[0] is not placement:
        _last_digest = known = (placement, placement.digest())
    return known[1]


_CHECKED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""What was compiled and reads no table but those of shards."""


def _asked(connection: Connection, context: ORMExecuteState) -> tuple[list[Any], Any]:
    capture = compiled(connection, context.statement, context.parameters)
    if capture.compiled not in _CHECKED:
        _refuse_fixed_schemas(context.statement, connection)
        _CHECKED[capture.compiled] = True
    steps = in_two_steps(context.statement, connection.dialect, kinds_on(connection))
    schema = _VIEWS
    if steps is not None:
        # Compiled again: a cached one would have another statement's values.
        schema, capture = _PARTITIONED, compiled(connection, steps, context.parameters)
    return fetched(connection, capture.sql.replace(f"{ANY_SHARD}.", f"{schema}."), capture.parameters)


def _refuse_fixed_schemas(statement: Any, connection: Connection) -> None:
    """Refuses a table with a schema: it is on the nodes, and another may be on the query node."""
    parts = as_sent(statement, connection.dialect).parts.values()
    sources = [source for _, _, froms in parts for source in froms]
    for element in (part for one in (statement, *sources) for part in visitors.iterate(one)):
        if isinstance(element, Table) and element.schema is not None:
            raise CannotCombine(
                f"{element.fullname} is in a schema of the nodes, and the query node shows those of shards",
                hint="Execute one select() a table, or name the shard.",
            )


def _explained(error: DBAPIError, refused: CannotCombine) -> Exception | None:
    """Returns the error for what the query node does not have; ``None`` if the statement itself is wrong."""
    found: Any = error.orig
    said = found.diag.message_primary if isinstance(found, psycopg.Error) else None
    if isinstance(found, psycopg.errors.InsufficientPrivilege):
        return MissingPrivilege(
            f"the query node: {said}",
            hint=f"GRANT USAGE ON SCHEMA {_VIEWS}, {_PARTITIONED} and"
            f" GRANT SELECT ON ALL TABLES IN SCHEMA {_VIEWS}, {_PARTITIONED} there.",
        )
    if isinstance(found, _NOT_THERE):
        return CannotCombine(f"{refused.message}; and the query node says: {said}", hint=_HINT)
    return None


def validated(engine: str) -> EngineChoice:
    """Returns the engine's name. Raises BadArgument if there is no such engine."""
    for known in ("merge", "views", "refuse"):
        if engine == known:
            return known
    raise BadArgument(f"engine={engine!r} is not known", hint='It is "merge", "views" or "refuse".')
