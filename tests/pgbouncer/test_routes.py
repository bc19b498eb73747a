"""PgBouncer before a whole cluster: each shard is a database of it, and moves beneath its clients."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

from shardids import mover
from shardids.pg.embedded import temporary_servers
from tests.conftest import dsn
from tests.pgbouncer.conftest import documented_settings
from tests.support.client_programs import client_folder
from tests.support.clusters import COMMAND, command_here, environment
from tests.support.moves import TwoNodes, schema, two_nodes, url_of
from tests.support.pgbouncer import PgBouncer, running
from tests.support.waiting import wait_for

SHARDS = 64
WRITERS = 16
MOVES = 4
PASSWORD = "routes"
MOVED = {"SI001", "SI002", "SI003", "3F000", "42P01", "42883"}
"""SQLSTATEs of the page on other clients: roll back and repeat the transaction."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """64 shards with a table, on two servers where an application role has the same password."""
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for name in nodes.servers:
            with nodes.connected(name) as db:
                db.execute(f"create role app login password '{PASSWORD}'")
                there = db.execute("select id from shardids.shard order by id").fetchall()
                for (shard,) in there:
                    db.execute(
                        f"create table {schema(shard)}.notes (id bigint primary key default"
                        f" {schema(shard)}.next_id(), writer integer not null, number integer not null)"
                    )
                    db.execute(f"grant select, insert on {schema(shard)}.notes to app")
        done = command_here("grant", "app", SHARDIDS_CATALOG=nodes.catalog_url)
        assert done.returncode == 0, done.stderr
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def bouncer(nodes: TwoNodes) -> Iterator[PgBouncer]:
    """A PgBouncer that reads the file which ``shardids routes --watch`` writes."""
    with TemporaryDirectory(prefix="shardids-routes-") as folder:
        Path(folder).chmod(0o755)
        file = Path(folder, "routes.ini")
        words = ["routes", "--format", "pgbouncer", "--output", str(file), "--catalog", nodes.catalog_url]
        assert command_here(*words).returncode == 0
        login = url_of(nodes.servers["a"]).set(username="app", password=PASSWORD)
        # The password is in the URL, not in a file of the server's owner.
        login = login.set(query={})
        with running(login, {**documented_settings(), "default_pool_size": 2}, file) as bouncer:
            reload = f"{client_folder(0) / 'psql'} -Xq '{dsn(bouncer.url('pgbouncer'))}' -c RELOAD"
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *words, "--watch", "--run", reload], env=environment()
            )
            try:
                yield bouncer
            finally:
                process.terminate()
                process.wait(30)


@dataclass
class Writer:
    """A client of one shard, who repeats an insert that was refused because the shard has moved."""

    bouncer: PgBouncer
    shard: int
    number: int
    longest_s: float = 0.0
    acknowledged: int = 0
    refusals: Counter[str | None] = field(default_factory=Counter)

    def run(self, stop: threading.Event) -> None:
        url = dsn(self.bouncer.url(schema(self.shard)))
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as db:
            last = time.monotonic()
            for number in itertools.count():
                while True:
                    try:
                        db.execute(
                            "insert into notes (writer, number) values (%s, %s)", [self.number, number]
                        )
                        break
                    except psycopg.Error as error:
                        self.refusals[error.sqlstate] += 1
                        if error.sqlstate not in MOVED:
                            raise
                        time.sleep(0.01)
                self.acknowledged += 1
                now = time.monotonic()
                self.longest_s, last = max(self.longest_s, now - last), now
                if stop.wait(0.005):
                    return


@contextmanager
def writing(bouncer: PgBouncer, shard: int) -> Iterator[list[Writer]]:
    stop = threading.Event()
    writers = [Writer(bouncer, shard, number) for number in range(WRITERS)]
    failures: list[BaseException] = []

    def run(writer: Writer) -> None:
        try:
            writer.run(stop)
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(writer,), daemon=True) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: failures or all(writer.acknowledged > 5 for writer in writers), "all write")
        yield writers
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


def rows_of(nodes: TwoNodes, shard: int) -> Counter[tuple[int, int]]:
    with nodes.connected(nodes.catalog.node_of(shard).name) as db:
        return Counter(db.execute(f"select writer, number from {schema(shard)}.notes").fetchall())


def test_psql_reaches_every_shard_and_node_through_one_port(nodes: TwoNodes, bouncer: PgBouncer) -> None:
    psql = client_folder(0) / "psql"
    for shard in range(SHARDS):
        url = dsn(bouncer.url(schema(shard)))
        insert = "insert into notes (writer, number) values (99, 0) returning shardids.shard_of(id)"
        ran = subprocess.run([psql, "-XqAt", url, "-c", insert], capture_output=True, text=True, check=True)
        assert ran.stdout == f"{shard}\n"
    for node in nodes.servers:
        url = dsn(bouncer.url(node))
        query = ["-c", "select name from shardids.node"]
        ran = subprocess.run([psql, "-XqAt", url, *query], capture_output=True, text=True, check=True)
        assert ran.stdout == f"{node}\n"


def test_a_shard_moves_beneath_sixteen_writers(
    nodes: TwoNodes, bouncer: PgBouncer, record_property: Callable[[str, object], None]
) -> None:
    shard, pauses = 3, []
    with writing(bouncer, shard) as writers:
        for target in itertools.islice(itertools.cycle("ba"), MOVES):
            for writer in writers:
                writer.longest_s = 0.0
            before = [writer.acknowledged for writer in writers]
            mover.move(nodes.catalog, shard, target)
            mover.purge(nodes.catalog, [shard])
            wait_for(
                lambda was=before: all(w.acknowledged > was[w.number] + 20 for w in writers), "all write on"
            )
            pauses.append(max(writer.longest_s for writer in writers))
    rows = rows_of(nodes, shard)
    own = {(w.number, number) for w in writers for number in range(w.acknowledged)}
    record_property("longest pause per move, in s", pauses)
    assert {row for row in rows if row[0] < WRITERS} == own
    assert set(rows.values()) == {1}


NODE_POSTGRES = """
const { Client } = require("pg");
const moved = new Set(["SI001", "SI002", "SI003", "3F000", "42P01", "42883"]);

