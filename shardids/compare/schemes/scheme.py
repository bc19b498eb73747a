"""The interface of all key schemes: the scheme itself, and a client's source of keys.

A :class:`Scheme` is installed once on the servers that it needs; each client then opens its own
:class:`Source`. Neither keeps state that another process would have to know.
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

from shardids.compare.multimaster.mariadb import Login
from shardids.errors import BadArgument, MissingLibrary
from shardids.ids.text import checked_integer
from shardids.pg.connections import OLDEST_SERVER

Key: TypeAlias = int | UUID
"""A key of a scheme: an integer that fits into ``bigint``, or 128 bits as a UUID."""

MOST_KEYS = 1_000_000
"""The most keys that one call of :meth:`Source.draw_many` returns."""

NOTE = "a row of a table that is not very wide"
"""The text in each row that is inserted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The servers that a scheme needs.

    Attributes:
        postgresql: the minimum number of PostgreSQL servers.
        oldest_postgresql: their minimum major version.
        mariadb: the settings of each MariaDB server, as its option file has them.
        redis: the settings of each Redis server, as its configuration has them.
        redis_pair: the settings of a Redis primary and of the replica that follows it.
        id_service: whether ``examples/id_service.py`` runs in front of the first PostgreSQL server.
    """

    postgresql: int = 0
    oldest_postgresql: int = OLDEST_SERVER
    mariadb: tuple[Mapping[str, str], ...] = ()
    redis: tuple[Mapping[str, str], ...] = ()
    redis_pair: Mapping[str, str] | None = None
    id_service: bool = False

    @property
    def any(self) -> bool:
        """Returns whether it needs a server at all."""
        return bool(self.postgresql or self.mariadb or self.redis or self.redis_pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Running servers: URLs of PostgreSQL databases, and logins to the others."""

    postgresql: tuple[str, ...] = ()
    mariadb: tuple[Login, ...] = ()
    redis: tuple[Login, ...] = ()
    redis_pair: tuple[Login, ...] = ()
    id_service: tuple[Login, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A scheme in words.

    Attributes:
        name: its name on the command line.
        central: whether all keys come from one server, or a fixed pair of them.
        title: its name in a report.
        needs: the servers that it cannot be installed without.
        safe_under: the events that its keys stay unique under.
        unsafe_under: the events that make it issue a key twice; empty if none is known.
        stops: the events that make it stop issuing keys.
        tells: the facts that a key reveals to its readers.
        settings: how it is set up here, following its documentation.
        described_at: where it is documented.
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
    """A column of a PostgreSQL table that stores the keys.

    ``draw`` is the SQL expression that makes one key, and ``trigger`` a function that a trigger calls to set
    ``id`` of each new row. Without them and without ``identity``, the client supplies the key.
    """

    type: LiteralString
    draw: sql.Composable | None = None
    identity: bool = False
    trigger: sql.Identifier | None = None

    @property
    def by_server(self) -> bool:
        """Whether an INSERT may omit the column."""
        return self.identity or self.draw is not None or self.trigger is not None

    def table(self, name: sql.Identifier, other: LiteralString) -> sql.Composed:
        """Return the statements that make a table whose primary key is this column, and which has others."""
        made = sql.SQL("create table {} (id {}, {}, primary key (id))").format(
            name, self._definition, sql.SQL(other)
        )
        if self.trigger is None:
            return made
        return made + sql.SQL(
            "; create trigger key before insert on {} for each row execute function {}()"
        ).format(name, self.trigger)

    @property
    def _definition(self) -> sql.Composable:
        if self.identity:
            return sql.SQL("{} generated always as identity").format(sql.SQL(self.type))
        if self.draw is not None:
            return sql.SQL("{} not null default {}").format(sql.SQL(self.type), self.draw)
        return sql.SQL("{} not null").format(sql.SQL(self.type))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The facts in a key: its time of birth, its origin, and its number among the keys of that time."""

    time: datetime | None = None
    origin: int | None = None
    sequence: int | None = None


class Source(ABC):
    """Draws keys for one client; a context manager. Not thread-safe unless a source says so.

    A source that has lost its only server never reconnects: open another when the server is back. Both
    ways to draw raise ConnectionFailed if a server that is needed now cannot be reached, and the errors
    of the scheme itself.
    """

    holds: int = 0
    """How many keys a client may hold in memory."""

    sets_aside: bool = False
    """Whether :meth:`set_aside` works."""

    @abstractmethod
    def draw(self) -> Key:
        """Draw one key."""

    def draw_for(self, shard: int) -> Key:
        """Draw one key for a row of a shard; see :meth:`Scheme.open_shards`."""
        del shard
        return self.draw()

    def draw_after(self, key: Key) -> Key:
        """Draw one key that is to sort after another; see :attr:`Scheme.hears`."""
        raise NotImplementedError

    def draw_many(self, count: int) -> list[Key]:
        """Draw ``count`` keys, at once if the scheme can; raise BadArgument unless 1 … 1,000,000."""
        return self._draw_many(checked_integer("the number of keys", count, 1, MOST_KEYS))

    def _draw_many(self, count: int) -> list[Key]:
        return [self.draw() for _ in range(count)]

    def set_aside(self, count: int) -> range:
        """Set keys aside in one call, without sending each of them, and return their places.

        The places are those of :meth:`Scheme.place`. Raises BadArgument as :meth:`draw_many` does.
        """
        return self._set_aside(checked_integer("the number of keys", count, 1, MOST_KEYS))

    def _set_aside(self, count: int) -> range:
        raise NotImplementedError

    def close(self) -> None:
        """Release the client's resources."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Scheme(ABC):
    """A key scheme, which ``about`` describes."""

    about: About

    hears: bool = False
    """Whether a source can receive the key of a row that is answered: :meth:`Source.draw_after`."""

    keeps_rows: bool = False
    """Whether a draw is a row with its COMMIT, in a database of the scheme's own: no table takes its keys."""

    def install(self, servers: Servers) -> None:
        """Create the scheme's objects on the servers. Idempotent."""
        self.check(servers)

    def open(self, servers: Servers, node: int = 0) -> Source:
        """Open a client's source of keys.

        ``node``, from 0, is the PostgreSQL server that the client writes to; it matters to schemes
        with a generator on each server.

        Raises:
            BadArgument: there are fewer servers than the scheme needs, or none has that number.
            ConnectionFailed: a server that is needed cannot be reached.
        """
        self.check(servers)
        if self.about.needs.postgresql and not 0 <= node < len(servers.postgresql):
            raise BadArgument(f"no node {node}: the servers are 0 to {len(servers.postgresql) - 1}")
        return self._open(servers, node)

    @abstractmethod
    def _open(self, servers: Servers, node: int) -> Source:
        """Open the source, on servers that :meth:`open` has checked."""

    def column(self, node: int = 0) -> KeyColumn:
        """Return the column that stores the keys on the server of that number."""
        del node
        return KeyColumn(type="bigint")

    def install_shards(self, servers: Servers, count: int) -> None:
        """Create what shards of the first server, from 0, need beyond :meth:`install`. Idempotent."""
        del servers, count

    def open_shards(self, servers: Servers) -> Source:
        """Open a client's source of keys for all shards of the first server. Raises as :meth:`open` does."""
        return self.open(servers)

    def column_of(self, shard: int) -> KeyColumn:
        """Return the column that stores the keys of a shard of the first server."""
        del shard
        return self.column()

    def decode(self, key: Key) -> Decoded | None:
        """Return the facts in a key, or ``None`` if it contains none."""
        del key
        return None

    def place(self, key: Key) -> int:
        """Return the key's place: different for different keys, and consecutive where they are set aside."""
        return int(key)

    def check(self, servers: Servers) -> None:
        """Refuse too few servers.

        Raises:
            BadArgument: there are fewer than the scheme needs.
        """
        needs = self.about.needs
        for title, needed, given in (
            ("PostgreSQL", needs.postgresql, len(servers.postgresql)),
            ("MariaDB", len(needs.mariadb), len(servers.mariadb)),
            ("Redis", len(needs.redis), len(servers.redis)),
            ("replicated Redis", 2 if needs.redis_pair else 0, len(servers.redis_pair)),
            ("HTTP", int(needs.id_service), len(servers.id_service)),
        ):
            if given < needed:
                raise BadArgument(f"scheme {self.about.name} needs {needed} {title} servers, not {given}")


def library(name: str) -> Any:
    """Import a module of the extra ``compare`` and return it.

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
    """Return the key as an integer; raise BadArgument for a UUID."""
    if isinstance(key, UUID):
        raise BadArgument(f"{key} is not a key of this scheme: its keys are integers")
    return key


def uuid_of(key: Key) -> UUID:
    """Return the key as a UUID; raise BadArgument for an integer."""
    if not isinstance(key, UUID):
        raise BadArgument(f"{key} is not a key of this scheme: its keys have 128 bits")
    return key
