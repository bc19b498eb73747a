"""Clients that race for the same values and are killed, and a node that crashes: no value is there twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from shardids import Cluster, lookups
from shardids.catalog.urls import parse_url
from shardids.dev.embedded import EmbeddedServer, temporary_servers
from tests.conftest import dsn
from tests.support.clusters import Nursery, catalog_at
from tests.support.faults import scaled
from tests.support.signups import EMAIL, claims, open_signups, rows

KILLS = scaled(4, 60)
CRASHES = scaled(2, 40)
AT_ONCE = 4
SHARDS = 8
_LONGEST_S = scaled(1.5, 6.0)
INSERTS = int(os.environ.get("SHARDIDS_RACING_INSERTS", scaled(400, 500_000)))
"""How many inserts each test tries at least, of half as many values."""

IMPORTS = """
import random
from shardids import Cluster
from shardids.errors import ShardidsError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import configure_mappers
from tests.support.signups import User
configure_mappers()
"""
CLIENT = """
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
sys.stdout.write(f"ready {{os.getpid()}}" + chr(10))
sys.stdout.flush()
with Cluster.connect({url!r}, listen=False) as cluster:
    while True:
        name, value = f"u{{random.randrange(1000)}}", random.randrange({values})
        try:
            if {sql} and random.random() < 0.5:
                shard = cluster.shard_for(name)
                insert = f"insert into {{cluster.schema_of(shard)}}.users (name, email) values (%s, %s)"
                with cluster.connection(shard) as connection:
                    connection.exec_driver_sql(insert, (name, f"{{value}}@example.com"))
                    if random.random() < 0.1:
                        continue
                    connection.commit()
                os.write(log, (f"+{{value}} {{shard}}" + chr(10)).encode())
                continue
            with cluster.session(key=name) as session:
                one = User(name=name, email=f"{{value}}@example.com")
                session.add(one)
                session.flush()
                if random.random() < 0.1:
                    continue
                session.commit()
                said = f"+{{value}} {{cluster.shard_for(name)}}"
                if random.random() < 0.2:
                    session.delete(one)
                    session.commit()
                    said = f"-{{value}}"
        except (ShardidsError, DBAPIError):
            said = "?"
        os.write(log, (said + chr(10)).encode())
"""


@pytest.mark.parametrize("strict", [False, True])
def test_racing_inserts_of_clashing_values_leave_each_once(
    tmp_path: Path, report: Callable[[str], None], *, strict: bool
) -> None:
    """Strict: half of them are plain SQL, which triggers claim."""
    log = tmp_path / "said"
    log.touch()
    with temporary_servers(2, settings={"fsync": "on", "synchronous_commit": "on"}) as servers:
        urls = [parse_url(server.url()) for server in servers]
        open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
        if strict:
            with catalog_at(urls[0]) as catalog:
                lookups.create(catalog, EMAIL, strict=True, store_password=True)
        script = CLIENT.format(log=str(log), url=dsn(urls[0]), values=INSERTS // 2, sql=strict)
        with _Crashing(servers[1]) as crashing:
            kills = kill_clients(script, log)
        with Cluster.connect(urls[0], listen=False) as cluster, catalog_at(urls[0]) as catalog:
            there = rows(cluster)  # which refuses a value of two shards
            claimed = claims(cluster)
            assert {email: claimed.get(email) for email in there} == there
            swept = lookups.sweep(catalog, EMAIL)
            assert claims(cluster) == there
        said = log.read_text().split("\n")
        added = {line[1:].split()[0] for line in said if line.startswith("+")}
        removed = {line[1:] for line in said if line.startswith("-")}
        assert {f"{value}@example.com" for value in added - removed} <= there.keys()
    report(
        f"{len(said):,} racing inserts{' by sessions and SQL' * strict}, {kills} clients killed,"
        f" {crashing.crashes} crashes of a node:"
        f" {len(there):,} values, each once; {swept.given_up:,} claims without a row swept,"
        " 0 rows without a claim"
    )


def kill_clients(script: str, log: Path) -> int:
    """Runs a few clients at a time, and kills each at a random moment, until enough was tried.

    Returns how many were killed.
    """
    chance = random.Random(8)
    nursery = Nursery(IMPORTS)
    ready: set[str] = set()
    kills = 0
    try:
        running = [nursery.start(script) for _ in range(AT_ONCE)]
        while kills < KILLS or log.read_bytes().count(b"\n") < INSERTS:
            pid = running.pop(0)
            while f"ready {pid}" not in ready:
                ready.add(nursery.line())
            time.sleep(chance.uniform(0, _LONGEST_S))  # The moment is what is tried.
            os.kill(pid, signal.SIGKILL)
            kills += 1
            running.append(nursery.start(script))
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    finally:
        nursery.close()
    return kills


class _Crashing:
    """Kills a server now and then, and starts it again."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._stop = Event()
        self._errors: list[BaseException] = []
        self._thread = Thread(target=self._run)
        self.crashes = 0

    def _run(self) -> None:
        try:
            while self.crashes < CRASHES and not self._stop.wait(3):
                self._server.kill()
                self._server.start(attached=True)
                self.crashes += 1
        except BaseException as error:
            self._errors.append(error)
            raise

    def __enter__(self) -> _Crashing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self._errors == []
