"""Execution by the query node of statements whose answers from shards can't be combined."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO
from typing import Any, Final

import psycopg.errors
from sqlalchemy import Connection, Engine, Result, Select, Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import ORMExecuteState
from sqlalchemy.sql import visitors
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.util import await_only

from shardids.catalog.topology import REFERENCE_SCHEMA, Placement
from shardids.client.routing.aggregates import in_two_steps
from shardids.client.routing.fanout import ANY_SHARD, STAND_IN, Replay, compiled, fetched
from shardids.client.routing.nodes import NodeSession
from shardids.client.routing.sent import Kind, as_sent, clauses_of, kinds_on
from shardids.errors import (
    CannotCombine,
    ClusterConflict,
    ConnectionFailed,
    MissingPrivilege,
)
from shardids.logs import logger
from shardids.pg.statement_log import shown_statement

ENGINE: Final = "shardids_engine"
"""The execution option that records how a statement was executed: ``shard``, ``merge`` or ``views``."""

_VIEWS: Final = "shardids_query"
"""The schema of the query node whose views are named as the tables are."""
_PARTITIONED: Final = "shardids_nodes"
"""The schema of its views that also have a column for the node."""
_PATIENCE_S: Final = 5.0
"""How long to wait for a query node that does not read by this process's placement."""
_PAUSE_S: Final = 0.1
_IN_PYTHON: Final = "Select the rows and compute it in Python."

_log = logger("client")

_NOT_THERE: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)
"""Errors of the query node, or of a node behind it, for objects that it does not have."""
_NOT_POSSIBLE: Final = (
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.GroupingError,
    psycopg.errors.WrongObjectType,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.InvalidFunctionDefinition,
)
"""Its errors for statements that it does not execute."""


def by_views(context: ORMExecuteState, statement: Any, refused: CannotCombine, shard: int) -> Result[Any]:
    """Execute a SELECT on the query node, in a separate read-only transaction.

    Args:
        context: the state of the session's execution.
        statement: the SELECT.
        refused: why the shards' answers can't be combined.
        shard: any that the statement concerns.

    Raises:
        CannotCombine: the cluster has no query node, or the query node lacks an object that the statement
            names, or would not see the rows that the session's transaction sees.
        ClusterConflict: the query node does not read the shards where they are.
        MissingPrivilege: the role may not read the views.
        RowsUnsettled: a key's rows are just being moved between two shards.
    """
    session: NodeSession = context.session  # type: ignore[assignment]  # it is one
    if isinstance(statement, Select) and clauses_of(statement).locks:
        raise CannotCombine(
            f"{refused.message}; and the query node can't lock rows",
            hint="Select the primary keys first, and lock the rows by them.",
        ) from refused
    node = session.shards.query_node()
    if node is None:
        raise CannotCombine(
            f"{refused.message}; and the cluster has no query node",
            hint=f"{refused.hint} To create a query node, which can: shardids query-node create".strip(),
        ) from refused
    role = _require_same_view(session, statement, refused, shard)
    engine = session.shards.engine(node)
    try:
        rows, description = _answer(session, engine, statement, context.parameters, role)
    except ConnectionFailed as error:
        raise _of_node(error) from error
    except DBAPIError as error:
        explained = _explained(error, refused)
        if explained is None:
            raise
        session.shards.refresh()
        # The query node hears first that rows are on their way between two shards.
        session.shards.placement.require_settled()
        raise explained from error
    # The shard's node is not asked: the statement is loaded from the rows that are there.
    if _log.isEnabledFor(INFO):
        _log.info("views: %s rows of the query node: %s", len(rows), shown_statement(str(statement)))
    replay = Replay(rows, description)
    return context.invoke_statement(
        statement,
        bind_arguments={"shard_id": shard},
        execution_options={STAND_IN: replay, ENGINE: "views", **session.within(shard)},
    )


