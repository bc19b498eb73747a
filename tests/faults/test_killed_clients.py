"""Clients that are killed while they commit on two nodes: nothing is half there, and everything ends."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables.transactions import resolve
from shardids.testing import devcluster
from tests.conftest import dsn
from tests.support.clusters import Nursery, catalog_at
from tests.support.faults import scaled
from tests.support.transfers import open_bank, prepared_on, require_whole
from tests.support.waiting import wait_for

KILLS = scaled(40, 1000)
AT_ONCE = 4

IMPORTS = """
import random
from itertools import count
from shardids import Cluster
from shardids.errors import ShardidsError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import configure_mappers
from tests.support.transfers import transfer
configure_mappers()
"""
CLIENT = """
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)
names = {names!r}
with Cluster.connect({url!r}, listen=False) as cluster:
    for number in count():
        token = f"{{os.getpid()}}/{{number}}"
        source, target = (random.choice(names[node]) for node in random.sample(["a", "b"], 2))
        session = cluster.sharded_session(twophase=True)
        try:
            transfer(session, source, target, token)
            session.commit()
        except (ShardidsError, DBAPIError):
            session.rollback()
        else:
            os.write(log, (token + chr(10)).encode())
        session.close()
        if number == 0:
            sys.stdout.write(f"ready {{os.getpid()}}" + chr(10))
            sys.stdout.flush()
"""


@pytest.fixture
def urls() -> Iterator[dict[str, URL]]:
    with temporary_servers(2) as servers:
        devcluster.create_cluster(servers, 16)
        yield {name: parse_url(server.url()) for name, server in zip("ab", servers, strict=True)}


# What is left prepared locks its rows: without a timer, the other clients would soon all wait for it.
@pytest.mark.parametrize("older_than_s", [0.3, 0.0], ids=["only the dead", "at any time"])
def test_killed_clients_leave_no_half_transaction(
    urls: dict[str, URL], tmp_path: Path, report: Callable[[str], None], older_than_s: float
) -> None:
    log = tmp_path / "acknowledged"
    log.touch()
    with Cluster.connect(urls["a"]) as cluster, ExitStack() as stack:
        names = open_bank(cluster)
        timer = stack.enter_context(Resolver(urls["a"], older_than_s))
        kill_clients(CLIENT.format(log=str(log), names=names, url=dsn(urls["a"])), KILLS)
        stack.close()  # The timer stops; what the last clients left is still there.
        left, begun = len(prepared_on(urls.values())), time.monotonic()

        def is_over() -> bool:
            with catalog_at(urls["a"]) as catalog:
                resolve(catalog)
            return prepared_on(urls.values()) == []

        wait_for(is_over, "all is ended")
        took_s = time.monotonic() - begun
        count = require_whole(cluster)
        acknowledged = log.read_text().splitlines()
        assert acknowledged
        assert set(acknowledged) <= tokens(cluster)
    report(
        f"{KILLS:>6,} clients killed, {count:,} transfers over two nodes whole;"
        f" ended by the timer: {dict(timer.results)}; {left} in doubt after it, ended in {took_s:.1f} s"
    )


def kill_clients(script: str, kills: int) -> None:
    """Runs a few clients at a time, and kills each at a random moment."""
    chance = random.Random(8)
    nursery = Nursery(IMPORTS)
    ready: set[str] = set()
    try:
        running = [nursery.start(script) for _ in range(AT_ONCE)]
        for _ in range(kills):
            pid = running.pop(0)
            while f"ready {pid}" not in ready:
                ready.add(nursery.line())
            time.sleep(chance.uniform(0, 0.1))  # The moment is what is tried.
            os.kill(pid, signal.SIGKILL)
            running.append(nursery.start(script))
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    finally:
        nursery.close()


def tokens(cluster: Cluster) -> set[str]:
    """The transfers that were committed."""
    found: set[str] = set()
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).connection() as connection:
            schema = cluster.schema_of(shard)
            found |= set(connection.exec_driver_sql(f"select transfer from {schema}.entries").scalars())
    return found


class Resolver:
    """The timer; with 0 seconds it ends what clients prepare that are only slow, too."""

    def __init__(self, url: URL, older_than_s: float) -> None:
        self._url = url
        self._older_than_s = older_than_s
        self._stop = Event()
        self.results: Counter[str] = Counter()
        self._errors: list[BaseException] = []
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            with catalog_at(self._url) as catalog:
                while not self._stop.wait(0.05):
                    done = resolve(catalog, older_than_s=self._older_than_s)
                    self.results.update(outcome.result for outcome in done.outcomes)
        except BaseException as error:
            self._errors.append(error)
            raise

    def __enter__(self) -> Resolver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self._errors == []
