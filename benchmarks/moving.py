"""Moving a shard of a million rows: against pg_dump and psql, and how long writes to it pause."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy import text

from benchmarks.report import Measure, Section, figure, interleaved, ratio, seconds
from shardids import Cluster, mover
from shardids.catalog.rows import Catalog
from shardids.dev.devcluster import found
from shardids.dev.embedded import EmbeddedServer, find_binaries, temporary_servers
from shardids.install import provision

USERS, PHOTOS = 200_000, 800_000
WRITERS, WRITES_A_SECOND = 16, 500
TABLES = f"""
    create table shard_0000.users (id bigint primary key default shard_0000.next_id(), name text not null,
                                   at timestamptz not null default now());
    create table shard_0000.photos (id bigint primary key default shard_0000.next_id(),
                                    user_id bigint not null, caption text);
    insert into shard_0000.users (name) select 'user ' || n from generate_series(1, {USERS}) n;
    insert into shard_0000.photos (user_id, caption)
    select u.id, repeat('x', 40) from shard_0000.users u, generate_series(1, {PHOTOS // USERS});
    create index on shard_0000.photos (user_id);
    alter table shard_0000.photos add foreign key (user_id) references shard_0000.users;
    analyze shard_0000.users; analyze shard_0000.photos"""

PLAIN = """
    create schema shard_0000;
    create table shard_0000.users (id bigint primary key, name text not null, at timestamptz not null);
    create table shard_0000.photos (id bigint primary key, user_id bigint not null, caption text)"""
PLAIN_REST = """
    create index on shard_0000.photos (user_id);
    alter table shard_0000.photos add foreign key (user_id) references shard_0000.users;
    analyze shard_0000.users; analyze shard_0000.photos"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    """Makes two servers, with a shard 0 of a million rows on node a, and an empty node c on the second."""

    servers: list[EmbeddedServer]
    catalog: Catalog

    def urls(self) -> dict[str, str]:
        """Returns where the nodes of shard 0 are."""
        first, second = self.servers
        return {"a": first.url(), "b": second.url()}

    def move(self, *words: str) -> float:
        """Runs ``shardids shard move`` as a process of its own; returns the seconds that takes."""
        command = [sys.executable, "-c", "from shardids.cli import app; app()", "shard", "move", "0", *words]
        url = self.catalog.url.set(drivername="postgresql").render_as_string(False)
        environment = os.environ | {
            "SHARDIDS_CATALOG": url,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs
        return seconds(
            lambda: subprocess.run(
                command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Yields them; shard 0 is on node a."""
    with temporary_servers(2, settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as servers:
        catalog = Catalog(found(servers, 2))
        try:
            _execute(servers[1].url(), "create database plain")
            provision.add_node(catalog, "c", servers[1].url("plain"))
            _execute(servers[0].url(), TABLES)
            yield TwoNodes(servers=servers, catalog=catalog)
        finally:
            catalog.close()


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def whole_move(rounds: int) -> Section:
    """Moves the idle shard, and copies it with pg_dump and psql."""
    with two_nodes() as nodes:

        def move() -> float:
            took = nodes.move("--to", "b")
            mover.move(nodes.catalog, 0, "a", back=True)
            mover.purge(nodes.catalog, [0])
            return took

        def dump() -> float:
            took = seconds(lambda: _dump_and_play(nodes))
            _execute(nodes.servers[1].url("plain"), "drop schema shard_0000 cascade")
            return took

        def subscribe() -> float:
            took = seconds(lambda: _subscribe(nodes))
            _execute(nodes.servers[1].url("plain"), "drop subscription plain")
            _execute(nodes.servers[0].url(), "drop publication plain")
            _execute(nodes.servers[1].url("plain"), "drop schema shard_0000 cascade")
            return took

        cases = {"shard move": move, "pg_dump | psql": dump, "CREATE SUBSCRIPTION": subscribe}
        measures = interleaved(cases, rounds=rounds, unit="s")
    return Section(
        title="Moving a shard of 1,000,000 rows",
        conditions=f"Two tables with a foreign key and an index, idle; two servers on one machine, fsync off;"
        f" {rounds} rounds. The move is a command: its start, its checks, and"
        " statistics of the new tables are part of it. CREATE SUBSCRIPTION: by hand, tables with keys,"
        " the copy, then the index, the foreign key and statistics.",
        measures=tuple(measures.values()),
        ratios=(
            ratio(measures["shard move"], measures["pg_dump | psql"], at_most=1.5),
            ratio(measures["shard move"], measures["CREATE SUBSCRIPTION"]),
        ),
    )


def _dump_and_play(nodes: TwoNodes) -> None:
    programs = find_binaries()
    source, target = nodes.servers[0].url(), nodes.servers[1].url("plain")
    with subprocess.Popen(
        [programs / "pg_dump", "-n", "shard_0000", source], stdout=subprocess.PIPE
    ) as dumping:
        play = [str(programs / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.devnull, target]
        subprocess.run(play, stdin=dumping.stdout, check=True)


def _subscribe(nodes: TwoNodes) -> None:
    source, target = nodes.servers[0].url(), nodes.servers[1].url("plain")
    _execute(source, "create publication plain for table shard_0000.users, shard_0000.photos")
    with psycopg.connect(source) as there, psycopg.connect(target, autocommit=True) as here:
        password = Path(there.info.get_parameters()["passfile"]).read_text("utf-8").strip().rpartition(":")[2]
        conninfo = make_conninfo(
            host=there.info.host,
            port=there.info.port,
            dbname=there.info.dbname,
            user=there.info.user,
            password=password,
        )
        here.execute(PLAIN)
        subscription = sql.SQL("create subscription plain connection {} publication plain with (binary)")
        here.execute(subscription.format(sql.Literal(conninfo)))
        left = "select exists (select from pg_subscription_rel where srsubstate not in ('r', 's'))"
        while here.execute(left).fetchone() == (True,):
            time.sleep(0.02)
        here.execute(PLAIN_REST)


def pause(rounds: int) -> Section:
    """Moves the shard back and forth under writers, and takes each writer's longest wait of each move."""
    waits_ms: list[float] = []
    with two_nodes() as nodes, _Writers(nodes) as writers:
        for number in range(rounds):
            time.sleep(0.5)
            writers.longest_ms = [0.0] * WRITERS
            nodes.move(*(["--back"] if number else ["--to", "b"]))
            time.sleep(0.5)
            waits_ms += writers.longest_ms
    ordered = sorted(waits_ms)
    p99 = ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))]
    measure = Measure(
        name="longest write of a writer during a move",
        unit="ms",
        median=ordered[len(ordered) // 2],
        lowest=ordered[0],
        highest=ordered[-1],
    )
    return Section(
        title="Pause of writes while a shard of 1,000,000 rows moves",
        conditions=f"{WRITERS} sessions that insert {WRITES_A_SECOND} rows a second in all, by Cluster.run,"
        f" {rounds} moves to and fro. The mover is a process of its own. A write lasts from its first attempt"
        " to its acknowledgement, retries included.",
        measures=(measure,),
        ratios=(
            figure("p99, ms", p99, at_most=60),
            figure("worst, ms", ordered[-1], at_most=1000),
            figure("rows missing afterwards", float(writers.missing), at_most=0),
        ),
    )


class _Writers:
    """Runs sessions that insert at a steady rate through ``Cluster.run``, wherever the shard is."""

    def __init__(self, nodes: TwoNodes) -> None:
        self._nodes = nodes
        url = nodes.catalog.url.set(drivername="postgresql").render_as_string(False)
        self._cluster = Cluster.connect(url, pool_size=WRITERS)
        self._stop = threading.Event()
        self._written: list[list[int]] = [[] for _ in range(WRITERS)]
        self._threads = [threading.Thread(target=self._write, args=(index,)) for index in range(WRITERS)]
        self.longest_ms = [0.0] * WRITERS
        self.missing = 0

    def __enter__(self) -> _Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._cluster.close()
        home = self._nodes.urls()[self._nodes.catalog.node_of(0).name]
        wanted = [id_ for ids in self._written for id_ in ids]
        with psycopg.connect(home) as connection:
            row = connection.execute(
                "select count(*) from shard_0000.users where id = any (%s)", [wanted]
            ).fetchone()
        self.missing = len(wanted) - (row[0] if row else 0)

    def _write(self, index: int) -> None:
        insert = text("insert into shard_0000.users (name) values ('new') returning id")
        due = time.monotonic()
        while not self._stop.is_set():
            due = max(due + WRITERS / WRITES_A_SECOND, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))
            begun = time.monotonic()
            id_: int = self._cluster.run(lambda session: session.execute(insert).scalar_one(), shard=0)
            self.longest_ms[index] = max(self.longest_ms[index], (time.monotonic() - begun) * 1000)
            self._written[index].append(id_)
