"""The interface of all key schemes: what one is, and a client's source of keys.

A :class:`Scheme` is installed once on the servers that it needs; each client then opens a
:class:`Source` of its own. Neither keeps state that another process would have to know.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, LiteralString, Self, TypeAlias
from uuid import UUID

from psycopg import sql

from shardids.catalog.connections import OLDEST_SERVER
from shardids.errors import BadArgument, MissingLibrary
from shardids.ids.text import checked_integer
from shardids.multimaster.mariadb_session import Login

Key: TypeAlias = int | UUID
"""What a scheme draws: an integer that fits ``bigint``, or 128 bits as a UUID."""

MOST_KEYS = 1_000_000
"""The most keys that one call of :meth:`Source.draw_many` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The servers that a scheme needs.

    Attributes:
        postgresql: how many PostgreSQL servers, at least.
        oldest_postgresql: the major version that they must have, at least.
        mariadb: the settings of each MariaDB server, as its option file has them.
        redis: the settings of each Redis server, as its configuration has them.
    """

    postgresql: int = 0
    oldest_postgresql: int = OLDEST_SERVER
    mariadb: tuple[Mapping[str, str], ...] = ()
    redis: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers that run: URLs of PostgreSQL databases, and logins to the others."""

    postgresql: tuple[str, ...] = ()
    mariadb: tuple[Login, ...] = ()
    redis: tuple[Login, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A scheme in words.

    Attributes:
        name: what the command line calls it.
        central: whether all keys come from one server, or a fixed pair of them.
        title: what a report calls it.
        needs: the servers without which it can't be installed.
        safe_under: what its keys stay unique under.
        unsafe_under: what makes it issue a key twice; empty if nothing that is known does.
        stops: what makes it stop to issue keys.
        tells: what a key tells whoever reads it.
        settings: how it is set up here, as its documentation advises.
        described_at: where it is described.
    """

    name: str
    title: str
    central: bool = False
    needs: Needs = field(default_factory=Needs)
    safe_under: str
    unsafe_under: str
    stops: str
    tells: str
    settings: str
    described_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """A column of a PostgreSQL table that takes the keys.

    ``draw`` is the SQL expression that makes one key; without it, and without ``identity``, the
    client brings the key.
    """

    type: LiteralString
    draw: sql.Composable | None = None
    identity: bool = False

    @property
    def by_server(self) -> bool:
        """Whether an INSERT may leave the column out."""
        return self.identity or self.draw is not None

    @property
    def definition(self) -> sql.Composable:
        """What follows the column's name in CREATE TABLE."""
        if self.identity:
            return sql.SQL("{} generated always as identity").format(sql.SQL(self.type))
        if self.draw is not None:
            return sql.SQL("{} not null default {}").format(sql.SQL(self.type), self.draw)
        return sql.SQL("{} not null").format(sql.SQL(self.type))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a key tells: the time of its birth, who made it, and its number among those of that time."""

    time: datetime | None = None
    origin: int | None = None
    sequence: int | None = None


class Source(ABC):
    """Draws keys for one client; a context manager. Not for several threads at once.

    One that has lost its only server stays so: open another when the server is back. Both ways to draw
    raise ConnectionFailed when a server that is needed now can't be reached, and what the scheme itself
    refuses.
    """

    sets_aside: bool = False
    """Whether :meth:`set_aside` works."""

    @abstractmethod
    def draw(self) -> Key:
        """One key."""

    def draw_many(self, count: int) -> list[Key]:
        """``count`` keys, at once where the scheme can; raises BadArgument unless 1 … 1,000,000."""
        return self._draw_many(checked_integer("the number of keys", count, 1, MOST_KEYS))

    def _draw_many(self, count: int) -> list[Key]:
        return [self.draw() for _ in range(count)]

    def set_aside(self, count: int) -> range:
        """Sets keys aside in one call, without bringing each of them, and returns their places.

        The places are those of :meth:`Scheme.place`. Raises BadArgument as :meth:`draw_many`.
        """
        return self._set_aside(checked_integer("the number of keys", count, 1, MOST_KEYS))

    def _set_aside(self, count: int) -> range:
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what the client holds."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Scheme(ABC):
    """A way to make keys. ``about`` describes it."""

    about: About

    def install(self, servers: Servers) -> None:
        """Makes what the scheme needs on the servers; repeating it is no error."""
        self.check(servers)

    def open(self, servers: Servers, node: int = 0) -> Source:
        """A client's source of keys.

        ``node``, from 0, is the PostgreSQL server that the client writes to; it matters to schemes
        with a generator on each.

        Raises:
            BadArgument: there are fewer servers than the scheme needs, or none of that number.
            ConnectionFailed: as it says.
        """
        self.check(servers)
        if self.about.needs.postgresql and not 0 <= node < len(servers.postgresql):
            raise BadArgument(f"there is no node {node}: the servers are 0 to {len(servers.postgresql) - 1}")
        return self._open(servers, node)

    @abstractmethod
    def _open(self, servers: Servers, node: int) -> Source:
        """The source, on servers that were checked."""

    def column(self, node: int = 0) -> KeyColumn:
        """The column that takes the keys, on the server of that number."""
        del node
        return KeyColumn(type="bigint")

    def decode(self, key: Key) -> Decoded | None:
        """What a key tells, or ``None`` if it tells nothing."""
        del key
        return None

    def place(self, key: Key) -> int:
        """Returns the key's place: different for different keys, and consecutive where they are set aside."""
        return int(key)

    def check(self, servers: Servers) -> None:
        """Refuses servers that are too few.

        Raises:
            BadArgument: there are fewer than the scheme needs.
        """
        needs = self.about.needs
        for title, needed, given in (
            ("PostgreSQL", needs.postgresql, len(servers.postgresql)),
            ("MariaDB", len(needs.mariadb), len(servers.mariadb)),
            ("Redis", len(needs.redis), len(servers.redis)),
        ):
            if given < needed:
                raise BadArgument(f"scheme {self.about.name} needs {needed} {title} servers, not {given}")


def library(name: str) -> Any:
    """A module of the extra ``compare``.

    Raises:
        MissingLibrary: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingLibrary(
            f"{name} is not installed", hint='Install it with: pip install "shardids[compare]"'
        ) from error


def integer_of(key: Key) -> int:
    """The key as an integer. Raises BadArgument for a UUID."""
    if isinstance(key, UUID):
        raise BadArgument(f"{key} is no key of this scheme: its keys are integers")
    return key


def uuid_of(key: Key) -> UUID:
    """The key as a UUID. Raises BadArgument for an integer."""
    if not isinstance(key, UUID):
        raise BadArgument(f"{key} is no key of this scheme: its keys have 128 bits")
    return key