def _answer(
    session: NodeSession, engine: Engine, statement: Any, parameters: Any, role: str
) -> tuple[list[Any], Any]:
    """Ask the nodes all at once; and one after another where postgres_fdw can't.

    It uses one connection per node, also for a subquery while an asynchronous scan waits there for rows.
    """
    try:
        with _reading(session, engine, role) as connection:
            return _asked(connection, statement, parameters)
    except ConnectionFailed as error:
        if not isinstance(_said_by_server(error), psycopg.errors.ConnectionFailure):
            raise
    with _reading(session, engine, role) as connection:
        connection.execute(_ONE_AFTER_ANOTHER)
        return _asked(connection, statement, parameters)


_ONE_AFTER_ANOTHER: Final = text("select pg_catalog.set_config('enable_async_append', 'off', true)")


def _said_by_server(error: ConnectionFailed) -> psycopg.Error | None:
    """Return the error that the query node reports about its connection to a node, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, psycopg.Error):
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, psycopg.Error) and cause.diag.sqlstate is not None else None


_FOREIGN: Final = re.compile(r'server "shardids_([^"]+)"')
"""The foreign server of a node."""


def _of_node(error: ConnectionFailed) -> ConnectionFailed:
    """Return the error that names the node which the query node can't reach, if that is the reason."""
    said = _said_by_server(error)
    primary = "" if said is None else said.diag.message_primary or ""
    foreign = _FOREIGN.search(primary)
    if said is None or foreign is None:
        return error
    detail = f": {said.diag.message_detail}" if said.diag.message_detail else ""
    return ConnectionFailed(
        f'the query node can\'t reach node "{foreign[1]}": {primary}{detail}',
        hint="To see the reason and the next command: shardids query-node status",
    )


def _require_same_view(session: NodeSession, statement: Any, refused: CannotCombine, shard: int) -> str:
    """Refuse a statement if the session's transaction would see other rows than the query node's.

    This asks the server, for only the server knows the writes of triggers and cascades.

    Returns:
        the role of the session.
    """
    connection = session.node_connection(shard)
    tables, functions = _named_in(statement, connection)
    kind_of = kinds_on(connection)
    role = ""
    for one in {connection: None, **dict.fromkeys(session.begun)}:
        seen = one.execute(_SEEN, {"schema": session.shards.schema_of(shard), "tables": tables}).one()
        reason, hint = "", refused.hint
        if seen.isolation != "read committed":
            reason = f"the session's transaction is {seen.isolation}, and the query node sees a later moment"
        elif seen.guarded is not None:
            reason = f"row security hides rows of {seen.guarded} from this role, and not on the query node"
        elif seen.written:
            unseen = next((name for name in tables if name in seen.written), None)
            unknown = next((one for one in functions if kind_of(one) is Kind.UNKNOWN), None)
            if unseen is not None or unknown is not None:
                what = unseen or f"tables, and {getattr(unknown, 'name', unknown)}() may read them"
                reason = f"the session has written to {what}, which the query node does not see before COMMIT"
                hint = "Commit first, or ask in another session."
        if reason:
            raise CannotCombine(f"{refused.message}; and {reason}", hint=hint) from refused
        role = seen.role or role
    return role


_SEEN: Final = text("""
    with recursive written(id) as (
      select l.relation from pg_catalog.pg_locks l
      where l.pid = pg_catalog.pg_backend_pid() and l.granted
        and pg_catalog.pg_current_xact_id_if_assigned() is not null
        and l.mode in ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
      union
      select i.inhparent from written w join pg_catalog.pg_inherits i on i.inhrelid = w.id)
    select pg_catalog.current_setting('transaction_isolation') as isolation,
           nullif(current_user, session_user) as role,
           (select pg_catalog.array_agg(c.relname::text)
            from written w join pg_catalog.pg_class c on c.oid = w.id and c.relkind in ('r', 'p')) as written,
           (select min(c.relname::text) from pg_catalog.pg_class c
            where c.relnamespace = pg_catalog.to_regnamespace(pg_catalog.quote_ident(:schema))
              and c.relname = any (:tables)
              and pg_catalog.row_security_active(c.oid)) as guarded""")
