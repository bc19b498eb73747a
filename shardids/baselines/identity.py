"""An identity column: the key is made by the INSERT, and known afterwards."""

from __future__ import annotations

from psycopg import sql

from shardids.baselines.postgresql import SqlScheme, SqlSource
from shardids.baselines.scheme import About, Column, Needs, Servers, Source


class Identity(SqlScheme):
    """Keys of rows that are inserted; there is no other way to draw one."""

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
        return SqlSource(
            servers.postgresql[0],
            sql.SQL("insert into {} default values returning id").format(_ROWS),
            sql.SQL(
                "insert into {} select from generate_series(1, %s::integer) returning id",
            ).format(_ROWS),
        )

    def column(self, node: int = 0) -> Column:
        """As the interface says; on other servers than the first the client brings the key."""
        return Column(type="bigint", identity=node == 0)


_ROWS = sql.Identifier("shardids_baselines", "identity_row")
