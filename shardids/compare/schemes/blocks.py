"""Keys drawn in blocks: blocks of another source, range tickets, worker leases, and Flickr's ticket servers.

A lease of a worker number expires unless its holder renews it, and its number then rests. Each lease of a
number has a token: a holder whose token the row does not have any more has lost the number.

A bound that the row stores with the number makes this safe: the holder issues no ID whose time is past
the bound, and raises the bound when it renews the lease; the next holder starts above it. So a process
that was suspended for an hour and then continues as if nothing had happened issues no ID twice, whatever
the clocks of processes and server show. Numbers rest so that the next holder need not wait for the bound
to pass.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardids.compare.multimaster.mariadb import Login, check_offset, connect, offset_settings, pymysql, rows
from shardids.compare.multimaster.postgresql import PostgreSqlSession
from shardids.compare.schemes.postgresql import SqlScheme, install
from shardids.compare.schemes.scheme import About, Key, KeyColumn, Needs, Scheme, Servers, Source
from shardids.errors import BadArgument, ConnectionFailed, LeaseLost

BLOCK = 1000
"""The number of keys in a range."""

_NAME = "all"


class Blocks(Source):
    """Hands out the keys of one block after another; unused keys of the last block are lost.

    Draws each block of ``size`` keys from ``source`` at once, and closes ``source`` when it is closed.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source, self._size = source, size
        self.sets_aside, self.holds = source.sets_aside, size
        self._left: Iterator[Key] = iter(())

    def draw(self) -> Key:
        for key in self._left:
            return key
        self._left = iter(self._source.draw_many(self._size))
        return next(self._left)

    def _draw_many(self, count: int) -> list[Key]:
        keys = list(islice(self._left, count))
        if missing := count - len(keys):
            keys += self._source.draw_many(missing)
        return keys

    def _set_aside(self, count: int) -> range:
        return self._source.set_aside(count)

    def close(self) -> None:
        self._source.close()


class RangeSource(Source):
    """Hands out one range while its own thread fetches the next.

    A draw waits only if the next range has not arrived when this one is used up; ``stalls`` counts how
    often. If the server is down, draws continue until both ranges are used up.
    """

    def __init__(self, url: str, block: int = BLOCK) -> None:
        self.stalls = 0
        self._block, self.holds = block, 2 * block
        self._session = PostgreSqlSession(url)
        self._fetcher = ThreadPoolExecutor(1, "range-tickets")
        self._left: Iterator[int] = iter(self._take(block))
        self._next = self._fetch(block)

    def draw(self) -> Key:
        for key in self._left:
            return key
        self._refill()
        return next(self._left)

    def _draw_many(self, count: int) -> list[Key]:
        keys: list[Key] = list(islice(self._left, count))
        missing = count - len(keys)
        if missing > self._block:
            return keys + list(self._fetch(missing).result())
        if missing:
            self._refill()
            keys += islice(self._left, missing)
        return keys

    sets_aside = True

    def _set_aside(self, count: int) -> range:
        return self._fetch(count).result()

    def _refill(self) -> None:
        self.stalls += not self._next.done()
        try:
            self._left = iter(self._next.result())
        finally:
            # Also after a failure, so that the next draw tries again.
            self._next = self._fetch(self._block)

    def _fetch(self, size: int) -> Future[range]:
        return self._fetcher.submit(self._take, size)

    def _take(self, size: int) -> range:
        ((first,),) = self._session.rows(
            "update shardids_baselines.key_range set next_key = next_key + %s where name = %s"
            " returning next_key - %s",
            (size, _NAME, size),
        )
        return range(first, first + size)

    def close(self) -> None:
        self._fetcher.shutdown()
        self._session.close()


