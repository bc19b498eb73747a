"""Sessions on PostgreSQL servers that are not nodes of a cluster: masters, and those of a comparison."""

from __future__ import annotations

from typing import Any, LiteralString, NoReturn

import psycopg
from psycopg import sql

from shardids.catalog.connections import statement_failed, translate
from shardids.catalog.urls import parse_url


class PostgreSqlSession:
    """Opens an autocommit connection that raises shardids' errors where one fits.

    ``what`` names the server in their messages.
    """

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
        """Runs a query and returns its rows."""
        try:
            return self.connection.execute(query, parameters or None).fetchall()
        except psycopg.Error as error:
            self.fail(error)

    def run(self, script: str) -> None:
        """Runs the text of an SQL file in one transaction."""
        try:
            self.connection.execute(script.encode())
        except psycopg.Error as error:
            self.fail(error)

    def fail(self, error: psycopg.Error) -> NoReturn:
        """Raises shardids' error for the driver's."""
        ours = translate(error, what=self._what, url=self._url)
        raise ours or statement_failed(error, self._what, self._url) from error

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()
