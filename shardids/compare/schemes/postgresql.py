"""The base of schemes that draw from PostgreSQL, and those that count there: sequence, identity,
counter, offsets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from psycopg import sql

from shardids.compare import multimaster
from shardids.compare.multimaster.postgresql import PostgreSqlSession
from shardids.compare.schemes.scheme import About, Key, KeyColumn, Needs, Scheme, Servers, Source
from shardids.errors import UnsupportedServer
from shardids.pg.sqlfiles import read_sql

_ONE: Final = sql.SQL("nextval('shardids_baselines.one')")
_IDENTITY: Final = sql.Identifier("shardids_baselines", "identity_row")
_COUNTED: Final = sql.Identifier("shardids_baselines", "counted_row")
_COUNT: Final = sql.Identifier("shardids_baselines", "count_row")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class SqlSource(Source):
    """Draws one key by one query, and many by another that takes their number."""

    def __init__(
        self, url: str, one: sql.Composed, many: sql.Composed, after: sql.Composed | None = None
    ) -> None:
        self._one, self._many, self._after = one, many, after
        self._session = PostgreSqlSession(url)

    @classmethod
    def of(cls, url: str, draw: sql.Composable, after: sql.Composed | None = None) -> SqlSource:
        """Return a source that draws by an expression: once, or in each row of ``generate_series``.

        ``after`` is a query that draws one key after the one that it takes.
        """
        return cls(
            url,
            sql.SQL("select {}").format(draw),
            sql.SQL("select {} from generate_series(1, %s::integer)").format(draw),
            after,
        )

    def draw(self) -> Key:
        key: Key = self._session.rows(self._one)[0][0]
        return key

    def draw_after(self, key: Key) -> Key:
        if self._after is None:
            return super().draw_after(key)
        drawn: Key = self._session.rows(self._after, (key,))[0][0]
        return drawn

    def _draw_many(self, count: int) -> list[Key]:
        return [key for (key,) in self._session.rows(self._many, (count,))]

    def close(self) -> None:
        self._session.close()


class SqlScheme(Scheme):
    """A scheme whose keys come from an expression on the node's own server."""

    files: tuple[str, ...] = ()
    """The SQL files that install it."""

    def install(self, servers: Servers) -> None:
        self.check(servers)
        for url in servers.postgresql:
            install(url, *self.files, oldest=self.about.needs.oldest_postgresql)

    def _open(self, servers: Servers, node: int) -> Source:
        draw = self.column(node).draw
        if draw is None:
            raise NotImplementedError
        return SqlSource.of(servers.postgresql[node], draw)

    def column(self, node: int = 0) -> KeyColumn:
        raise NotImplementedError


def install(url: str, *files: str, oldest: int = 14, settings: Mapping[str, str] = _NOTHING) -> None:
    """Run SQL files in a database, one after another, with these settings of the session.

    Raises:
        UnsupportedServer: the server is older than the major version ``oldest``.
        ConnectionFailed: the server cannot be reached.
        MissingPrivilege: the role may not create these objects.
    """
    session = PostgreSqlSession(url)
    try:
        major = session.connection.info.server_version // 10000
        if major < oldest:
            raise UnsupportedServer(f"the server runs PostgreSQL {major}; this scheme needs {oldest}")
        for name, value in settings.items():
            session.rows("select set_config(%s, %s, false)", (name, value))
        for file in files:
            session.run(read_sql(file))
    finally:
        session.close()


class OneSequence(SqlScheme):
    """``nextval`` of one sequence."""

    about = About(
        name="sequence",
        title="One database sequence",
        central=True,
        needs=Needs(postgresql=1),
        safe_under="any number of clients, clocks that jump, crashes of the server (it skips 32 values)",
        unsafe_under="a failover to a standby that lacks the last WAL, a restore, setval",
        stops="all keys, when the one server is down",
        tells="roughly the order of birth",
        settings="CREATE SEQUENCE AS bigint, CACHE 1; autocommit, prepared statements",
        described_at="https://www.postgresql.org/docs/current/sql-createsequence.html",
    )
    files = ("compare/baselines.v1",)

    def _open(self, servers: Servers, node: int) -> Source:
        return SqlSource.of(servers.postgresql[0], _ONE)

    def column(self, node: int = 0) -> KeyColumn:
        """Return the column; on servers other than the first, the client supplies the key."""
        return KeyColumn(type="bigint", draw=_ONE if node == 0 else None)


