"""Sessions on MariaDB servers, and the two settings that give a server its offset."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from shardids.errors import ClusterConflict, ConnectionFailed, MissingLibrary

_CONNECT_TIMEOUT_S: Final = 3
_ANSWER_TIMEOUT_S: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Where a server other than PostgreSQL listens, and who logs in."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)


def pymysql() -> Any:
    """Returns the driver.

    Raises:
        MissingLibrary: PyMySQL is not installed.
    """
    try:
        return importlib.import_module("pymysql")
    except ImportError as error:
        raise MissingLibrary(
            "pymysql is not installed", hint='Install it with: pip install "shardids[compare]"'
        ) from error


def connect(login: Login, database: str | None = None) -> Any:
    """Opens an autocommit session.

    Raises:
        ConnectionFailed: the server can't be reached, or refuses the login.
        MissingLibrary: PyMySQL is not installed.
    """
    driver = pymysql()
    with lost_as_such(login):
        return driver.connect(
            host=login.host,
            port=login.port,
            user=login.user,
            password=login.password,
            database=database,
            autocommit=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_ANSWER_TIMEOUT_S,
        )


@contextlib.contextmanager
def lost_as_such(login: Login) -> Iterator[None]:
    """Turns the driver's errors about a lost or refused connection into ConnectionFailed."""
    errors = pymysql().err
    try:
        yield
    except (errors.OperationalError, errors.InterfaceError) as error:
        raise ConnectionFailed(f"MariaDB at {login.host}:{login.port}: {error}") from error


def rows(connection: Any, query: str, parameters: tuple[object, ...] = ()) -> list[Any]:
    """Runs a query and returns its rows."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return list(cursor.fetchall())


def offset_settings(offset: int, masters: int) -> dict[str, str]:
    """Returns the settings of the server with this offset, from 1, among that many."""
    return {"auto-increment-increment": str(masters), "auto-increment-offset": str(offset)}


def check_offset(connection: Any, login: Login, offset: int, masters: int) -> None:
    """Refuses a server whose settings differ from :func:`offset_settings`.

    Raises:
        ClusterConflict: its sessions would number rows differently.
    """
    ((increment, found),) = rows(
        connection, "select @@global.auto_increment_increment, @@global.auto_increment_offset"
    )
    if (increment, found) != (masters, offset):
        raise ClusterConflict(
            f"MariaDB at {login.host}:{login.port} has auto_increment_increment {increment} and"
            f" auto_increment_offset {found}, not {masters} and {offset}",
            hint="Set both in its option file, so that they survive a restart, and restart it.",
        )
