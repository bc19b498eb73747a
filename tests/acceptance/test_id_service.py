"""The ID service of the examples: processes of their own, under load, and while a shard moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import httpx
import pytest
from sqlalchemy import MetaData
from sqlalchemy.engine import URL

from shardids import Cluster
from tests.support import moves_by_hand
from tests.support.clusters import connected
from tests.support.services import serving
from tests.support.waiting import wait_for

CLIENTS = 16
REQUESTS = 60
FRESH_S = 1.0


@pytest.fixture
def address(cluster_url: URL) -> Iterator[str]:
    with serving("id_service:app", cluster_url) as address:
        yield address


def draw(client: httpx.Client, shard: int, count: int) -> list[int]:
    answer = client.post(f"/shards/{shard}/ids", params={"count": count})
    assert answer.status_code == 200, answer.text
    ids = answer.json()
    assert {type(one) for one in ids} == {str}
    return [int(one) for one in ids]


def test_under_load_each_id_is_handed_out_once(cluster_url: URL, cluster: Cluster, address: str) -> None:
    """Two processes of the service, and clients that draw from two shards as fast as they can."""

    def work(at: str, number: int) -> list[int]:
        drawn: list[int] = []
        with httpx.Client(base_url=at, timeout=30) as client:
            for turn in range(REQUESTS):
                drawn += draw(client, number % 2, (1, 7, 300)[turn % 3])
        return drawn

    with serving("id_service:app", cluster_url) as other, ThreadPoolExecutor(CLIENTS) as pool:
        at = [(address, other)[number // 2 % 2] for number in range(CLIENTS)]
        clients = list(pool.map(work, at, range(CLIENTS)))
    ids = [one for drawn in clients for one in drawn]
    assert len(set(ids)) == len(ids) == CLIENTS * REQUESTS // 3 * 308
    for number, drawn in enumerate(clients):
        assert {cluster.shard_of(one) for one in drawn} == {number % 2}
        assert all(earlier < later for earlier, later in pairwise(drawn))


def test_an_id_tells_the_time_at_which_it_was_handed_out(cluster: Cluster, address: str) -> None:
    with httpx.Client(base_url=address, timeout=20) as client:
        draw(client, 3, 1)
        time.sleep(FRESH_S)
        (later,) = draw(client, 3, 1)
    # At its start a shard may lead the clock by the margin of a restart.
    assert abs(cluster.decode(later).time - datetime.now(UTC)) < timedelta(seconds=30)


def test_refusals(address: str) -> None:
    with httpx.Client(base_url=address, timeout=20) as client:
        assert client.post("/shards/8/ids").status_code == 404
        for path in ("/shards/-1/ids", "/shards/x/ids", "/shards/0/ids?count=0", "/shards/0/ids?count=10001"):
            assert client.post(path).status_code == 422, path
        assert len(draw(client, 0, 10_000)) == 10_000


def test_it_goes_on_after_lost_connections_and_a_move(
    cluster_url: URL, cluster: Cluster, address: str
) -> None:
    shard = 5
    to = "b" if cluster.node_of(shard).name == "a" else "a"
    with httpx.Client(base_url=address, timeout=20) as client:
        before = draw(client, shard, 10)
        ours = cluster.node_of(shard)
        with connected(cluster_url.set(database=cluster.engine(ours).url.database)) as direct:
            direct.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        wait_for(lambda: client.post(f"/shards/{shard}/ids?count=10000").status_code == 200, "it draws again")

        tick = moves_by_hand.fence(cluster_url, shard, to)
        wait_for(
            lambda: client.post(f"/shards/{shard}/ids?count=10000").status_code == 503, "the block is used up"
        )
        moves_by_hand.copy(cluster_url, shard, to, MetaData(), tick)
        moves_by_hand.place(cluster_url, shard, to)
        wait_for(lambda: client.post(f"/shards/{shard}/ids").status_code == 200, "the move is heard")
        assert min(draw(client, shard, 10)) > max(before)