class Identity(SqlScheme):
    """The keys of inserted rows; only an INSERT draws one."""

    about = About(
        name="identity",
        title="Identity column",
        central=True,
        needs=Needs(postgresql=1),
        safe_under="any number of clients, clocks that jump, crashes of the server",
        unsafe_under="rows of two servers that are brought together; keys that were given by hand",
        stops="all keys, when the one server is down",
        tells="roughly the order of birth in its table",
        settings="GENERATED ALWAYS AS IDENTITY; a draw is an INSERT … RETURNING with its COMMIT",
        described_at="https://www.postgresql.org/docs/current/ddl-identity-columns.html",
    )
    files = ("compare/baselines.v1",)

    def _open(self, servers: Servers, node: int) -> Source:
        return _inserting(servers.postgresql[0], _IDENTITY)

    def column(self, node: int = 0) -> KeyColumn:
        """Return the column; on servers other than the first, the client supplies the key."""
        return KeyColumn(type="bigint", identity=node == 0)


class Counter(SqlScheme):
    """A row that counts, which a trigger of each table raises; only an INSERT draws a key."""

    about = About(
        name="counter",
        title="Counter table and trigger",
        central=True,
        needs=Needs(postgresql=1),
        safe_under="any number of clients, clocks that jump, crashes of the server; a rollback leaves no gap",
        unsafe_under="a failover to a standby that lacks the last WAL, a restore; keys given by hand",
        stops="all keys, while a transaction that has inserted a row is open; when the one server is down",
        tells="the order of birth, and how many rows there are",
        settings="BEFORE INSERT trigger in PL/pgSQL, UPDATE … RETURNING of one row; a draw is an INSERT"
        " with its COMMIT",
        described_at="https://www.postgresql.org/docs/current/plpgsql-trigger.html",
    )
    files = ("compare/baselines.v1",)

    def _open(self, servers: Servers, node: int) -> Source:
        return _inserting(servers.postgresql[0], _COUNTED)

    def column(self, node: int = 0) -> KeyColumn:
        """Return the column; on servers other than the first, the client supplies the key."""
        return KeyColumn(type="bigint", trigger=_COUNT if node == 0 else None)


def _inserting(url: str, table: sql.Identifier) -> SqlSource:
    """Return a source whose draws insert rows into a table with no column but the key."""
    return SqlSource(
        url,
        sql.SQL("insert into {} default values returning id").format(table),
        sql.SQL("insert into {} select from generate_series(1, %s::integer) returning id").format(table),
    )


class Offsets(SqlScheme):
    """``nextval`` of the node's sequence, whose increment is the number of nodes."""

    about = About(
        name="offsets",
        title="Multi-master offsets",
        needs=Needs(postgresql=2),
        safe_under="any number of clients, clocks that jump, the loss of any master",
        unsafe_under="a master that was left out, or switched out of turn, when others are added; a restore"
        " or failover that lacks the last WAL; keys given by hand",
        stops="the rows of a master that is down",
        tells="its master, as long as their number has never changed",
        settings="INCREMENT BY k START i, CACHE 1; made and verified by shardids multimaster",
        described_at="https://www.postgresql.org/docs/current/sql-createsequence.html",
    )
    files = ("compare/offsets.v1",)

    def install(self, servers: Servers) -> None:
        super().install(servers)
        masters = [
            multimaster.Master(name=f"m{number}", url=url) for number, url in enumerate(servers.postgresql, 1)
        ]
        states = multimaster.read_masters(masters, ["shardids_offsets"])
        multimaster.carry_out(masters, multimaster.make_plan(states).steps)

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint", draw=sql.SQL("nextval('shardids_offsets.row_id_seq')"))
