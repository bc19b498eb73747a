"""Connections to PostgreSQL: their settings, errors, time limits, and their end in the child of a fork."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.abc import PQGen
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, Pool

from shardids.errors import (
    ClusterConflict,
    CommitUncertain,
    ConnectionFailed,
    KeyMoved,
    MissingPrivilege,
    ShardFenced,
    ShardidsError,
    StatementFailed,
    UnknownShard,
    UnsupportedServer,
    from_database,
)
from shardids.pg.statement_log import log_statements
from shardids.pg.urls import role_of, shown_url

T = TypeVar("T")

_duties: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def in_child(owner: T, do: Callable[[T], object]) -> None:
    """Let ``do(owner)`` be called in the child of every fork, as long as ``owner`` lives.

    ``do`` must not hold ``owner``: pass a function, not a bound method.
    """
    _duties[owner] = do


def _do_all() -> None:
    for owner, do in list(_duties.items()):
        do(owner)


os.register_at_fork(after_in_child=_do_all)

SILENT_S: Final = 5.0
"""How long a statement runs before the server is asked whether it still does."""
_PROBE_S: Final = 3
_GRACE_S: Final = 1.0
"""For an answer that was sent when the server was asked."""

_SILENCE_S: Final = 20
"""How long a network may drop packets before TCP gives a connection up, idle or not."""
_KEEPALIVES: Final[Mapping[str, int]] = {
    "keepalives": 1,
    "keepalives_idle": _SILENCE_S // 2,
    "keepalives_interval": _SILENCE_S // 8,
    "keepalives_count": 4,
    "tcp_user_timeout": _SILENCE_S * 1000,
}


class WatchedConnection(psycopg.Connection[Any]):
    """A connection that is given up when the server has stopped working for it.

    TCP's own timers find a network that drops packets, but not a proxy or firewall that keeps a connection
    open and forwards nothing. So a second connection asks the server, every few seconds of a statement,
    whether this session is at work. A statement may take as long as it likes; one whose answer can't arrive
    raises :class:`psycopg.OperationalError` within 10 seconds.
    """

    server_pid: int | None = None
    """The process that serves the connection; ``None`` behind a pooler, where it may be another each time."""

    def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        """Wait as psycopg does."""
        return super().wait(self._watched(gen), *arguments, **options)

    def _watched(self, work: PQGen[T]) -> PQGen[T]:
        heard, is_last_chance = monotonic(), False
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if ready:
                    heard, is_last_chance = monotonic(), False
                elif monotonic() - heard > (_GRACE_S if is_last_chance else SILENT_S):
                    if is_last_chance or (is_at_work := self._is_at_work()) is None:
                        self.pgconn.finish()
                        raise psycopg.OperationalError("the server no longer answers on this connection")
                    heard, is_last_chance = monotonic(), not is_at_work
                wanted = work.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result

    def _is_at_work(self) -> bool | None:
        """Return whether the server runs a statement for this connection; ``None`` if it can't be asked."""
        info = self.info
        try:
            with _Probe.connect(
                info.dsn,
                password=info.password or None,
                host=info.host,
                port=info.port,
                connect_timeout=_PROBE_S,
                autocommit=True,
            ) as probe:
                if self.server_pid is None:
                    return True
                row = probe.execute(
                    "select state operator(pg_catalog.=) 'active' from pg_catalog.pg_stat_activity"
                    " where pid operator(pg_catalog.=) %s",
                    [self.server_pid],
                ).fetchone()
        except psycopg.Error:
            return None
        return row is not None and row[0] is not False


class _Probe(psycopg.Connection[Any]):
    """A connection for a single question: it is given up when it takes long."""

    def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        return super().wait(self._bounded(gen), *arguments, **options)

    def _bounded(self, work: PQGen[T]) -> PQGen[T]:
        began = monotonic()
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if not ready and monotonic() - began > _PROBE_S:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("no answer")
                wanted = work.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


def connect_watched(*arguments: Any, **options: Any) -> WatchedConnection:
    """Connect. Options of the URL are used before TCP's of here."""
    return WatchedConnection.connect(*arguments, **{**_KEEPALIVES, **options})


