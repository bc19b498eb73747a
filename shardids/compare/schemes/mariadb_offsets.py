"""Rows of two MariaDB masters, whose auto_increment columns count by two from one and from two."""

from __future__ import annotations

from typing import Any

from shardids.compare.multimaster.mariadb import (
    Login,
    check_offset,
    connect,
    lost_as_such,
    offset_settings,
    rows,
)
from shardids.compare.schemes.scheme import NOTE, About, Key, Needs, Scheme, Servers, Source

_DATABASE = "shardids_baselines"
_BATCH = 1000
_TABLE = """
create table if not exists `row_{}` (
  id bigint not null auto_increment primary key,
  note varchar(100) not null
) engine = InnoDB
"""


class MariaDbRowSource(Source):
    """Inserts a row with its COMMIT for each draw, and returns its key."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._connection = connect(login, _DATABASE)
        ((self._increment,),) = rows(self._connection, "select @@auto_increment_increment")

    def draw(self) -> Key:
        return self._insert(0, 1)

    def draw_for(self, shard: int) -> Key:
        return self._insert(shard, 1)

    def _draw_many(self, count: int) -> list[Key]:
        keys: list[Key] = []
        while missing := count - len(keys):
            size = min(missing, _BATCH)
            first = self._insert(0, size)
            # InnoDB numbers the rows of one such statement consecutively, whatever others insert.
            keys += range(first, first + size * self._increment, self._increment)
        return keys

    def _insert(self, shard: int, count: int) -> int:
        """Insert rows in one transaction, and return the key of the first."""
        with lost_as_such(self._login), self._connection.cursor() as cursor:
            statement = f"insert into `row_{shard}` (note) values (%s)"  # noqa: S608  -- a number
            cursor.execute(statement + ", (%s)" * (count - 1), (NOTE,) * count)
            first: int = cursor.lastrowid
        return first

    def close(self) -> None:
        if self._connection.open:
            self._connection.close()


class MariaDbOffsets(Scheme):
    """Two masters with auto_increment_increment 2, and offsets 1 and 2; clients use their node's."""

    about = About(
        name="offsets-mariadb",
        title="MariaDB's auto-increment offsets",
        central=True,
        needs=Needs(mariadb=(offset_settings(1, 2), offset_settings(2, 2))),
        safe_under="any number of clients, clocks that jump, crashes, the loss of any master",
        unsafe_under="a master that comes back without its last rows; masters that are added while rows are"
        " replicated and written; sessions that set their own offset; keys given by hand",
        stops="the rows of a master that is down",
        tells="its master, as long as their number has never changed",
        settings="InnoDB, auto_increment_increment 2, offsets 1 and 2, not replicated; a draw is an INSERT"
        " with its COMMIT; PyMySQL",
        described_at="https://mariadb.com/kb/en/auto_increment/",
    )
    keeps_rows = True

    def install(self, servers: Servers) -> None:
        """Create the table; raise ClusterConflict for a server that has another offset."""
        self.check(servers)
        for number, login in enumerate(servers.mariadb, 1):
            connection = connect(login)
            try:
                check_offset(connection, login, number, len(servers.mariadb))
            finally:
                connection.close()
            _create_tables(login, 1)

    def install_shards(self, servers: Servers, count: int) -> None:
        _create_tables(servers.mariadb[0], count)

    def _open(self, servers: Servers, node: int) -> Source:
        return MariaDbRowSource(servers.mariadb[node])


def _create_tables(login: Login, count: int) -> None:
    connection: Any = connect(login)
    try:
        rows(connection, f"create database if not exists {_DATABASE}")
        connection.select_db(_DATABASE)
        for shard in range(count):
            rows(connection, _TABLE.format(shard))
    finally:
        connection.close()
