"""Multi-master auto-increment offsets on PostgreSQL, as one scheme among the others."""

from __future__ import annotations

from psycopg import sql

from shardids.baselines import multimaster
from shardids.baselines.postgresql import SqlScheme
from shardids.baselines.scheme import About, Column, Needs, Servers


class Offsets(SqlScheme):
    """``nextval`` of the node's sequence, which counts by the number of nodes."""

    about = About(
        name="offsets",
        title="Multi-master offsets",
        needs=Needs(postgresql=2),
        safe_under="any number of clients, clocks that jump, the loss of any master",
        unsafe_under="a master that was left out, or switched out of turn, when others are added; a restore"
        " or failover that lacks the last WAL; keys given by hand",
        stops="the rows of a master that is down",
        tells="its master, as long as their number has never changed",
        settings="INCREMENT BY k START i, CACHE 1; made and verified by shardids baseline multimaster",
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

    def column(self, node: int = 0) -> Column:
        return Column(type="bigint", draw=sql.SQL("nextval('shardids_offsets.row_id_seq')"))
