"""The query node shows every shard once, whatever moves meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy import func, select

from shardids import Cluster, mover
from shardids.pg.embedded import temporary_servers
from shardids.tables import views
from tests.support.application import TABLES, Photo, User
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.waiting import wait_for

SHARDS = 4
RANKED = select(Photo.id, func.row_number().over(order_by=Photo.id))
"""A statement that only the query node can answer."""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Shards 0 and 1 on a, 2 and 3 on b, which is the query node, too."""
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(TABLES.replace("{s}", schema(shard)))
        views.create_query_node(nodes.catalog, node="b", store_password=True)
        yield nodes
        nodes.catalog.close()


class Traffic:
    """Writes to every shard, and reads all of them over the query node, until it is stopped.

    Attributes:
        written: the IDs of photos that are committed.
        wrong: what a reader saw and should not have, or did not see.
        reads: how many times a reader was answered.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.written: list[int] = []
        self.wrong: list[str] = []
        self.reads = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._write, self._read, self._read)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        n = 0
        while not self._stop.is_set():
            n += 1
            # A shard may be moving: run() repeats the transaction on its new owner.
            self.written.append(self.cluster.at(shard=n % SHARDS).run(_add_photo, patience_s=30))

    def _read(self) -> None:
        while not self._stop.is_set():
            before = set(self.written)
            try:
                with self.cluster.sharded_session() as session:
                    found = Counter(session.scalars(RANKED))
            except Exception as error:  # noqa: BLE001 -- whatever a thread meets fails the test
                self.wrong.append(repr(error))
                return
            self.reads += 1
            if set(found.values()) - {1} or before - found.keys():
                self.wrong.append(f"{max(found.values())} times, {len(before - found.keys())} missing")


def _add_photo(session: object) -> int:
    user = User(name="one")
    session.add(user)  # type: ignore[attr-defined]  # a Session
    session.flush()  # type: ignore[attr-defined]  # a Session
    photo = Photo(user_id=user.id, title="a photo")
    session.add(photo)  # type: ignore[attr-defined]  # a Session
    session.flush()  # type: ignore[attr-defined]  # a Session
    return int(photo.id)


@pytest.mark.long
def test_a_shard_that_moves_under_load_is_read_once(nodes: TwoNodes) -> None:
    with Cluster.connect(nodes.catalog_url) as cluster, Traffic(cluster) as traffic:
        wait_for(lambda: traffic.reads > 2 and len(traffic.written) > SHARDS, "no read")
        for shard, to in ((0, "b"), (2, "a"), (0, "a")):
            assert mover.move(nodes.catalog, shard, to, back=True).stale_views == ()
            reads = traffic.reads
            wait_for(lambda least=reads + 2: traffic.reads > least or traffic.wrong, "no read")  # type: ignore[misc]  # bound here
            assert traffic.wrong == []
        assert {copy.shard for copy in mover.purge(nodes.catalog, range(SHARDS))} == {0, 2}
        reads = traffic.reads
        wait_for(lambda: traffic.reads > reads + 2 or traffic.wrong, "no read")
    assert traffic.wrong == []
    with cluster.sharded_session() as session:
        assert sorted(session.scalars(RANKED)) == sorted(traffic.written)
    cluster.close()