SAFE_PATH = "pg_catalog, pg_temp"
"""A search_path with only PostgreSQL's functions and operators: pg_temp is not searched for them."""
_PINNED = (("search_path", SAFE_PATH), ("datestyle", "ISO"), ("statement_timeout", "0"))
"""Settings of administrative sessions; psycopg can't read times in another style.

Timeouts that are set for a role, a database or a server are meant for applications; those of locks and of
idle sessions also hold here.
"""
_PINNED_SINCE_17 = (("transaction_timeout", "0"),)
_HAS_OWN_SESSION = "shardids_has_own_session"

_TRANSACTION_ENDED = ("25P03", "25P04")
"""SQLSTATEs of a session that the server ends because its transaction is idle or open for too long."""

OLDEST_SERVER = 14
"""The oldest major version of PostgreSQL that is supported."""

CONNECT_TIMEOUT_S = 10
"""How long to try each address of a server that does not answer; psycopg's default is 130 s."""


def _guarded(
    connect: Callable[..., Any], guard: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        with guard():
            return connect(*arguments, **options)

    return guarded


def open_engine(
    url: URL,
    *,
    what: str,
    administrative: bool = False,
    connect_timeout_s: int | None = None,
    is_watched: bool = False,
    guard: Callable[[], AbstractContextManager[object]] | None = None,
    create: Callable[..., Engine] = create_engine,
    **options: Any,
) -> Engine:
    """Return an engine whose errors are shardids' own and name the server.

    ``what`` is that name: ``the catalog`` or ``node "a"``.

    Statements that repeat are prepared on the server, unless a pooler stands before it or ``options`` have
    a ``prepare_threshold``; those of administrative engines never. Nothing is connected yet. The child of a
    fork makes its own connections.

    ``administrative``: for shardids' own statements, which run under READ COMMITTED. Every failure becomes a
    ShardidsError; otherwise only lost connections and the errors that shardids defines do, and the rest stay
    SQLAlchemy's.
    In such sessions names without a schema are PostgreSQL's own: see :func:`_pin_settings`.

    ``connect_timeout_s``: how long each of the server's addresses is tried, unless the URL or
    ``PGCONNECT_TIMEOUT`` says it.

    ``is_watched``: also of others, a connection is given up when its server has fallen silent, as those of
    administrative engines are: see :mod:`shardids.pg.connections`.

    ``guard`` makes the context of each attempt to connect, which may refuse it.

    ``create``: what makes the engine; the default is :func:`sqlalchemy.create_engine`.
    """
    # A database of encoding SQL_ASCII would give bytes.
    given = options.pop("connect_args", {})
    connect_args = {"prepare_threshold": None, "client_encoding": "utf8"} | given
    is_timeout_given = "connect_timeout" in url.query or "PGCONNECT_TIMEOUT" in os.environ
    if connect_timeout_s is not None and not is_timeout_given:
        connect_args = {"connect_timeout": connect_timeout_s} | connect_args
    if administrative:
        options["isolation_level"] = "READ COMMITTED"
        # SQLAlchemy would look the type hstore up by a query that others' operators can answer.
        options["use_native_hstore"] = False
    engine = create(url, connect_args=connect_args, **options)
    # Not by do_connect, whose first listener keeps others from being called: an application's, or a test's.
    dialect: Any = engine.dialect
    if administrative or is_watched:
        dialect.connect = connect_watched
    if guard is not None:
        dialect.connect = _guarded(dialect.connect, guard)
    on_connect(engine, _find_out_who_serves)
    if administrative:
        _pin_settings(engine)
    elif "prepare_threshold" not in given:
        on_connect(engine, _prepare_what_repeats)

    @event.listens_for(engine, "handle_error", retval=True)
    def _translate(context: ExceptionContext) -> BaseException | None:
        error = context.original_exception
        # The pool replaces a connection whose ping fails, unless another error is raised in its place.
        if context.is_pre_ping or not isinstance(error, psycopg.Error):
            return None
        if has_stale_plan(error) and context.connection is not None:
            driver: Any = context.connection.connection.driver_connection
            if driver.autocommit:
                # No ROLLBACK will come, after which psycopg prepares anew.
                context.is_disconnect = True
                context.invalidate_pool_on_disconnect = False
        ours = translate(error, what=what, url=url)
        if ours is None and administrative:
            ours = statement_failed(error, what, url)
        if isinstance(ours, ConnectionFailed) and _ended_a_transaction(context):
            return CommitUncertain(
                f"{what} was lost at {shown_url(url)} during COMMIT or ROLLBACK: {_reason(error)}",
                hint="Check whether the transaction was committed before you run it again.",
            )
        return ours

    log_statements(engine, what)
    on_connect(engine, lambda connection, _record: check_version(connection.info.server_version, what=what))
    in_child(engine, _leave_connections_to_the_parent)
    return engine


def on_connect(engine: Engine, do: Callable[[psycopg.Connection[Any], ConnectionPoolEntry], object]) -> None:
    """Call ``do(connection, record)`` for each new connection of an engine.

    If it raises, the connection is closed: SQLAlchemy would leave it open.
    """

    @event.listens_for(engine, "connect")
    def _do(connection: psycopg.Connection[Any], record: ConnectionPoolEntry) -> None:
        try:
            do(connection, record)
        except BaseException:
            connection.close()
            raise


_PREPARE_THRESHOLD: Final = 5
"""psycopg's default: how often a statement is sent before it is prepared."""
_MOST_PREPARED: Final = 32
"""Of a connection. A third of psycopg's: the plan of a query over 512 shards of a node takes 7 MB."""


def _find_out_who_serves(connection: Any, record: ConnectionPoolEntry) -> None:
    """Note whether the connection has a session to itself: a pooler reports other process numbers.

    A pooler in session mode also does, although its sessions are reliable: the client can't distinguish it.
    """
    # That of an engine in autocommit mode stays.
    autocommit, connection.autocommit = connection.autocommit, True
    cursor = connection.cursor()
    cursor.execute("select pg_catalog.pg_backend_pid()")
    (process,) = cursor.fetchone()
    cursor.close()
    connection.autocommit = autocommit
    is_own = process == connection.info.backend_pid
    record.info[_HAS_OWN_SESSION] = is_own
    if isinstance(connection, WatchedConnection) and is_own:
        connection.server_pid = process


def has_own_session(connection: Connection) -> bool:
    """Return whether a connection of :func:`open_engine` has a session to itself, without a pooler."""
    return bool(connection.info.get(_HAS_OWN_SESSION))


def _prepare_what_repeats(connection: Any, record: ConnectionPoolEntry) -> None:
    """Let psycopg prepare statements, except behind a pooler.

    In transaction mode it would send the next execution to a server connection that has not prepared it.
    """
    if record.info[_HAS_OWN_SESSION]:
        # That of asyncio is behind an adapter.
        driver: Any = getattr(connection, "driver_connection", connection)
        driver.prepare_threshold = _PREPARE_THRESHOLD
        driver.prepared_max = _MOST_PREPARED


def _pin_settings(engine: Engine) -> None:
    """Keep functions, operators and types that others plant in ``public`` out of shardids' own statements.

    Also dates in another style, and timeouts that would end long statements. A session without a pooler gets
    safe settings once. Behind a pooler they would reach other clients' sessions: there each transaction
    begins with them, and a statement in autocommit mode has to qualify its names.
    """

    def _pin(connection: psycopg.Connection[Any], record: ConnectionPoolEntry) -> None:
        if record.info[_HAS_OWN_SESSION]:
            connection.autocommit = True
            connection.execute(f"select {_set_pinned(connection, is_local=False)}")
            connection.autocommit = False

    on_connect(engine, _pin)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if not has_own_session(connection) and not is_autocommit(connection):
            driver = connection.connection.driver_connection
            connection.exec_driver_sql(f"select {_set_pinned(driver, is_local=True)}")


def _set_pinned(connection: Any, *, is_local: bool) -> str:
    pinned = _PINNED + (_PINNED_SINCE_17 if connection.info.server_version >= 170000 else ())
    return ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', {str(is_local).lower()})" for name, value in pinned
    )


