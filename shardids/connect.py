"""Connections to nodes and to the catalog: URLs, engines, and errors that name the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from shardids.errors import (
    BadArgument,
    ConnectionFailed,
    MissingPrivilege,
    ShardidsError,
    UnsupportedServer,
    from_database,
)

OLDEST_SERVER = 14
"""The oldest major version of PostgreSQL that is supported."""


def parse_url(url: str | URL) -> URL:
    """A PostgreSQL URL, to be used with psycopg. ``postgres://`` and ``postgresql://`` both do.

    Raises:
        BadArgument: it can't be read, or names another database or driver. Its password is not shown.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise BadArgument(
            "the database URL can't be read",
            hint="It looks like this: postgresql://user@host:5432/database",
        ) from None
    if parsed.drivername not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise BadArgument(
            f"the database URL starts with {parsed.drivername!r}; shardids needs PostgreSQL",
            hint="It looks like this: postgresql://user@host:5432/database",
        )
    return parsed.set(drivername="postgresql+psycopg")


def shown_url(url: URL) -> str:
    """The URL as a user types it, without driver and password: fit to be printed and stored."""
    shown = url.set(drivername="postgresql")
    return URL.create(
        shown.drivername, shown.username, None, shown.host, shown.port, shown.database, shown.query
    ).render_as_string()


def open_engine(url: URL, *, what: str, **options: Any) -> Engine:
    """An engine whose errors say which server (``what``: ``catalog`` or ``node "a"``) and are ours.

    No statement is prepared on the server unless ``options`` say so, which keeps PgBouncer in
    transaction mode safe. Nothing is connected yet.
    """
    connect_args = {"prepare_threshold": None, **options.pop("connect_args", {})}
    engine = create_engine(url, connect_args=connect_args, **options)

    @event.listens_for(engine, "handle_error", retval=True)
    def _translate(context: ExceptionContext) -> BaseException | None:
        return translate(context.original_exception, what=what, url=url)

    @event.listens_for(engine, "connect")
    def _check_version(connection: psycopg.Connection[Any], _record: object) -> None:
        check_version(connection.info.server_version, what=what)

    return engine


def check_version(server_version: int, *, what: str) -> None:
    """Refuses a server that is too old; ``server_version`` as libpq gives it (140005 is 14.5).

    Raises:
        UnsupportedServer: it is older than :data:`OLDEST_SERVER`.
    """
    if server_version < OLDEST_SERVER * 10000:
        raise UnsupportedServer(
            f"{what} runs PostgreSQL {server_version // 10000}; shardids needs {OLDEST_SERVER} or later"
        )


def translate(error: BaseException | None, *, what: str, url: URL) -> ShardidsError | None:
    """The shardids exception for a driver's error, or ``None`` where the driver's own is best."""
    if not isinstance(error, psycopg.Error):
        return None
    diag = error.diag
    message = diag.message_primary or str(error)
    ours = from_database(error.sqlstate, message, diag.message_hint or "")
    if ours is not None:
        return ours
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return MissingPrivilege(
            f'{what}: role "{url.username}" is not allowed: {message}', hint=diag.message_hint or ""
        )
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return ConnectionFailed(
            f"{what} can't be reached at {shown_url(url)}: {_reason(error)}",
            hint="Check host, port, database and user; a password comes from the URL, PGPASSWORD or"
            " ~/.pgpass.",
        )
    return None


def _reason(error: psycopg.Error) -> str:
    """What libpq says went wrong, without its account of where it tried."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failures = [line for line in lines if "failed: " in line] or lines or [type(error).__name__]
    return failures[-1].rpartition("failed: ")[2].removeprefix("FATAL:").strip()


@contextmanager
def translated(*, what: str, url: URL) -> Iterator[None]:
    """Turns driver errors of the block into ours, for code that uses psycopg without an engine."""
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        original = error.orig if isinstance(error, DBAPIError) else error
        ours = translate(original, what=what, url=url)
        if ours is None:
            raise
        raise ours from error


def with_password_of(url: URL, other: URL) -> URL:
    """``url`` with the password of ``other`` if it has none itself and the user is the same.

    The catalog stores no passwords; where all servers share one account, the catalog's URL brings the
    password, otherwise ``~/.pgpass`` or ``PGPASSWORD`` does.
    """
    if url.password is None and other.password is not None and url.username == other.username:
        return url.set(password=str(other.password))
    return url


def require_create(connection: Connection, what: str) -> None:
    """Refuses early, and in words, what CREATE SCHEMA would refuse.

    Raises:
        MissingPrivilege: the role may not create a schema in the database.
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
