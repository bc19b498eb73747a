"""What the schemes that draw from PostgreSQL share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, LiteralString, NoReturn

import psycopg
from psycopg import sql

from shardids.baselines.scheme import Column, Key, Scheme, Servers, Source
from shardids.catalog.connections import parse_url, statement_failed, translate
from shardids.catalog.sqlfiles import read_sql
from shardids.errors import UnsupportedServer

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Session:
    """An autocommit connection whose errors are shardids' where there is one that fits."""

    def __init__(self, url: str, *, what: str = "the PostgreSQL server") -> None:
        self._url, self._what = parse_url(url), what
        try:
            self.connection: psycopg.Connection[Any] = psycopg.connect(
                self._url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
            )
        except psycopg.Error as error:
            self.fail(error)

    def rows(
        self, query: sql.SQL | sql.Composed | LiteralString, parameters: tuple[object, ...] = ()
    ) -> list[Any]:
        """Runs a query and gives its rows."""
        try:
            return self.connection.execute(query, parameters or None).fetchall()
        except psycopg.Error as error:
            self.fail(error)

    def run(self, script: str) -> None:
        """Runs the text of an SQL file, as one transaction."""
        try:
            self.connection.execute(script.encode())
        except psycopg.Error as error:
            self.fail(error)

    def fail(self, error: psycopg.Error) -> NoReturn:
        """Raises the error in shardids' words."""
        ours = translate(error, what=self._what, url=self._url)
        raise ours or statement_failed(error, self._what, self._url) from error

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()


class SqlSource(Source):
    """Draws by a query for one key, and by one for many that takes their number."""

    def __init__(self, url: str, one: sql.Composed, many: sql.Composed) -> None:
        self._one, self._many = one, many
        self._session = Session(url)

    @classmethod
    def of(cls, url: str, draw: sql.Composable) -> SqlSource:
        """Draws by an expression: once, or in each row of ``generate_series``."""
        return cls(
            url,
            sql.SQL("select {}").format(draw),
            sql.SQL("select {} from generate_series(1, %s::integer)").format(draw),
        )

    def draw(self) -> Key:
        key: Key = self._session.rows(self._one)[0][0]
        return key

    def _draw_many(self, count: int) -> list[Key]:
        return [key for (key,) in self._session.rows(self._many, (count,))]

    def close(self) -> None:
        self._session.close()


class SqlScheme(Scheme):
    """A scheme whose keys come from an expression on the node's own server."""

    files: tuple[str, ...] = ()
    """The SQL files that it is made of."""

    def install(self, servers: Servers) -> None:
        self.check(servers)
        for url in servers.postgresql:
            install(url, *self.files, oldest=self.about.needs.oldest_postgresql)

    def _open(self, servers: Servers, node: int) -> Source:
        draw = self.column(node).draw
        if draw is None:
            raise NotImplementedError
        return SqlSource.of(servers.postgresql[node], draw)

    def column(self, node: int = 0) -> Column:
        raise NotImplementedError


def install(url: str, *files: str, oldest: int = 14, settings: Mapping[str, str] = _NOTHING) -> None:
    """Runs SQL files in a database, one after the other, with these settings of the session.

    Raises:
        UnsupportedServer: the server is older than the major version ``oldest``.
        ConnectionFailed, MissingPrivilege: as they say.
    """
    session = Session(url)
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
