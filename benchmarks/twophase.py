"""What it costs to commit on two nodes or on none, beside COMMIT on one node, and on two in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, update

from benchmarks.report import Section, Timed, interleaved, ratio, seconds
from shardids import Cluster
from shardids.pg.embedded import temporary_servers
from shardids.testing import devcluster

TRANSACTIONS = 50
ONE, APART, TOGETHER, ALONE = (
    "one node",
    "two nodes, one after another",
    "two nodes, twophase=True",
    "one node, twophase=True",
)
_COUNTERS = Table(
    "counters", MetaData(), Column("name", String, primary_key=True), Column("value", Integer, nullable=False)
)


def run(rounds: int) -> Section:
    """Measure one client that raises a counter on one node, or one on each of two."""
    with _cluster() as cluster:
        here, there = (shards[0] for shards in cluster.placement.by_node().values())
        m = interleaved(
            {
                ONE: _raising(cluster, [here, here]),
                ALONE: _raising(cluster, [here, here], twophase=True),
                APART: _raising(cluster, [here, there]),
                TOGETHER: _raising(cluster, [here, there], twophase=True),
            },
            rounds=rounds,
            unit="ms a transaction",
        )
        version = _version(cluster)
    return Section(
        title="Commit on two nodes or on none",
        conditions=f"PostgreSQL {version}, two servers of this machine, fsync on, one client, two UPDATE of a"
        f" row each and COMMIT, {TRANSACTIONS} transactions a round, {rounds} rounds.",
        measures=tuple(m.values()),
        ratios=(ratio(m[TOGETHER], m[ONE]), ratio(m[TOGETHER], m[APART]), ratio(m[ALONE], m[ONE])),
    )


@contextmanager
def _cluster() -> Iterator[Cluster]:
    with temporary_servers(2, settings={"fsync": "on", "synchronous_commit": "on"}) as servers:
        url = devcluster.create_cluster(servers, 2)
        with Cluster.connect(url, listen=False) as cluster:
            for shard in range(2):
                with cluster.at(shard=shard).engine.begin() as connection:
                    _COUNTERS.create(connection)
                    connection.execute(_COUNTERS.insert(), {"name": "one", "value": 0})
            yield cluster


def _raising(cluster: Cluster, shards: list[int], **options: Any) -> Timed:
    raise_one = update(_COUNTERS).values(value=_COUNTERS.c.value + 1)

    def raise_all() -> None:
        for _ in range(TRANSACTIONS):
            with cluster.sharded_session(**options) as session:
                for shard in shards:
                    session.connection({"shard_id": shard}).execute(raise_one)
                session.commit()

    return lambda: seconds(raise_all) / TRANSACTIONS * 1000


def _version(cluster: Cluster) -> str:
    with cluster.at(shard=0).connection() as connection:
        return str(connection.exec_driver_sql("show server_version").scalar()).split()[0]
