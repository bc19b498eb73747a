"""Returning from the adoption of a million rows: how far the source is behind the shards, and both pauses."""

from __future__ import annotations

import threading
import time

import psycopg

from benchmarks.report import Section, figure
from benchmarks.taking_in import (
    ITEMS,
    ORDERS,
    SHARDS,
    USERS,
    WRITERS,
    WRITES_A_SECOND,
    measure,
    p99,
    shop,
)
from shardids.adopt import adoption
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import EmbeddedServer


def run(rounds: int) -> Section:
    """Adopt the database and keep a way back, write to the shards, and return, once a round."""
    there_ms, pauses_ms, lags_ms, waits_ms, missing = [], [], [], [], 0
    for _ in range(rounds):
        with shop(is_derived=True) as (source, catalog, plan):
            adoption.run(catalog, plan)
            there_ms.append(adoption.switch(catalog, keep_back=True).pause_ms or 0.0)
            with _Writers(catalog) as writers:
                lags_ms += _lags_ms(source, catalog, seconds=8)
                writers.start_phase()
                pauses_ms.append(adoption.back(catalog).pause_ms or 0.0)
                waits_ms.append(max(writers.start_phase(), default=0.0) * 1000)
            with psycopg.connect(source.url()) as connection:
                row = connection.execute(
                    "select count(*) from orders where id = any (%s)", [writers.written]
                ).fetchone()
            missing += len(writers.written) - (row[0] if row else 0)
    return Section(
        title=f"Returning from an adoption of {USERS + ORDERS + ITEMS:,} rows",
        conditions=f"As above, {SHARDS} shards on two nodes, three servers on one machine, fsync off;"
        f" {WRITERS} sessions that insert {WRITES_A_SECOND} rows per second into shards, whose changes are"
        f" sent back; {rounds} rounds. A row is behind for as long as the source does not show it after its"
        " COMMIT. The pause is from the locks in the shards to the open source.",
        measures=(
            measure("a row is behind", "ms", lags_ms),
            measure("no writes are taken, on the way back", "ms", pauses_ms),
            measure("no writes are taken, by a switch that keeps it", "ms", there_ms),
        ),
        ratios=(
            figure("pause of the way back, worst, ms", max(pauses_ms), at_most=500),
            figure("pause of the switch, worst, ms", max(there_ms), at_most=500),
            figure("longest write to a shard during the return, ms", max(waits_ms), at_most=500),
            figure("p99 of a row behind, ms", p99(lags_ms), at_most=1000),
            figure("rows missing afterwards", float(missing), at_most=0),
        ),
    )


def _lags_ms(source: EmbeddedServer, catalog: Catalog, *, seconds: float) -> list[float]:
    """Return how long rows that are written to a shard take to be seen at the source."""
    found, end = [], time.monotonic() + seconds
    node = catalog.placement().nodes[catalog.placement().node_of[0]]
    with (
        psycopg.connect(node.url, autocommit=True) as shard,
        psycopg.connect(source.url(), autocommit=True) as there,
    ):
        while time.monotonic() < end:
            row = shard.execute("insert into shard_0000.users (name) values ('seen') returning id").fetchone()
            begun = time.monotonic()
            while not there.execute("select from users where id = %s", row).fetchall():
                time.sleep(0.001)
            found.append((time.monotonic() - begun) * 1000)
            time.sleep(0.1)
    return found


class _Writers:
    """Sessions, each in another shard, that insert orders at a steady rate until they are refused."""

    def __init__(self, catalog: Catalog) -> None:
        self.written: list[int] = []
        self.waits_s: list[float] = []
        self._placement = catalog.placement()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(WRITERS)]

    def __enter__(self) -> _Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def start_phase(self) -> list[float]:
        """Return how long the writes of the phase took that ends, in seconds."""
        done, self.waits_s = self.waits_s, []
        return done

    def _write(self, index: int) -> None:
        shard = index * (SHARDS // WRITERS)
        schema, node = f"shard_{shard:04}", self._placement.nodes[self._placement.node_of[shard]]
        with psycopg.connect(node.url, autocommit=True) as connection:
            user = connection.execute(
                f"insert into {schema}.users (name) values ('new') returning id"
            ).fetchone()
            insert = f"insert into {schema}.orders (user_id, what) values (%s, 'new') returning id"
            due = time.monotonic()
            while not self._stop.is_set():
                due = max(due + WRITERS / WRITES_A_SECOND, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))
                begun = time.monotonic()
                try:
                    row = connection.execute(insert, user).fetchone()
                except psycopg.Error as error:
                    if error.sqlstate != "SI002":
                        raise
                    return
                self.waits_s.append(time.monotonic() - begun)
                self.written.append(row[0] if row else -1)
