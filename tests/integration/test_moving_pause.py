"""The pause of a move: writers wait at the source until the target takes their writes, and then go there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from shardids import AsyncCluster, Cluster, mover
from shardids.errors import ShardidsError
from shardids.mover import Options, StepBegun, StepDone, cutover
from shardids.pg.embedded import temporary_servers
from tests.support.moves import TwoNodes, Writers, assert_nothing_lost, assert_one_owner, schema, two_nodes
from tests.support.waiting import wait_for

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null);
    create table {s}.notes (id bigint primary key, body text)"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 64)
        yield nodes
        nodes.catalog.close()


def insert(nodes: TwoNodes, node: str, shard: int) -> str | None:
    """Inserts a row; returns why it was refused, and whether the target took writes then."""
    with nodes.connected(node) as connection:
        try:
            connection.execute(f"insert into {schema(shard)}.users (name) values ('waits')")
        except psycopg.Error as error:
            return error.sqlstate
    return None


def await_waiting(nodes: TwoNodes, shard: int) -> None:
    """Returns when a writer waits at the barrier on node a."""
    waiting = "select exists (select from pg_locks where not granted and classid = 1936220521 and objid = %s)"
    with nodes.connected("a") as connection:
        wait_for(lambda: connection.execute(waiting, [shard]).fetchone() == (True,), "a writer waits")


def test_writers_wait_until_the_target_takes_their_writes(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    refused: list[tuple[str | None, str | None]] = []

    def write() -> None:
        refused.append((insert(nodes, "a", shard), insert(nodes, "b", shard)))

    writing = threading.Thread(target=write)

    def begin(happened: mover.Event) -> None:
        if isinstance(happened, StepBegun) and happened.step == "place":
            # The source is fenced, and the target is not active.
            writing.start()
            await_waiting(nodes, shard)

    done = mover.move(nodes.catalog, shard, "b", on_event=begin)
    writing.join()
    assert refused == [("SI003", None)]
    assert done.pause_ms is not None
    assert_one_owner(nodes, shard)


def test_writers_of_a_cutover_that_is_reversed_only_wait(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = nodes.new_shard(TABLES)
    with ThreadPoolExecutor(1) as pool:
        writing: list[Future[str | None]] = []

        def fail(*_: object) -> None:
            writing.append(pool.submit(insert, nodes, "a", shard))
            await_waiting(nodes, shard)
            raise ShardidsError("the catalog does not take it")

        monkeypatch.setattr("shardids.mover.journal.Journal.switch_placement", fail)
        with pytest.raises(ShardidsError, match="does not take it"):
            mover.move(nodes.catalog, shard, "b")
        assert writing[0].result() is None
    monkeypatch.undo()
    assert mover.resume(nodes.catalog, shard).outcome == "moved"
    assert_one_owner(nodes, shard)


def test_a_mover_that_hangs_after_the_fence_keeps_nobody_waiting(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    waited_s: list[float] = []

    def hang(happened: mover.Event) -> None:
        if isinstance(happened, StepDone) and happened.step == "cutover":
            began = time.monotonic()
            assert insert(nodes, "a", shard) == "SI003"
            waited_s.append(time.monotonic() - began)

    options = Options(max_pause_s=0.5)
    assert mover.move(nodes.catalog, shard, "b", options=options, on_event=hang).outcome == "moved"
    assert 0.1 < waited_s[0] < 5
    assert_one_owner(nodes, shard)


def test_without_the_barriers_session_there_is_no_fence(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers pass when it ends: what they write then is on no target."""
    shard = nodes.new_shard()
    ended: list[tuple[bool]] = []
    read_handover = cutover.read_handover

    def end(source: object, sides: object, since: float) -> cutover.Handover:
        handover = read_handover(source, sides, since)  # type: ignore[arg-type]  # passed on as they are
        if not ended:
            with nodes.connected("a") as connection:
                ended.extend(
                    connection.execute(
                        "select pg_terminate_backend(pid, 5000) from pg_locks"
                        " where granted and mode = 'ExclusiveLock' and classid = 1936220521 and objid = %s",
                        [shard],
                    ).fetchall()
                )
        return handover

    with Writers(nodes, shard) as writers:
        monkeypatch.setattr(cutover, "read_handover", end)
        with pytest.raises(ShardidsError):
            mover.move(nodes.catalog, shard, "b")
        assert ended == [(True,)]
        before = writers.rows
        wait_for(lambda: writers.rows > before + 5, "the source takes writes")
        assert mover.resume(nodes.catalog, shard).outcome == "moved"
    assert_nothing_lost(nodes, shard, writers)
    assert_one_owner(nodes, shard)