async function main() {
  const client = new Client(process.env.SHARD_URL);
  await client.connect();
  for (let number = 0; number < 400; number++) {
    for (;;) {
      try {
        await client.query("INSERT INTO notes (writer, number) VALUES (77, $1)", [number]);
        break;
      } catch (error) {
        if (!moved.has(error.code)) throw error;
        await new Promise((again) => setTimeout(again, 10));
      }
    }
    if (number === 20) console.log("writes");
    await new Promise((next) => setTimeout(next, 5));
  }
  await client.end();
}

main();
"""


def test_node_postgres_writes_on_while_its_shard_moves(
    nodes: TwoNodes, bouncer: PgBouncer, tmp_path: Path
) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node.js with npm on this machine")
    quietly = ["--no-audit", "--no-fund", "--prefer-offline", "--ignore-scripts"]
    subprocess.run(
        [npm, "install", *quietly, "pg@8.23.1"], cwd=tmp_path, check=True, capture_output=True, timeout=300
    )
    (tmp_path / "writer.js").write_text(NODE_POSTGRES)
    shard = 5
    url = dsn(bouncer.url(schema(shard)))
    with subprocess.Popen(
        [node, "writer.js"], cwd=tmp_path, env={**os.environ, "SHARD_URL": url}, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writes\n"
        mover.move(nodes.catalog, shard, "b")
        assert writer.wait(60) == 0
    rows = rows_of(nodes, shard)
    assert {number: rows[77, number] for number in range(400)} == dict.fromkeys(range(400), 1)
