"""The first draw of a new session: by a column's default, and by the function's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psycopg

from benchmarks.report import Measure, Section, interleaved, seconds
from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_servers

SHARDS = (64, 512, 2048)
DRAWS = {
    "by the default": b"insert into shard_0003.rows default values",
    "by name": b"select shard_0003.next_id()",
    "shardids.reserve": b"select shardids.reserve(3, 100)",
}


def run(rounds: int) -> Section:
    """Measure the first draw of new sessions on one node, with more and more shards."""
    measures: list[Measure] = []
    with temporary_servers(1) as (server,):
        catalog = Catalog(server.url())
        provision.init(catalog, DEFAULT, max(SHARDS))
        provision.add_node(catalog, "a", server.url())
        for count in SHARDS:
            provision.create_shards(catalog, range(count))
            if count == SHARDS[0]:
                with psycopg.connect(server.url(), autocommit=True) as connection:
                    connection.execute(
                        "create table shard_0003.rows (id bigint primary key default shard_0003.next_id())"
                    )
            for kind, unit in ((_first_ms, "ms"), (_first_mb, "MB")):
                cases: dict[str, Callable[[], float]] = {
                    f"{count:,} shards, {name}": partial(kind, server.url(), statement)
                    for name, statement in DRAWS.items()
                }
                measures += interleaved(cases, rounds=rounds, unit=unit).values()
        catalog.close()
    return Section(
        title="The first draw of a session",
        conditions=f"One server, {rounds} new sessions each. PostgreSQL lists the functions of one name in"
        " all schemas to find one by its name; a column's default refers to it without its name.",
        measures=tuple(measures),
    )


def _first_mb(url: str, statement: bytes) -> float:
    """Return by how many MB a new session's memory grows."""
    with psycopg.connect(url, autocommit=True) as connection:
        _used_mb(connection)
        before = _used_mb(connection)
        connection.execute(statement)
        return _used_mb(connection) - before


def _used_mb(connection: psycopg.Connection) -> float:
    used = connection.execute("select sum(used_bytes) from pg_backend_memory_contexts").fetchone()
    return float(used[0]) / 1e6 if used is not None else 0.0


def _first_ms(url: str, statement: bytes) -> float:
    with psycopg.connect(url, autocommit=True) as connection:
        return seconds(lambda: connection.execute(statement)) * 1000
