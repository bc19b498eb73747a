"""A hot shard that an unattended rebalance gives a node to itself, while all shards are written to."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import psycopg
from sqlalchemy import text

from benchmarks.report import Section, Table, figure
from shardids import Cluster
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.testing.devcluster import create_cluster

NODES, SHARDS, HOT = 3, 16, 0
TIMES: Final = 10
"""How many times the load of another shard the hot one has."""
PATIENCE_S: Final = 600.0
_TABLE = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null,
                            at timestamptz not null default now());
    create table {s}.photos (id bigint primary key default {s}.next_id(),
                             user_id bigint not null references {s}.users, caption text);
    insert into {s}.users (name) select 'user ' || n from generate_series(1, {rows}) n;
    insert into {s}.photos (user_id, caption) select id, repeat('x', 40) from {s}.users;
    create index on {s}.photos (user_id);
    analyze {s}.users; analyze {s}.photos"""
_USERS = [text(f"insert into shard_{n:04}.users (name) values ('new') returning id") for n in range(SHARDS)]
_PHOTOS = [
    text(f"insert into shard_{n:04}.photos (user_id, caption) values (:user, 'new')") for n in range(SHARDS)
]


@dataclass
class Drill:
    """Three nodes, 16 shards and their writers; shard 0 gets ten times the writes of another.

    Attributes:
        decisions: those of the watch, with the time at which each was read, by the monotonic clock.
        waits: the end and the length of each write, in s.
        written: the shard and the ID of each acknowledged user.
    """

    servers: Sequence[EmbeddedServer]
    catalog: Catalog
    writers: int = 8
    writes_a_second: float = 200.0
    decisions: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(cls, rows: int, **how: Any) -> Iterator[Self]:
        """Yield a drill whose shards have so many users each, spread over the nodes."""
        with temporary_servers(NODES, settings={"shared_buffers": "128MB"}) as servers:
            catalog = Catalog(create_cluster(servers, SHARDS))
            try:
                drill = cls(servers=servers, catalog=catalog, **how)
                for shard, node in catalog.placement().node_of.items():
                    with psycopg.connect(drill.url(node), autocommit=True) as connection:
                        connection.execute(_TABLE.format(s=f"shard_{shard:04}", rows=rows).encode())
                yield drill
            finally:
                catalog.close()

    @property
    def catalog_url(self) -> str:
        """Returns the catalog's URL, as the command takes it."""
        return self.catalog.url.set(drivername="postgresql").render_as_string(False)

    def url(self, node: str) -> str:
        """Return the URL of a node's database."""
        return self.servers["abc".index(node)].url()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to all shards until the block ends.

        Raises:
            Exception: a write failed for good.
        """
        with Cluster.connect(self.catalog_url, pool_size=self.writers) as cluster:
            threads = [
                threading.Thread(target=self._write, args=(cluster, number)) for number in range(self.writers)
            ]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._stop.set()
                for thread in threads:
                    thread.join()
        for failure in self._failures:
            raise failure

    def _write(self, cluster: Cluster, number: int) -> None:
        chance = random.Random(number)
        weights = [TIMES if shard == HOT else 1 for shard in range(SHARDS)]
        due = time.monotonic()
        try:
            while not self._stop.is_set():
                due = max(due + self.writers / self.writes_a_second, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))
                (shard,) = chance.choices(range(SHARDS), weights)

                begun = time.monotonic()
                user = cluster.at(shard=shard).run(partial(_write_once, shard))
                ended = time.monotonic()
                self.waits.append((ended, ended - begun))
                self.written.append((shard, user))
        except BaseException as failure:  # noqa: BLE001 -- raised again by writing()
            self._failures.append(failure)

    @contextmanager
    def watching(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        """Run ``shardids rebalance --watch`` as a process, and keep its decisions."""
        words = [sys.executable, "-c", "from shardids.cli import app; app()"]
        environment = os.environ | {
            "SHARDIDS_CATALOG": self.catalog_url,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        with subprocess.Popen(
            [*words, "rebalance", "--watch", "--json", *options],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = process.stdout

            def read() -> None:
                for line in lines:
                    self.decisions.append((time.monotonic(), json.loads(line)))

            reading = threading.Thread(target=read)
            reading.start()
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                reading.join()

    def is_alone(self) -> bool:
        """Return whether the hot shard has a node to itself."""
        node_of = self.catalog.placement().node_of
        return [shard for shard, node in node_of.items() if node == node_of[HOT]] == [HOT]

    def await_alone(self, patience_s: float = PATIENCE_S) -> float:
        """Wait until the hot shard has a node to itself; return the seconds.

        Raises:
            TimeoutError: it does not come to that.
        """
        begun = time.monotonic()
        while not self.is_alone():
            if time.monotonic() - begun > patience_s:
                raise TimeoutError(f"after {patience_s:g} s: {self.decisions}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def moments(self, what: str) -> list[float]:
        """Return when there were decisions of a kind."""
        return [at for at, decision in self.decisions if decision["what"] == what]

    def begun(self) -> int:
        """Return how many moves were begun or resumed."""
        return len(self.moments("moving")) + len(self.moments("resuming"))

    def waits_ms(self, begun: float, ended: float) -> list[float]:
        """Return the lengths of the writes that ended between two moments, in ms."""
        return [wait_s * 1000 for at, wait_s in self.waits if begun <= at <= ended]

    def missing(self) -> int:
        """Return how many acknowledged users are not, once, where their shard is."""
        wanted: dict[int, list[int]] = {}
        for shard, user in self.written:
            wanted.setdefault(shard, []).append(user)
        found = 0
        for shard, node in self.catalog.placement().node_of.items():
            with psycopg.connect(self.url(node)) as connection:
                row = connection.execute(
                    f"select count(*) from shard_{shard:04}.users where id = any (%s)".encode(),
                    [wanted.get(shard, [])],
                ).fetchone()
                found += row[0] if row else 0
        return len(self.written) - found


def _write_once(shard: int, session: Any) -> int:
    user: int = session.execute(_USERS[shard]).scalar_one()
    session.execute(_PHOTOS[shard], {"user": user})
    return user


def percentile(waits: Sequence[float], part: float) -> float:
    """Return the wait that this part of all waits does not exceed."""
    return sorted(waits)[min(len(waits) - 1, int(len(waits) * part))]


def _drill(rows: int) -> Mapping[str, float]:
    with Drill.opened(rows) as drill:
        with drill.writing(), drill.watching("--over", "20s") as watch:
            time.sleep(1)
            took_s = drill.await_alone()
            # Moves that only even out the others are part of it.
            while len(drill.moments("moved")) < len(drill.moments("moving")):
                time.sleep(0.1)
            watch.terminate()
            watch.wait(60)
        first, last = drill.moments("moving")[0], drill.moments("moved")[-1]
        during = drill.waits_ms(first, last + 0.5)
        before = drill.waits_ms(0, first)
        return {
            "seconds": took_s,
            "moves": float(len(drill.moments("moved"))),
            "moving": last - first,
            "p50": statistics.median(during),
            "p99": percentile(during, 0.99),
            "worst": max(during),
            "p99 before": percentile(before, 0.99),
            "writes": float(len(drill.written)),
            "missing": float(drill.missing()),
            "failed": float(len(drill.moments("failed"))),
        }


def run(rounds: int, rows: int = 20_000) -> Section:
    """Give the hot shard a node to itself."""
    found = [_drill(rows) for _ in range(rounds)]
    names = ("seconds", "moves", "moving", "p99 before", "p50", "p99", "worst", "writes")
    return Section(
        title="A hot shard gets a node to itself, unattended",
        conditions=f"shardids rebalance --watch --over 20s, on {NODES} nodes with {SHARDS} shards of"
        f" {2 * rows:,} rows; one gets {TIMES} times the writes of each other. 8 sessions that write 200"
        " transactions of two rows per second in all by Shard.run; servers, writers and watch on one machine,"
        f" fsync off; {rounds} rounds. Writes: those from the beginning of the first move to the end of the"
        " last.",
        table=Table(
            columns=(
                "s until then",
                "moves",
                "s of moves",
                "p99 before, ms",
                "median write, ms",
                "p99 write, ms",
                "worst write, ms",
                "writes",
            ),
            rows={
                f"round {number}": tuple(one[name] for name in names) for number, one in enumerate(found, 1)
            },
        ),
        ratios=(
            figure("seconds until the shard has its node", max(one["seconds"] for one in found), at_most=600),
            figure(
                "p99 write over the moves, ms", statistics.median(one["p99"] for one in found), at_most=60
            ),
            figure("writes missing", sum(one["missing"] for one in found), at_most=0),
            figure("moves that failed", sum(one["failed"] for one in found), at_most=0),
        ),
    )
