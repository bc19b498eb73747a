"""Moves and migrations of the same shards at once, whose processes are killed, stopped and woken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardids import mover
from shardids.catalog.leases import read_leases
from shardids.catalog.nodes import Nodes
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
from tests.faults.conftest import Report
from tests.support.clusters import Nursery, environment
from tests.support.faults import scaled
from tests.support.killed_moves import finish, killed_move
from tests.support.migrations import App
from tests.support.moves import (
    APPLICATION,
    TwoNodes,
    Writers,
    assert_nothing_lost,
    assert_one_owner,
    schema,
    two_nodes,
)
from tests.support.waiting import wait_for

SHARDS = 12
SECONDS = float(os.environ.get("SHARDIDS_LEASES_S", scaled("45", "1200")))
SEED = int(os.environ.get("SHARDIDS_SOAK_SEED") or scaled(7, random.SystemRandom().randrange(1_000_000)))
PATIENT_S = 120.0
"""The longest that a command may take on a busy machine."""
QUICK = """
import sys
from shardids.catalog import alive
from shardids.replication import barrier
barrier._BEAT_S = alive._BEAT_S = 0.5
barrier._LOST_AFTER = alive._LOST_AFTER = "4s"
from shardids.cli import app
app(sys.argv[1:], prog_name="shardids")
"""
"""``shardids`` for which a process that the catalog has not heard from for 4 s counts as gone."""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard, node in nodes.catalog.placement().node_of.items():
            with nodes.connected(node) as connection:
                connection.execute(APPLICATION.replace("{s}", schema(shard)))
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def app(nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> App:
    return App(tmp_path / "migrations", parse_url(nodes.catalog_url), capsys)


def started(app: App, nodes: TwoNodes, *words: str) -> subprocess.Popen[str]:
    """``shardids …``, as a process that counts as gone soon after it was stopped."""
    more = {"SHARDIDS_CATALOG": nodes.catalog_url, "SHARDIDS_MIGRATIONS": str(app.folder), "COLUMNS": "500"}
    return subprocess.Popen(
        [sys.executable, "-c", QUICK, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
    )


def leased(nodes: TwoNodes) -> list[tuple[int, str, str, str]]:
    with Nodes(nodes.catalog.nodes(), nodes.catalog.url) as engines:
        return [
            (one.shard, one.node, one.purpose, one.standing.value)
            for one in read_leases(nodes.catalog, engines)
        ]


def test_a_migration_that_wakes_up_changes_nothing_more(nodes: TwoNodes, app: App) -> None:
    app.add(
        "one", 'op.execute("create table added (id bigint primary key)")', 'op.execute("drop table added")'
    )
    app.add("two", 'op.execute("select pg_sleep(0.5)")', after="one")
    slept = started(app, nodes, "migrate", "up")
    wait_for(lambda: any(app.revisions().values()), "a shard is migrated")
    os.kill(slept.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: leased(nodes) and {one[3] for one in leased(nodes)} == {"gone"}, "it counts as gone")
        for words in (("migrate", "up"), ("migrate", "down", "base", "--allow-drop")):
            other = started(app, nodes, *words)
            assert other.wait(PATIENT_S) == 0, other.communicate()
            other.communicate()
        # All shards are now where the sleeper expects those that it has not begun.
        assert set(app.revisions().values()) == {()}
    finally:
        os.kill(slept.pid, signal.SIGCONT)
    said, _ = slept.communicate(timeout=PATIENT_S)
    assert slept.returncode == 1, said
    assert "no longer holds the shard's lease" in said
    assert set(app.revisions().values()) == {()}
    assert leased(nodes) == []


def test_a_slow_migration_is_waited_for(nodes: TwoNodes, app: App) -> None:
    """It is at work in a statement, and its process shows that it lives."""
    app.add("one", 'op.execute("select pg_advisory_xact_lock(77)")')
    with nodes.connected("a") as holder:
        holder.execute("select pg_advisory_lock(77)")
        slow = started(app, nodes, "migrate", "up", "--shards", "0")
        wait_for(lambda: leased(nodes), "it has its lease")
        moved = started(app, nodes, "shard", "move", "0", "--to", "b")
        assert moved.stdout is not None
        assert moved.stdout.readline().startswith("shard 0: put off (1): migration by ")
        # Longer than a process that shows nothing counts as alive.
        time.sleep(6)
        assert moved.poll() is None
    said, _ = moved.communicate(timeout=PATIENT_S)
    assert moved.returncode == 0, said
    slow.communicate(timeout=PATIENT_S)
    assert slow.returncode == 0
    assert app.revisions()[0] == ("one",)


def test_a_lease_survives_two_restarts_of_its_nodes(nodes: TwoNodes, nursery: Nursery, app: App) -> None:
    app.add("one", 'op.execute("create table added (id bigint primary key)")')
    assert killed_move(nodes, nursery, 0, "barrier", kind="StepDone")
    for _ in range(2):
        for server in nodes.servers.values():
            server.stop()
            server.start(attached=True)
        nodes.catalog.engine.dispose()
    assert leased(nodes) == [(0, "a", "move", "interrupted"), (0, "b", "move", "interrupted")]
    refused = started(app, nodes, "migrate", "up", "--shards", "0", "--json")
    said, _ = refused.communicate(timeout=PATIENT_S)
    assert (refused.returncode, "kept by an interrupted move" in said) == (1, True), said
    assert finish(nodes, 0, mover.resume).outcome == "moved"
    migrated = started(app, nodes, "migrate", "up", "--shards", "0")
    said, _ = migrated.communicate(timeout=PATIENT_S)
    assert migrated.returncode == 0, said
    assert_one_owner(nodes, 0)
    assert leased(nodes) == []


class Soak:
    """Threads that move shards and migrate all of them, each with processes that are killed or stopped."""

    def __init__(self, nodes: TwoNodes, app: App, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._nodes, self._app = nodes, app
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._revision: str | None = None

    def go(self, seconds: float) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._move, self._migrate)
        ]
        for thread in threads:
            thread.start()
        self._over.wait(seconds)
        self._over.set()
        for thread in threads:
            thread.join(4 * PATIENT_S)
            assert not thread.is_alive(), "a command is stuck"
        assert self.failures == []

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            while not self._over.is_set():
                work()
        except BaseException as failure:  # noqa: BLE001 -- asserted by go
            self.failures.append(f"{type(failure).__name__}: {failure}")
            self._over.set()

    def _run(self, *words: str, harm: bool = True) -> tuple[int | None, str]:
        """Runs a command, kills or stops it now and then; its exit code, ``None`` if it was killed."""
        process = started(self._app, self._nodes, *words)
        chance = self._random.random() if harm else 1.0
        is_killed = is_stopped = False
        try:
            if chance < 0.4 or chance < 0.5:
                process.wait(self._random.uniform(0.8, 4.0))
        except subprocess.TimeoutExpired:
            is_killed, is_stopped = chance < 0.4, chance >= 0.4
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
            self.counts["kills"] += 1
        elif is_stopped:
            os.kill(process.pid, signal.SIGSTOP)
            self.counts["sleeps"] += 1
            time.sleep(self._random.choice((1.0, 7.0)))
            os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=PATIENT_S)
        if is_stopped and process.returncode != 0:
            # It slept for so long that it counts as gone: as if it was killed.
            return None, said
        return (None if is_killed else process.returncode), said

    def _move(self) -> None:
        shard = self._random.randrange(SHARDS)
        source = self._nodes.catalog.node_of(shard).name
        target = "b" if source == "a" else "a"
        with self._nodes.connected(target) as connection:
            there = connection.execute("select from shardids.shard where id = %s", [shard]).fetchone()
        how = ["--back"] if there is not None else ["--to", target]
        code, said = self._run("shard", "move", str(shard), *how)
        while code is None and mover.open_moves(self._nodes.catalog, [shard]):
            self.counts["resumed"] += 1
            code, said = self._run("shard", "move", str(shard), "--resume", harm=self._random.random() < 0.5)
            if code == 1 and (
                "by another process" in said or f"no move of shard {shard} is under way" in said
            ):
                time.sleep(0.5)
                code = None
        if code is not None:
            assert code == 0, f"shard move {shard}: {said}"
            assert self._nodes.catalog.node_of(shard).name == target
            self.counts["moves"] += 1
        if self._random.random() < 0.2:
            purged, said = self._run("shard", "purge", str(shard), "--yes", harm=False)
            assert purged == 0, f"shard purge {shard}: {said}"
            self.counts["purges"] += 1

    def _migrate(self) -> None:
        number = self.counts["revisions"]
        name = f"m{number:04}"
        if number % 3 == 2:
            up = f"""
                op.execute("alter table users add {name} integer")
                with op.get_context().autocommit_block():
                    op.create_index("{name}", "users", ["{name}"], postgresql_concurrently=True)
                """
            down = f'op.execute("alter table users drop {name}")'
        else:
            up = f"""op.execute("alter table users add {name} integer default {number}")"""
            down = f'op.execute("alter table users drop {name}")'
        self._app.add(name, up, down, after=self._revision)
        before, self._revision = self._revision, name
        self._to("up")
        if number % 4 == 3:
            self._to("down", before or "base", "--allow-drop")
            self._to("up")
        self.counts["revisions"] += 1

    def _to(self, direction: str, *words: str) -> None:
        deadline = time.monotonic() + 2 * PATIENT_S
        while True:
            code, said = self._run("migrate", direction, *words, "--retries", "20")
            if code == 0:
                return
            waits = "kept by an interrupted move" in said or "another run is changing" in said
            assert code is None or waits, f"migrate {direction}: {said}"
            assert time.monotonic() < deadline, f"migrate {direction}: {said}"
            self.counts["runs repeated"] += 1


def test_every_move_and_every_revision_ends_as_said(nodes: TwoNodes, app: App, report: Report) -> None:
    soak = Soak(nodes, app, SEED)
    written = [0, 5, 9]
    with ExitStack() as kept:
        writers = {shard: kept.enter_context(Writers(nodes, shard, 1, every_s=0.02)) for shard in written}
        soak.go(SECONDS)
    # All was finished by the commands themselves, and none with --abort.
    assert mover.open_moves(nodes.catalog) == []
    assert [one for one in leased(nodes) if one[3] != "gone"] == []
    assert soak.counts["revisions"] > 0
    assert soak.counts["moves"] > 0
    assert set(app.revisions().values()) == {(f"m{soak.counts['revisions'] - 1:04}",)}
    for shard in range(SHARDS):
        assert_one_owner(nodes, shard)
    for shard, its in writers.items():
        assert_nothing_lost(nodes, shard, its)
    counts = ", ".join(f"{count} {what}" for what, count in sorted(soak.counts.items()))
    report(f"leases: {counts}, on {SHARDS} shards in {SECONDS:.0f} s, seed {SEED}; none needed --abort")
