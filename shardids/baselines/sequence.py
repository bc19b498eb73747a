"""One sequence of one PostgreSQL server for all clients."""

from __future__ import annotations

from psycopg import sql

from shardids.baselines.postgresql import SqlScheme, SqlSource
from shardids.baselines.scheme import About, Column, Needs, Servers, Source


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
        return SqlSource.of(servers.postgresql[0], _DRAW)

    def column(self, node: int = 0) -> Column:
        """As the interface says; on other servers than the first the client brings the key."""
        return Column(type="bigint", draw=_DRAW if node == 0 else None)


_DRAW = sql.SQL("nextval('shardids_baselines.one')")