"""What only the server knows: a table that the transaction writes to is locked, also by triggers."""


def _named_in(statement: Any, connection: Connection) -> tuple[list[str], list[Any]]:
    """Return the names of the tables, and the functions, in a statement.

    Raises:
        CannotCombine: a table has a schema: it is on the nodes, and another may be on the query node.
    """
    sources = [one for one in as_sent(statement, connection.dialect).sources if one is not None]
    tables: dict[str, None] = {}
    functions: list[Any] = []
    for element in (part for one in (statement, *sources) for part in visitors.iterate(one)):
        if isinstance(element, FunctionElement):
            functions.append(element)
        if isinstance(element, Table):
            tables[element.name] = None
            if element.schema not in (None, REFERENCE_SCHEMA):
                raise CannotCombine(
                    f"{element.fullname} is in a schema of the nodes, which the query node does not show",
                    hint="Execute one select() per table, or name the shard.",
                )
    return list(tables), functions


@contextmanager
def _reading(session: NodeSession, engine: Engine, role: str) -> Iterator[Connection]:
    """Open a transaction on a query node that reads every shard from its owner.

    Each statement has its own: on the nodes, postgres_fdw keeps the snapshots of the first, and a shard that
    came to a node later is not in them.

    Raises:
        ClusterConflict: it does not.
        CannotCombine: the session has another role than it would have there.
    """
    deadline = time.monotonic() + _PATIENCE_S
    reading = engine.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=True)
    with reading.connect() as connection:
        while True:
            digest, role_there = connection.execute(_BEGIN).one()[:2]
            if role and role_there != role:
                raise CannotCombine(
                    f'the session uses role "{role}", but would have role "{role_there}" on the query node',
                    hint="Execute one select() per table, or open the cluster as that role.",
                )
            if digest != _digest(session.shards.placement):
                session.shards.refresh()
            if digest == _digest(session.shards.placement):
                break
            connection.rollback()
            if time.monotonic() > deadline:
                raise ClusterConflict(
                    "the query node does not read every shard from its owner",
                    hint="Refresh it: shardids query-node refresh",
                )
            _pause(connection)
        yield connection
        connection.rollback()


_BEGIN: Final = text("""
    select shardids_query.shardids_placement(), current_user::text,
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


def _asked(connection: Connection, statement: Any, parameters: Any) -> tuple[list[Any], Any]:
    steps = in_two_steps(statement, connection.dialect, kinds_on(connection))
    schema = _VIEWS if steps is None else _PARTITIONED
    capture = compiled(connection, statement if steps is None else steps, parameters)
    sql = capture.sql.replace(f"{ANY_SHARD}.", f"{schema}.").replace(f"{REFERENCE_SCHEMA}.", f"{_VIEWS}.")
    return fetched(connection, sql, capture.parameters)


def _explained(error: DBAPIError, refused: CannotCombine) -> Exception | None:
    """Return the error for an object that the query node lacks; ``None`` if the statement itself is wrong."""
    found: Any = error.orig
    said = found.diag.message_primary if isinstance(found, psycopg.Error) else None
    if isinstance(found, psycopg.errors.InsufficientPrivilege):
        return MissingPrivilege(
            f"the query node: {said}",
            hint="To let the role read all tables there: shardids grant ROLE --query-node",
        )
    if isinstance(found, _NOT_THERE + _NOT_POSSIBLE):
        refresh = "If tables have changed: shardids query-node refresh. Or: "
        hint = f"{refresh if isinstance(found, _NOT_THERE) else ''}{_IN_PYTHON}"
        return CannotCombine(f"{refused.message}; and the query node says: {said}", hint=hint)
    return None
