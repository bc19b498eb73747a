"""Clients that race for the same values and are killed, and a node that crashes: no value is there twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread

from shardids import Cluster
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables import lookups
from tests.conftest import dsn
from tests.support.clusters import Nursery, catalog_at
from tests.support.faults import connect, scalar, scaled
from tests.support.racing import Race
from tests.support.signups import EMAIL, claims, open_signups, rows
from tests.support.waiting import wait_for

KILLS = scaled(4, 60)
CRASHES = scaled(2, 40)
AT_ONCE = scaled(4, 6)
SHARDS = scaled(8, 16)
_LONGEST_S = scaled(1.5, 10.0)
_BETWEEN_CRASHES_S = scaled(1.5, 30.0)
INSERTS = int(os.environ.get("SHARDIDS_RACING_INSERTS", scaled(3_000, 1_000_000)))
"""How many inserts of a row each test tries at least."""
OTHERS = (
    "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
)


def test_racing_inserts_of_clashing_values_leave_each_once(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    tmp_path.chmod(0o755)
    race = Race(tmp_path)
    with temporary_servers(2, settings={"fsync": "on", "synchronous_commit": "on"}) as servers:
        urls = [parse_url(server.url()) for server in servers]
        open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
        with _Crashing(servers) as crashing:
            kills = kill_clients(
                f"racing.race({dsn(urls[0])!r}, Path({str(tmp_path)!r}))",
                until=lambda: race.tried >= INSERTS and crashing.crashes >= CRASHES,
            )
        for server in servers:
            # What the last clients had sent is done.
            with connect(server.url()) as admin:
                wait_for(lambda: scalar(admin, OTHERS) == 0, "all sessions have ended")
        with Cluster.connect(urls[0], listen=False) as cluster, catalog_at(urls[0]) as catalog:
            there = rows(cluster)  # which refuses a value of two shards
            acknowledged = race.acknowledged()
            assert set(acknowledged.values()) == {1}
            assert acknowledged.keys() <= there.items()
            claimed = claims(cluster)
            assert there.items() <= claimed.items()
            swept = lookups.sweep(catalog, EMAIL)
            assert (swept.given_up, swept.busy) == (len(claimed) - len(there), 0)
            assert claims(cluster) == there
    report(
        f"{race.tried:,} racing inserts, {kills} clients killed,"
        f" {crashing.crashes} crashes of nodes:"
        f" {len(there):,} values, each once, {len(acknowledged):,} of them acknowledged and all there;"
        f" {swept.given_up:,} claims without a row swept, 0 rows without a claim"
    )


def kill_clients(script: str, *, until: Callable[[], bool]) -> int:
    """Runs a few clients at a time, and kills each at a random moment, until enough was tried.

    Returns how many were killed.
    """
    chance = random.Random(8)
    nursery = Nursery("from pathlib import Path; from tests.support import racing")
    kills = 0
    try:
        running = [nursery.start(script) for _ in range(AT_ONCE)]
        while kills < KILLS or not until():
            time.sleep(chance.uniform(0, _LONGEST_S))  # The moment is what is tried.
            os.kill(running.pop(0), signal.SIGKILL)
            kills += 1
            running.append(nursery.start(script))
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    finally:
        nursery.close()
    return kills


class _Crashing:
    """Kills one server after the other, and starts it again."""

    def __init__(self, servers: Sequence[EmbeddedServer]) -> None:
        self._servers = servers
        self._stop = Event()
        self._errors: list[BaseException] = []
        self._thread = Thread(target=self._run)
        self.crashes = 0

    def _run(self) -> None:
        try:
            while not self._stop.wait(_BETWEEN_CRASHES_S):
                server = self._servers[self.crashes % len(self._servers)]
                server.kill()
                server.start(attached=True)
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