def is_autocommit(connection: Connection) -> bool:
    """Return whether each statement is a transaction; a connection's options begin as its engine's."""
    return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


_of_the_parent: list[Pool] = []
"""Keeps, in the child of a fork, the connections that it must neither use nor close."""


def _leave_connections_to_the_parent(engine: Engine) -> None:
    _of_the_parent.append(engine.pool)
    engine.dispose(close=False)


def _ended_a_transaction(context: ExceptionContext) -> bool:
    """Return whether COMMIT or ROLLBACK failed: they reach the driver without a statement."""
    nothing_executed = context.statement is None and context.execution_context is None
    return context.connection is not None and nothing_executed


def may_have_moved(error: BaseException) -> bool:
    """Return whether an error may mean that the shard or the key has moved, or that its node is gone.

    After such an error nothing was committed; :class:`CommitUncertain` is therefore not among them.
    """
    if isinstance(error, DBAPIError):
        # What is left when the old node's copy of the schema is dropped.
        gone = (
            psycopg.errors.InvalidSchemaName,
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
        )
        return isinstance(error.orig, gone)
    lost = isinstance(error, ConnectionFailed) and not isinstance(error, CommitUncertain)
    return lost or isinstance(error, ShardFenced | UnknownShard | KeyMoved)


def has_stale_plan(error: BaseException) -> bool:
    """Return whether a prepared statement failed because its columns' types have changed since.

    After the rollback psycopg prepares it anew.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, psycopg.errors.FeatureNotSupported):
        return False
    return cause.diag.source_function == "RevalidateCachedQuery"


def keep_commits(engine: Engine) -> None:
    """Make every COMMIT of an engine wait for the server's disk, whatever ``synchronous_commit`` is there.

    Only for direct connections: behind a pooler in transaction mode the setting reaches other sessions.
    """

    def _keep(connection: psycopg.Connection[Any], _record: object) -> None:
        connection.execute("set synchronous_commit = on")
        connection.commit()

    on_connect(engine, _keep)


def keep_settings(engine: Engine, settings: Mapping[str, str]) -> None:
    """Give every session of an engine these settings; as :func:`keep_commits`, only without a pooler."""

    def _keep(connection: psycopg.Connection[Any], _record: object) -> None:
        connection.execute(
            """select pg_catalog.set_config(name, value, false)
               from unnest(%s::text[], %s::text[]) setting (name, value)""",
            [list(settings), list(settings.values())],
        )
        connection.commit()

    on_connect(engine, _keep)


def reading(engine: Engine, *, only: bool) -> Engine:
    """Return the engine, with read-only transactions if it shall ``only`` read.

    Otherwise nothing is set: READ WRITE would pass over ``default_transaction_read_only`` of the database.
    """
    return engine.execution_options(postgresql_readonly=True) if only else engine


def keep_out_of_logs(connection: Connection) -> None:
    """Keep passwords in the transaction's next statements out of the server's log, if the role may.

    Also out of ``pg_stat_statements``, which keeps utility statements with their constants.
    """
    for setting, value in (
        ("log_statement", "none"),
        ("log_min_duration_statement", "-1"),
        ("log_min_duration_sample", "-1"),
        ("log_min_error_statement", "panic"),
        ("pg_stat_statements.track_utility", "off"),
    ):
        with suppress(MissingPrivilege), connection.begin_nested():
            # A setting that there is not belongs to a library that is not loaded.
            connection.execute(
                text("select set_config(name, :value, true) from pg_settings where name = :name"),
                {"name": setting, "value": value},
            )


def check_version(server_version: int, *, what: str) -> None:
    """Refuse a server that is too old; ``server_version`` as libpq gives it (140005 is 14.5).

    Raises:
        UnsupportedServer: it is older than :data:`OLDEST_SERVER`.
    """
    if server_version < OLDEST_SERVER * 10000:
        raise UnsupportedServer(
            f"{what} runs PostgreSQL {server_version // 10000}; shardids needs {OLDEST_SERVER} or later"
        )


_GRANT: Final = (
    "To let a role draw IDs and ask where shards are: shardids grant ROLE."
    " What changes the cluster is done as the role that owns the catalog."
)


def translate(error: psycopg.Error, *, what: str, url: URL) -> ShardidsError | None:
    """Return the shardids exception for a driver's error; ``None`` if the driver's own is better."""
    diag = error.diag
    ours = from_database(
        error.sqlstate, diag.message_primary or "", diag.message_hint or "", diag.message_detail or ""
    )
    if ours is not None:
        return ours
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        if diag.message_hint:
            # A refusal of shardids says all that there is to say.
            return MissingPrivilege(f"{what}: {diag.message_primary}", hint=diag.message_hint)
        message = f'{what}: role "{role_of(url)}" is not allowed: {diag.message_primary}'
        return MissingPrivilege(message, hint=_GRANT if what == "the catalog" else "")
    if _is_of_the_connection(error):
        failed = ConnectionFailed(
            f"{what} can't be reached at {shown_url(url)}: {_reason(error)}",
            hint="Check host, port, database and user; a password comes from the URL, PGPASSWORD or"
            " ~/.pgpass.",
        )
        failed.has_answered = error.sqlstate is None and _FROM_SERVER.search(str(error)) is not None
        return failed
    return None


_FROM_SERVER: Final = re.compile(r"failed: (?:[^\s:]+:  |fe_sendauth: )")
"""What libpq reports where a server answered: a severity, in any language, or that it wants a password."""


def _is_of_the_connection(error: psycopg.Error) -> bool:
    if error.sqlstate is not None:
        # Lost, or ended by the server: connection_exception, admin_shutdown and its like, a pause too long.
        return error.sqlstate.startswith("08") or error.sqlstate in ("57P01", "57P02", "57P03", "57P05")
    # A ProgrammingError where the URL has an option that libpq does not know.
    return isinstance(error, psycopg.OperationalError) or "connection option" in str(error)


def statement_failed(error: psycopg.Error, what: str, url: URL) -> ShardidsError:
    """Return the exception for a statement of shardids itself that failed on a server."""
    diag = error.diag
    message, hint = diag.message_primary or str(error), diag.message_hint or ""
    if error.sqlstate in _TRANSACTION_ENDED:
        return ConnectionFailed(
            f"{what} has ended the session at {shown_url(url)}: {message}",
            hint="Run it again. The timeout may be set for the server, the database or the role.",
        )
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return UnsupportedServer(
            f"{what} is read-only: {message}",
            hint="Use the primary, and check default_transaction_read_only.",
        )
    missing = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
    if isinstance(error, missing) and "shardids_catalog" in message:
        return ClusterConflict(
            f"{shown_url(url)} holds no shardids catalog", hint="To make one: shardids init --shards N"
        )
    return StatementFailed(f"{what}: {message}", hint=hint, sqlstate=error.sqlstate)


def _reason(error: psycopg.Error) -> str:
    """Return the error of the server or libpq, without its context and the list of addresses tried."""
    if error.diag.message_primary:
        return error.diag.message_primary
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failures = [line for line in lines if "failed: " in line] or lines or [type(error).__name__]
    return failures[-1].rpartition("failed: ")[2].removeprefix("FATAL:").strip()


def require_create(connection: Connection, what: str) -> None:
    """Check that the role may create a schema in the database.

    Raises:
        MissingPrivilege: it may not; the message has the GRANT that helps.
    """
    role, database, allowed = connection.execute(
        text("""select current_user, current_database(),
                       has_database_privilege(current_database(), 'create')""")
    ).one()
    if not allowed:
        raise MissingPrivilege(
            f'{what}: role "{role}" lacks CREATE on database "{database}"',
            hint=f'As its owner: GRANT CREATE ON DATABASE "{database}" TO "{role}"',
        )


def driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    """Return psycopg's own connection below SQLAlchemy's."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(f"psycopg is needed, not {type(driver).__name__}")
    return driver


def server_major(connection: Connection) -> int:
    """Return the major version of the server, such as 18."""
    return driver_connection(connection).info.server_version // 10000
