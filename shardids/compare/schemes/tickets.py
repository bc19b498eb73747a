"""Ticket servers as Flickr ran them: two independent MariaDB servers, one odd and one even."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from shardids.compare.schemes.scheme import About, Key, Needs, Scheme, Servers, Source
from shardids.errors import ConnectionFailed
from shardids.multimaster.mariadb_session import Login, check_offset, connect, offset_settings, pymysql, rows

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
    batches: REPLACE of as many rows, of which LAST_INSERT_ID() is the first; the table's lock keeps them
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
        """Creates the tables; raises ClusterConflict for a server that has another offset."""
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
