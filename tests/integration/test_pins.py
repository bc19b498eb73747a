"""Pins: neither a move nor a rebalance takes a pinned shard away from its node."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shardids import mover
from shardids.catalog import pins
from shardids.catalog.keys.homes import put_home
from shardids.catalog.region_changes import create_region, drop_region
from shardids.catalog.regions import Region
from shardids.catalog.topology import Node, shard_for_key
from shardids.errors import BadArgument, ClusterConflict, UnknownShard
from shardids.mover.journal import Journal
from shardids.pg.embedded import temporary_servers
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes, two_nodes

SMALL = "create table {s}.users (id bigint primary key default {s}.next_id(), name text)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 16)
        yield nodes
        nodes.catalog.close()


def run(nodes: TwoNodes, *words: str) -> tuple[int, str]:
    ran = command_here(*words, SHARDIDS_CATALOG=nodes.catalog_url)
    return ran.returncode, ran.stdout + ran.stderr


def test_a_pinned_shard_is_refused_by_name_until_it_is_unpinned(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(SMALL)
    assert run(nodes, "shard", "pin", str(shard))[0] == 0
    code, said = run(nodes, "shard", "move", str(shard), "--to", "b")
    assert code == 1
    assert f"shard {shard} is pinned where it is" in said
    assert f"shardids shard unpin {shard}" in said
    code, said = run(nodes, "shard", "move", str(shard), "--to", "b", "--dry-run")
    assert (code, f"shard {shard} is pinned where it is" in said) == (1, True)
    assert mover.all_moves(nodes.catalog) == []
    listed = json.loads(command_here("shard", "list", "--json", SHARDIDS_CATALOG=nodes.catalog_url).stdout)
    assert {row["shard"]: row["pin"] for row in listed}[shard] == "here"
    assert run(nodes, "shard", "unpin", str(shard))[0] == 0
    assert "they were not pinned" in run(nodes, "shard", "unpin", str(shard))[1]
    assert run(nodes, "shard", "move", str(shard), "--to", "b")[0] == 0


def test_a_shard_that_is_pinned_to_a_node_moves_there_and_nowhere_else(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(SMALL)
    pins.pin_shard(nodes.catalog, shard, "b")
    plan = mover.plan_balance(nodes.catalog, mover.By.ROWS, margin=9)
    assert [(one.shard, one.target) for one in plan.transfers] == [(shard, "b")]
    assert mover.move(nodes.catalog, shard, "b").outcome == "moved"
    with pytest.raises(ClusterConflict, match=f'shard {shard} is pinned to node "b"'):
        mover.move(nodes.catalog, shard, "a", back=True)
    with pytest.raises(ClusterConflict, match=r'node "b" can\'t be emptied: shard .* no shard was moved'):
        mover.plan_balance(nodes.catalog, mover.By.ROWS, drained="b", margin=float("inf"))
    assert run(nodes, "rebalance", "--drain", "b")[0] == 1
    pins.unpin_shard(nodes.catalog, shard)


def test_a_pinned_key_keeps_the_shard_where_it_lives_also_after_it_got_another(nodes: TwoNodes) -> None:
    home = shard_for_key("acme", 16)
    assert run(nodes, "tenant", "pin", "acme")[0] == 0
    assert [(one.shard, one.key) for one in pins.pins(nodes.catalog)] == [(home, "acme")]
    other = "b" if nodes.catalog.node_of(home).name == "a" else "a"
    with pytest.raises(ClusterConflict, match="since key 'acme' lives there, which is pinned"):
        mover.move(nodes.catalog, home, other)
    elsewhere = (home + 1) % 16
    put_home(nodes.catalog, "text", "acme", elsewhere)
    assert [one.shard for one in pins.pins(nodes.catalog)] == [elsewhere]
    assert run(nodes, "tenant", "unpin", "acme")[0] == 0
    assert pins.pins(nodes.catalog) == []


def test_a_region_that_has_a_pinned_key_is_not_dropped(nodes: TwoNodes) -> None:
    """Its pin would stand in the way of every move, and nothing would name it."""
    create_region(nodes.catalog, Region(name="eu", first_shard=14, last_shard=15))
    assert run(nodes, "tenant", "pin", "acme", "--kind", "text@eu")[0] == 0
    code, said = run(nodes, "region", "drop", "eu", "--yes")
    assert (code, "shardids tenant unpin acme --kind text@eu" in " ".join(said.split())) == (1, True), said
    assert run(nodes, "tenant", "unpin", "acme", "--kind", "text@eu")[0] == 0
    drop_region(nodes.catalog, "eu")


def test_a_shard_that_rests_is_not_moved_to_the_node_of_its_pin(nodes: TwoNodes) -> None:
    """Its move has just failed, for one."""
    shard = nodes.new_shard(SMALL)
    pins.pin_shard(nodes.catalog, shard, "b")
    plan = mover.plan_balance(nodes.catalog, mover.By.ROWS, margin=9, resting={shard})
    assert plan.transfers == ()
    pins.unpin_shard(nodes.catalog, shard)


def test_a_plan_leaves_pinned_shards_where_they_are(nodes: TwoNodes) -> None:
    here = [shard for shard, node in nodes.catalog.placement().node_of.items() if node == "a"]
    for shard in here[1:]:
        pins.pin_shard(nodes.catalog, shard)
    weights = dict.fromkeys(here, 10.0)
    plan = mover.plan_balance(nodes.catalog, mover.By.ROWS, weights=weights)
    assert [one.shard for one in plan.transfers] == here[:1]
    for shard in here[1:]:
        pins.unpin_shard(nodes.catalog, shard)


def test_what_can_t_be_pinned(nodes: TwoNodes) -> None:
    with pytest.raises(ClusterConflict, match="nonesuch"):
        pins.pin_shard(nodes.catalog, 0, "nonesuch")
    with pytest.raises(UnknownShard):
        pins.pin_shard(nodes.catalog, 99)
    with pytest.raises(BadArgument):
        pins.pin_key(nodes.catalog, "bigint", "acme")
    assert run(nodes, "shard", "pin")[0] == 2
    assert pins.pins(nodes.catalog) == []


def test_a_pin_and_a_move_that_begins_find_each_other(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(SMALL)
    with Journal.opened(nodes.catalog, shard) as journal:
        journal.enter("b", offline=False)
        with pytest.raises(ClusterConflict, match=f'a move of shard {shard} to node "b" is not over'):
            pins.pin_shard(nodes.catalog, shard)
        assert pins.pin_shard(nodes.catalog, shard, "b").node == "b"
        journal.end("aborted")
        pins.pin_shard(nodes.catalog, shard, "a")
        # The move looked before the pin was there, and enters the journal after.
        with pytest.raises(ClusterConflict, match=f'shard {shard} is pinned to node "a"'):
            journal.enter("b", offline=False)
    pins.unpin_shard(nodes.catalog, shard)


def test_a_dry_run_of_a_pin_leaves_none(nodes: TwoNodes) -> None:
    for words in (("shard", "pin", "0"), ("tenant", "pin", "acme")):
        assert run(nodes, *words, "--dry-run")[0] == 0
    assert pins.pins(nodes.catalog) == []


def test_a_pin_outlives_its_node(nodes: TwoNodes) -> None:
    nodes.catalog.point_node(Node(name="b", url=nodes.servers["b"].url()))
    pins.pin_shard(nodes.catalog, 0, nodes.catalog.node_of(0).name)
    with nodes.catalog.engine.begin() as connection:
        assert [one.node for one in pins.read_pins(connection)] == [nodes.catalog.node_of(0).name]
    pins.unpin_shard(nodes.catalog, 0)