class Ranges(SqlScheme):
    """A row that records which keys are taken, and clients that take whole ranges of them."""

    about = About(
        name="ranges",
        title="Leaf segments, double-buffered",
        central=True,
        needs=Needs(postgresql=1),
        safe_under="any number of clients, clocks that jump, crashes of the server and of clients",
        unsafe_under="a failover to a standby that lacks the last COMMIT, a restore",
        stops="all keys, when the one server is down and the client's two ranges are used up",
        tells="nothing: clients use up their ranges at their own pace",
        settings=f"ranges of {BLOCK:,}; the next is fetched as soon as one is begun",
        described_at="https://github.com/Meituan-Dianping/Leaf",
    )

    def install(self, servers: Servers) -> None:
        self.check(servers)
        install(servers.postgresql[0], "compare/baselines.v1")
        session = PostgreSqlSession(servers.postgresql[0])
        session.rows(
            "insert into shardids_baselines.key_range values (%s, 1) on conflict do nothing returning 1",
            (_NAME,),
        )
        session.close()

    def _open(self, servers: Servers, node: int) -> Source:
        return RangeSource(servers.postgresql[0])

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """How long a lease lasts, how often it is renewed and how long its number then rests, in seconds.

    Raises:
        BadArgument: not 0 < renew_s < lasts_s <= rests_s.
    """

    lasts_s: float = 30.0
    renew_s: float = 10.0
    rests_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.lasts_s <= self.rests_s:
            raise BadArgument(
                f"a lease can't last {self.lasts_s} s, be renewed every {self.renew_s} s and rest for"
                f" {self.rests_s} s",
                hint="It is renewed before it ends, and its number rests for at least as long as it lasts.",
            )


class Lease:
    """A worker number of this process; call :meth:`renew` in time, and :meth:`release` at the end.

    Attributes:
        number: the worker number.
        used_until_ms: the bound, a Unix time in ms that no ID of this number is past, as of the last
            renewal; before the first one, the bound of the former holders.

    Raises:
        LeaseLost: all numbers below ``numbers`` are held or rest.
        ConnectionFailed: the server cannot be reached.
    """

    def __init__(self, url: str, *, numbers: int, times: LeaseTimes) -> None:
        self._url, self._times = url, times
        self._session = PostgreSqlSession(url)
        leased = self._session.rows(_LEASE, (numbers, times.lasts_s, times.rests_s))
        if not leased:
            self._session.close()
            raise LeaseLost(
                f"all {numbers} worker numbers are held, or rest for {times.rests_s} s after they were",
                hint="End a process, or wait.",
            )
        self.number: int
        self.used_until_ms: int
        ((self.number, self._token, self.used_until_ms),) = leased

    def renew(self, until_ms: int) -> None:
        """Renew the lease for its full time and raises the bound; reconnects if necessary.

        Raises:
            LeaseLost: another process holds the number by now.
            ConnectionFailed: the server cannot be reached. The bound stays where it was.
        """
        if self._session.connection.closed:
            self._session = PostgreSqlSession(self._url)
        renewed = self._session.rows(_RENEW, (self._times.lasts_s, until_ms, self.number, self._token))
        if not renewed:
            raise LeaseLost(
                f"worker number {self.number} was leased to another process",
                hint="This one was stopped or cut off for too long. Lease a number again.",
            )
        ((self.used_until_ms,),) = renewed

    def release(self, used_until_ms: int) -> None:
        """End the lease, and stores the time of the last ID as its bound; the number rests from now on."""
        try:
            if not self._session.connection.closed:
                self._session.rows(_RELEASE, (used_until_ms, self.number, self._token))
        finally:
            self._session.close()


def install_leases(url: str) -> None:
    """Create the table of the worker numbers. Idempotent."""
    install(url, "compare/baselines.v1")


_LEASE = "select number, token, used_until_ms from shardids_baselines.lease_worker(%s, %s, %s)"
_RENEW = """
update shardids_baselines.worker
set expires_at = clock_timestamp() + make_interval(secs => %s), used_until_ms = greatest(used_until_ms, %s)
where number = %s and token = %s
returning used_until_ms
"""
_RELEASE = """
update shardids_baselines.worker set expires_at = clock_timestamp(), used_until_ms = %s
where number = %s and token = %s
returning number
"""

