"""What the schemes on MariaDB share: sessions, and the two settings that make offsets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardids.baselines.scheme import Login, library
from shardids.errors import ClusterConflict, ConnectionFailed

CONNECT_TIMEOUT_S = 3
ANSWER_TIMEOUT_S = 30


def offset_settings(offset: int, masters: int) -> dict[str, str]:
    """The settings of the server with this offset, from 1, among so many."""
    return {"auto-increment-increment": str(masters), "auto-increment-offset": str(offset)}


def connect(login: Login, database: str | None = None) -> Any:
    """An autocommit session.

    Raises:
        ConnectionFailed: the server can't be reached, or refuses the login.
    """
    with lost_as_such(login):
        return library("pymysql").connect(
            host=login.host,
            port=login.port,
            user=login.user,
            password=login.password,
            database=database,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=ANSWER_TIMEOUT_S,
        )


@contextlib.contextmanager
def lost_as_such(login: Login) -> Iterator[None]:
    """Turns the driver's errors of a lost or refused connection into ConnectionFailed."""
    errors = library("pymysql").err
    try:
        yield
    except (errors.OperationalError, errors.InterfaceError) as error:
        raise ConnectionFailed(f"MariaDB at {login.host}:{login.port}: {error}") from error


def rows(connection: Any, query: str, parameters: tuple[object, ...] = ()) -> list[Any]:
    """Runs a query, and gives its rows."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return list(cursor.fetchall())


def check_offset(connection: Any, login: Login, offset: int, masters: int) -> None:
    """Refuses a server whose sessions would number rows otherwise.

    Raises:
        ClusterConflict: the two settings are not those of :func:`offset_settings`.
    """
    ((increment, found),) = rows(
        connection, "select @@global.auto_increment_increment, @@global.auto_increment_offset"
    )
    if (increment, found) != (masters, offset):
        raise ClusterConflict(
            f"MariaDB at {login.host}:{login.port} has auto_increment_increment {increment} and"
            f" auto_increment_offset {found}, not {masters} and {offset}",
            hint="Set both in its option file, for they must outlive a restart; then restart it.",
        )
