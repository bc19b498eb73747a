"""IDs that a thread hands out from blocks, which it reserves from many shards in turn."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from functools import partial
from itertools import cycle

from sqlalchemy import text

from benchmarks.report import Section, figure, interleaved, seconds
from shardids import Cluster
from shardids.pg.embedded import temporary_server
from shardids.testing.devcluster import create_cluster

SHARDS = 64
BLOCK = 100_000
BLOCKS = 640


def run(rounds: int) -> Section:
    """Measure one thread, and how far the shards lead their clock after that."""
    with temporary_server() as server, Cluster.connect(create_cluster([server], SHARDS)) as cluster:
        measures = interleaved({"IDs from blocks": partial(_rate, cluster)}, rounds=rounds, unit="million/s")
        lead_s = _lead_s(cluster)
        with cluster.at(shard=0).engine.connect() as connection:
            version = connection.exec_driver_sql("show server_version").scalar_one()
    (rate,) = measures.values()
    return Section(
        title="IDs from blocks, one thread",
        conditions=f"PostgreSQL {version}. A thread of Python reserves {BLOCKS} blocks of {BLOCK:,} IDs, of"
        f" {SHARDS} shards in turn, and iterates over each. {rounds} rounds.",
        measures=(rate,),
        ratios=(
            figure("IDs a second, million", rate.median, at_least=10),
            figure("a shard's lead over its clock at the end, s", lead_s),
        ),
    )


def _rate(cluster: Cluster) -> float:
    shards = cycle(range(SHARDS))

    def hand_out() -> None:
        for _ in range(BLOCKS):
            deque(cluster.at(shard=next(shards)).reserve(BLOCK), maxlen=0)

    return BLOCK * BLOCKS / seconds(hand_out) / 1e6


def _lead_s(cluster: Cluster) -> float:
    told = cluster.decode(cluster.at(shard=0).reserve(1)[0])
    with cluster.at(shard=0).engine.connect() as connection:
        now: datetime = connection.execute(text("select clock_timestamp()")).scalar_one()
    return (told.time - now).total_seconds()