_DATABASE = "shardids_baselines"
_RETRY_S = 1.0
_BATCH = 1000
_DRAW = "REPLACE INTO Tickets64 (stub) VALUES ('a')"
_TABLE = """
create table if not exists Tickets64 (
  id bigint unsigned not null auto_increment primary key,
  stub char(1) not null default '' unique
) engine = MyISAM
"""


class TicketSource(Source):
    """Asks the servers in turn; one that does not answer is skipped for a second.

    The answer to REPLACE carries LAST_INSERT_ID(), so a draw takes one round trip. Many keys are drawn in
    batches: REPLACE of as many rows; LAST_INSERT_ID() is the first of them, and the table's lock keeps them
    together.
    """

    def __init__(self, logins: tuple[Login, ...]) -> None:
        self._errors = pymysql().err.MySQLError
        self._logins = logins
        self._connections: list[Any] = [None] * len(logins)
        self._not_before = [0.0] * len(logins)
        self._turn = 0
        self.draw()

    def draw(self) -> Key:
        return self._draw_batch(1)[0]

    def _draw_many(self, count: int) -> list[Key]:
        keys: list[Key] = []
        while missing := count - len(keys):
            keys += self._draw_batch(min(missing, _BATCH))
        return keys

    def _draw_batch(self, count: int) -> range:
        failures = []
        for _ in self._logins:
            number = self._turn
            self._turn = (number + 1) % len(self._logins)
            try:
                return self._draw_from(number, count)
            except (ConnectionFailed, self._errors) as error:
                failures.append(str(error))
        raise ConnectionFailed("no ticket server answers: " + "; ".join(failures))

    def _draw_from(self, number: int, count: int) -> range:
        connection = self._connections[number]
        if connection is None:
            if time.monotonic() < self._not_before[number]:
                raise ConnectionFailed("left out, as it did not answer a moment ago")
            self._not_before[number] = time.monotonic() + _RETRY_S
            connection = self._connections[number] = connect(self._logins[number], _DATABASE)
        try:
            with connection.cursor() as cursor:
                cursor.execute(_DRAW + ", ('a')" * (count - 1))
                first: int = cursor.lastrowid
        except self._errors:
            self._connections[number] = None
            with contextlib.suppress(self._errors):
                connection.close()
            raise
        return range(first, first + count * len(self._logins), len(self._logins))

    def close(self) -> None:
        for connection in self._connections:
            if connection is not None and connection.open:
                connection.close()


class Tickets(Scheme):
    """Two servers with auto_increment_increment 2, and offsets 1 and 2."""

    about = About(
        name="tickets",
        title="Flickr's ticket servers",
        central=True,
        needs=Needs(mariadb=(offset_settings(1, 2), offset_settings(2, 2))),
        safe_under="any number of clients, clocks that jump, the loss of one server while it stays away",
        unsafe_under="a server that comes back without its data, or with a lower number than it had",
        stops="nothing when one server is down; all keys when both are",
        tells="nothing: the two servers drift apart; odd or even tells the server",
        settings="MyISAM table with one row, REPLACE INTO; auto_increment_increment 2, offsets 1 and 2;"
        f" clients ask the servers in turn, for up to {_BATCH:,} keys by a REPLACE of as many rows",
        described_at="https://code.flickr.net/2010/02/08/ticket-servers-distributed-unique-primary-keys-on-the-cheap/",
    )

    def install(self, servers: Servers) -> None:
        """Create the tables; raise ClusterConflict for a server that has another offset."""
        self.check(servers)
        for number, login in enumerate(servers.mariadb, 1):
            connection = connect(login)
            try:
                check_offset(connection, login, number, len(servers.mariadb))
                rows(connection, f"create database if not exists {_DATABASE}")
                connection.select_db(_DATABASE)
                rows(connection, _TABLE)
            finally:
                connection.close()

    def _open(self, servers: Servers, node: int) -> Source:
        return TicketSource(servers.mariadb)
