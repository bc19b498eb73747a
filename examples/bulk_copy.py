"""Load measurements with COPY, the quickest way into PostgreSQL; SQLAlchemy Core, no ORM.

COPY does not return the IDs that it drew, so each shard sets a block of IDs aside first: one round trip.
The rows are then known by their IDs before they are sent.

    SHARDIDS_CATALOG=… python examples/bulk_copy.py
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import psycopg
from psycopg import sql
from sqlalchemy import Column, Double, MetaData, Table, Text

from shardids import Cluster, IdBlock, primary_key_column

metadata = MetaData()
readings = Table(
    "readings",
    metadata,
    primary_key_column("id"),
    Column("sensor", Text, nullable=False),
    Column("celsius", Double, nullable=False),
)

Reading = tuple[str, float]
"""A sensor's name, by which readings are sharded, and its temperature."""


def create_tables(cluster: Cluster) -> None:
    """Make the table in every shard."""
    for shard in cluster.placement.node_of:
        with cluster.shard_engine(shard).begin() as connection:
            metadata.create_all(connection)


def load(cluster: Cluster, rows: Iterable[Reading]) -> Iterator[tuple[IdBlock, list[Reading]]]:
    """Copy readings into the shards of their sensors; yield a shard's IDs and rows after its commit."""
    by_shard: dict[int, list[Reading]] = defaultdict(list)
    for row in rows:
        by_shard[cluster.shard_for(row[0])].append(row)
    for shard, members in by_shard.items():
        # Before the transaction: it would otherwise hold one connection and wait for another.
        ids = cluster.reserve(shard, len(members))
        copy_rows(cluster, ids, members)
        yield ids, members


def copy_rows(cluster: Cluster, ids: IdBlock, rows: Iterable[Reading]) -> None:
    """Copy rows into the shard of their IDs, in one transaction."""
    table = sql.Identifier(cluster.schema_of(ids.shard), readings.name)
    statement = sql.SQL("COPY {} (id, sensor, celsius) FROM STDIN").format(table)
    with cluster.connection(ids.shard) as connection, connection.begin():
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)  # noqa: S101 -- as every engine of a cluster
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for id_, row in zip(ids, rows, strict=True):
                copy.write_row((id_, *row))


def main() -> None:
    """Load 100,000 readings of 1,000 sensors."""
    rows = [(f"sensor {number % 1000}", 20 + number % 7 / 10) for number in range(100_000)]
    with Cluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        create_tables(cluster)
        started = time.perf_counter()
        loaded = sum(len(ids) for ids, _ in load(cluster, rows))
        print(f"{loaded:,} rows in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
