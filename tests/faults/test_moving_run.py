"""An application that uses ``run`` alone sees nothing of the moves of its shards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from shardids import AsyncCluster, Cluster, mover
from shardids.errors import StatementFailed
from shardids.mover.journal import Journal
from shardids.pg.embedded import temporary_servers
from tests.support.application import TABLES, Application, Author, assert_each_write_once
from tests.support.moves import TwoNodes, two_nodes
from tests.support.waiting import wait_for

WRITERS = 16


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 16)
        yield nodes
        nodes.catalog.close()


def back_and_forth(nodes: TwoNodes, shards: list[int], times: int) -> None:
    for _ in range(times):
        for shard in shards:
            to = "b" if nodes.catalog.node_of(shard).name == "a" else "a"
            mover.move(nodes.catalog, shard, to, back=True)
            time.sleep(0.1)


def await_writes(application: Application) -> None:
    """Returns when there are some more."""
    before = application.writes

    def there_are() -> bool:
        application.raise_failures()
        return application.writes >= before + WRITERS

    wait_for(there_are, "the writers write")


@pytest.mark.parametrize(
    ("listen", "options"),
    [(True, {}), (False, {}), (True, {"isolation_level": "REPEATABLE READ"})],
    ids=["listening", "not listening", "old snapshots"],
)
def test_no_error_reaches_16_writers(nodes: TwoNodes, listen: bool, options: dict[str, str]) -> None:
    shards = [nodes.new_shard(TABLES) for _ in range(2)]
    with (
        Cluster.connect(nodes.catalog_url, listen=listen, pool_size=WRITERS, **options) as cluster,
        Application(cluster, shards, writers=WRITERS) as application,
    ):
        await_writes(application)
        back_and_forth(nodes, shards, 2)
        await_writes(application)
        application.stop()
        assert application.repeated > 0
        assert_each_write_once(nodes, shards, application.authors, cluster)


def test_no_error_reaches_16_tasks(nodes: TwoNodes) -> None:
    shards = [nodes.new_shard(TABLES)]
    authors = [Author(number, shards) for number in range(WRITERS)]

    async def write(cluster: AsyncCluster, author: Author, moving: asyncio.Task[None]) -> None:
        while not moving.done():
            thought = author.next_write()
            made = await cluster.at(shard=thought.shard).run(partial(AsyncSession.run_sync, fn=thought))
            author.keep(thought, *made)

    async def main() -> None:
        async with await AsyncCluster.connect(nodes.catalog_url, pool_size=WRITERS) as cluster:
            moving = asyncio.create_task(asyncio.to_thread(back_and_forth, nodes, shards, 2))
            await asyncio.gather(moving, *(write(cluster, author, moving) for author in authors))

    asyncio.run(main())
    with Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        assert assert_each_write_once(nodes, shards, authors, cluster) > WRITERS


def test_no_error_comes_of_a_cutover_that_is_reversed(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placement can't be switched; the source, which had stopped, takes writes again."""
    (shard,) = shards = [nodes.new_shard(TABLES)]

    def fail(_journal: Journal, _high_water_tick: int) -> None:
        time.sleep(0.3)
        raise StatementFailed("the catalog does not take it")

    monkeypatch.setattr(Journal, "switch_placement", fail)
    with (
        Cluster.connect(nodes.catalog_url, pool_size=WRITERS) as cluster,
        Application(cluster, shards, writers=WRITERS) as application,
    ):
        await_writes(application)
        with pytest.raises(StatementFailed):
            mover.move(nodes.catalog, shard, "b")
        monkeypatch.undo()
        await_writes(application)
        assert mover.resume(nodes.catalog, shard).outcome == "moved"
        application.stop()
        assert application.repeated > 0
        assert_each_write_once(nodes, shards, application.authors, cluster)