# Connections to the target.


def of_clients(nodes: TwoNodes, node: str) -> int:
    """How many connections to a node clients have open."""
    with nodes.connected(node) as connection:
        found = connection.execute(
            "select count(*) from pg_stat_activity where application_name = 'warm'"
        ).fetchone()
    return found[0] if found else 0


OPTIONS: dict[str, Any] = {"connect_args": {"application_name": "warm"}, "pool_size": 4}


def announce(nodes: TwoNodes, notice: str) -> None:
    with psycopg.connect(nodes.catalog_url, autocommit=True) as connection:
        connection.execute("select pg_notify('shardids_arrival', %s)", [notice])


def test_a_move_opens_connections_before_its_cutover(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    seen: list[int] = []
    with Cluster.connect(nodes.catalog_url, **OPTIONS) as cluster:
        there = [cluster.at(shard=shard).connection() for _ in range(3)]
        for connection in there:
            connection.exec_driver_sql("select 1")
            connection.rollback()
        assert of_clients(nodes, "b") == 0

        def look(happened: mover.Event) -> None:
            # Well before the cutover: the indexes are made meanwhile.
            if isinstance(happened, StepBegun) and happened.step == "barrier":
                wait_for(lambda: of_clients(nodes, "b") == 3, "as many connections as to the source")
                seen.append(3)

        mover.move(nodes.catalog, shard, "b", on_event=look)
        for connection in there:
            connection.close()
    assert seen == [3]
    wait_for(lambda: of_clients(nodes, "b") == 0, "they are closed")


def test_connections_that_are_opened_before_hold_no_lock(nodes: TwoNodes) -> None:
    """The target's activation would wait for those of the shard's sequences."""
    shard = nodes.new_shard(TABLES)
    locked: list[tuple[int]] = []

    def look(*_: object) -> None:
        with nodes.connected("b") as connection:
            locked.extend(
                connection.execute(
                    "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
                    " where a.application_name = 'warm' and l.locktype = 'relation'"
                    " and l.mode <> 'AccessShareLock'"
                )
            )

    with Cluster.connect(nodes.catalog_url, **OPTIONS) as cluster:
        there = [cluster.at(shard=shard).connection() for _ in range(3)]
        event.listen(cluster.engine(nodes.catalog.placement().nodes["b"]), "connect", look)
        mover.move(nodes.catalog, shard, "b")
        for connection in there:
            connection.close()
    assert locked[:3] == [(0,)] * 3


def test_no_more_connections_are_opened_than_the_pool_keeps(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    with Cluster.connect(nodes.catalog_url, **OPTIONS) as cluster:
        there = [cluster.at(shard=shard).connection() for _ in range(7)]
        announce(nodes, f"{shard} b")
        wait_for(lambda: of_clients(nodes, "b") == 4, "a full pool")
        announce(nodes, f"{shard} b")
        for connection in there:
            connection.close()
        time.sleep(0.2)
        assert of_clients(nodes, "b") == 4


@pytest.mark.parametrize(
    "notice", ["", "x", "x b", "9999999999999999999999 b", "63 nowhere", "1", "² b", "1 b c"]
)
def test_other_notices_are_passed_over(nodes: TwoNodes, notice: str) -> None:
    shard = nodes.new_shard(TABLES)
    with Cluster.connect(nodes.catalog_url, **OPTIONS) as cluster, cluster.at(shard=shard).connection():

        def announced() -> bool:
            # The cluster may not listen yet.
            announce(nodes, notice)
            announce(nodes, f"{shard} b")
            return of_clients(nodes, "b") == 1

        wait_for(announced, "the next notice is heeded")


def test_event_loops_open_connections_too(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)

    async def main() -> None:
        async with (
            await AsyncCluster.connect(nodes.catalog_url, **OPTIONS) as cluster,
            cluster.at(shard=shard).connection(),
            cluster.at(shard=shard).connection(),
        ):
            announce(nodes, f"{shard} b")
            while of_clients(nodes, "b") != 2:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))
