"""The console's page about rebalances: the one that runs, pins, and the commands against a hot shard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest

from shardids import mover
from shardids.catalog import pins
from shardids.pg.embedded import temporary_servers
from shardids.pg.sqlfiles import read_sql
from shardids.watch.console.hot import HotKeys
from shardids.watch.console.watching import Watcher
from shardids.watch.metrics.collector import ClusterCollector
from tests.support.consoles import browsing, told
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.waiting import wait_for

TABLE = "create table {s}.users (id bigint primary key default {s}.next_id(), name text)"
HOT = {"found": [{"kind": "hot shard", "shard": 0}, {"kind": "burst", "shard": 1}]}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        for _ in range(4):
            nodes.new_shard(TABLE)
        yield nodes
        nodes.catalog.close()


def insert(nodes: TwoNodes, shard: int, name: str, rows: int) -> None:
    with nodes.connected("a") as connection:
        connection.execute(
            f"insert into {schema(shard)}.users (name) select %s from generate_series(1, %s)".encode(),
            [name, rows],
        )


def test_a_hot_shard_s_keys_are_named_with_their_commands(nodes: TwoNodes) -> None:
    insert(nodes, 0, "o'hara; x", 90)
    insert(nodes, 0, "bob", 10)
    watcher = Watcher(nodes.catalog_url)
    try:
        watcher.look()
        insert(nodes, 1, "cat", 50)
        time.sleep(0.6)
        seen = watcher.look()
        hot = HotKeys(nodes.catalog_url, ["users.name"])
        hot.look(HOT)
        wait_for(lambda: "tenant move" in str(hot.commands(0, seen)), "the keys")
        move, whole = hot.commands(0, seen)
        assert move["text"] == "shardids tenant move 'o'\"'\"'hara; x' --to-shard 4 --root users.name"
        assert "has 90% of the shard's new rows" in move["step"]
        assert whole["text"] == "shardids shard move 0 --to b"
        # Of a shard whose keys were not asked, the command that names them.
        top, _ = HotKeys(nodes.catalog_url, []).commands(0, seen)
        assert top["text"] == "shardids tenant top 0 --key TABLE.COLUMN"
        wrong = HotKeys(nodes.catalog_url, ["nonesuch.name"])
        wrong.look(HOT)
        assert "tenant top 0 --key nonesuch.name" in wrong.commands(0, seen)[0]["text"]
    finally:
        watcher.close()


def test_the_page_has_the_rebalance_that_runs_and_the_pins(nodes: TwoNodes) -> None:
    pins.pin_shard(nodes.catalog, 3, "a")
    pins.pin_key(nodes.catalog, "text", "acme")
    with browsing(nodes.catalog_url) as client:
        found = told(client, "/api/rebalance")
        assert (found["running"], found["error"]) == (None, None)
        (first, _) = found["pins"]
        assert (first["shard"], first["node"], first["key"]) == (3, "a", None)
        assert [one["do"] for one in found["pins"]] == ["shardids shard unpin 3", "shardids tenant unpin KEY"]
        assert [one["node"] for one in told(client, "/api/shards/3")["pins"]] == ["a"]
        with mover.rebalancing(nodes.catalog, "rebalance --watch"):
            running = wait_for(lambda: told(client, "/api/rebalance")["running"], "the watch")
            assert running.startswith("shardids rebalance --watch by ")
    pins.unpin_shard(nodes.catalog, 3)
    pins.unpin_key(nodes.catalog, "text", "acme")


def test_metrics_count_the_moves_of_a_watch(nodes: TwoNodes) -> None:
    collector = ClusterCollector(nodes.catalog_url)

    def value(name: str, *labels: str) -> float:
        return next(one.value for one in collector.read() if (one.name, one.labels) == (name, labels))

    try:
        assert value("shardids_rebalance_running") == 0
        assert value("shardids_rebalance_moves_total", "moved") == 0
        mover.move(nodes.catalog, 2, "b", options=mover.Options(automatic=True))
        mover.move(nodes.catalog, 1, "b")
        assert value("shardids_rebalance_moves_total", "moved") == 1
        with mover.rebalancing(nodes.catalog):
            assert value("shardids_rebalance_running") == 1
    finally:
        collector.close()


def test_a_role_that_only_reads_metrics_sees_who_rebalances(nodes: TwoNodes) -> None:
    with psycopg.connect(nodes.catalog_url, autocommit=True) as connection:
        connection.execute("create role looker login")
        connection.execute("grant usage on schema shardids_catalog to looker")
        connection.execute(
            "grant select on shardids_catalog.cluster, shardids_catalog.node, shardids_catalog.region,"
            " shardids_catalog.placement, shardids_catalog.move, shardids_catalog.key_move,"
            " shardids_catalog.loss, shardids_catalog.adoption to looker"
        )
        with mover.rebalancing(nodes.catalog):
            connection.execute("set role looker")
            with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                row = cursor.execute(str(read_sql("facts/catalog.v1")).encode()).fetchone()
            assert row is not None
            assert row["rebalance"].startswith("shardids rebalance by ")
            connection.execute("reset role")
