"""Load measurements with COPY, the quickest way into PostgreSQL; SQLAlchemy Core, no ORM.

COPY does not return IDs, so ``Cluster.copy`` reserves them, one call a transaction. The rows are read as they
are sent: they may be more than fit into memory.

    SHARDIDS_CATALOG=… python examples/bulk_copy.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from sqlalchemy import Column, Double, MetaData, Table, Text

from shardids import Cluster, primary_key
from shardids.client.copying import Copied, CopyReport

metadata = MetaData()
readings = Table(
    "readings",
    metadata,
    primary_key("id"),
    Column("sensor", Text, nullable=False),
    Column("celsius", Double, nullable=False),
)

Reading = tuple[str, float]
"""A sensor's name, by which readings are sharded, and its temperature."""


def create_tables(cluster: Cluster) -> None:
    """Make the table in every shard."""
    for shard in cluster.placement.node_of:
        with cluster.at(shard=shard).engine.begin() as connection:
            metadata.create_all(connection)


def load(
    cluster: Cluster, rows: Iterable[Reading], on_progress: Callable[[Copied], object] = lambda _: None
) -> CopyReport:
    """Copy readings into the shards of their sensors."""
    return cluster.copy(readings, rows, columns=("sensor", "celsius"), key="sensor", on_progress=on_progress)


def main() -> None:
    """Load 100,000 readings of 1,000 sensors."""
    rows = ((f"sensor {number % 1000}", 20 + number % 7 / 10) for number in range(100_000))
    with Cluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        create_tables(cluster)
        started = time.perf_counter()
        report = load(cluster, rows)
        seconds = time.perf_counter() - started
        print(f"{report.rows:,} rows into {len(report.by_shard)} shards in {seconds:.2f} s")


if __name__ == "__main__":
    main()
