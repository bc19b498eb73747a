"""What a session's memory grows by when it draws from thousands of shards."""

from __future__ import annotations

import psycopg

from benchmarks.report import Section, Table, figure
from benchmarks.schemes import NEXT_ID, PUBLISHED, server_with_all, version_of

SHARDS = 4096


def run(_rounds: int) -> Section:
    """Measure two sessions: one draws from every shard, one from a published function in every shard."""
    with server_with_all(SHARDS) as (server, connection):
        for shard in range(SHARDS):
            # The published function's statements, under the shard's own name.
            connection.execute(_COPY.format(schema=f"shard_{shard:04d}").encode())
        rows = {
            NEXT_ID: (_growth(server.url(), "next_id"),),
            f"{PUBLISHED}, one in each shard": (_growth(server.url(), "published"),),
        }
        version = version_of(connection)
        connection.close()
        server.restart()
        rows[f"{NEXT_ID}, the first of each shard after a restart"] = (_growth(server.url(), "next_id"),)
    return Section(
        title=f"Memory of a session that draws from {SHARDS:,} shards",
        conditions=f"PostgreSQL {version}. What pg_backend_memory_contexts grew by, first shard to last."
        " After a restart the first draw of a shard, in whichever session, calls the shard's own function.",
        table=Table(columns=("MB",), rows=rows),
        ratios=(figure("next_id(), MB", rows[NEXT_ID][0], at_most=45),),
    )


_COPY = """
do $do$
begin
  execute replace(pg_get_functiondef('published.next_id'::regproc),
                  'published.next_id(', '{schema}.published(');
end
$do$"""


def _growth(url: str, function: str) -> float:
    with psycopg.connect(url, autocommit=True) as session:
        sizes = []
        for shard in range(SHARDS):
            session.execute(f"select shard_{shard:04d}.{function}()".encode(), prepare=False)
            if shard in (0, SHARDS - 1):
                row = session.execute("select sum(total_bytes) from pg_backend_memory_contexts").fetchone()
                sizes.append(float(row[0]) if row else 0.0)
    return (sizes[1] - sizes[0]) / 1e6
