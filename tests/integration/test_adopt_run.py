"""A database that is used while a cluster adopts it: copied, compared, switched, paused, aborted."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from shardids.adopt import adoption
from shardids.catalog.topology import shard_for_key
from shardids.dev.embedded import temporary_servers
from shardids.errors import ClusterConflict
from tests.support.adoptions import (
    SHARDS,
    Clients,
    Shop,
    assert_as_before,
    assert_in_shards,
    new_shop,
    schema,
)


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        yield shop
        shop.catalog.close()


def test_it_is_undone_as_if_it_had_never_been(shop: Shop) -> None:
    with Clients(shop) as clients:
        assert adoption.run(shop.catalog, shop.plan).step == "follow"
        with shop.connected("a") as node, pytest.raises(psycopg.Error, match="fenced"):
            node.execute(f"insert into {schema(0)}.users (name) values ('too early')")
        with shop.connected("a") as node, pytest.raises(psycopg.Error, match="is being filled"):
            node.execute("delete from countries")
        status = adoption.status(shop.catalog)
        assert status is not None
        assert status.adoption.compared_at is not None
        assert adoption.abort(shop.catalog).outcome == "aborted"
        before = clients.count
    assert before > 0
    assert_as_before(shop)


def test_it_takes_over(shop: Shop) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        adoption.pause(shop.catalog)
        with pytest.raises(ClusterConflict, match="paused"):
            adoption.switch(shop.catalog)
        assert adoption.resume(shop.catalog).step == "follow"
        adoption.compare(shop.catalog)
        done = adoption.switch(shop.catalog)
        assert done.outcome == "adopted"
        assert done.pause_ms is not None
    assert all(written.refused for written in clients.written)
    assert_in_shards(shop, clients)
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []
    with shop.connected("source") as source, pytest.raises(psycopg.Error, match="was taken into a cluster"):
        source.execute("set session_replication_role = replica; delete from users")
    rows = shop.rows("users")
    assert sum(len(one) for one in rows.values()) >= 600
    with shop.connected("a") as node:
        assert node.execute("select count(*) from countries").fetchone() == (2,)
        node.execute(f"insert into {schema(0)}.users (name, country) values ('new', 'at')")
        node.execute("update countries set name = 'D' where code = 'de'")
    assert shard_for_key(1, SHARDS) == next(
        shard for shard, one in rows.items() if any(r[0] == 1 for r in one)
    )
