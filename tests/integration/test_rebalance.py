"""Rebalances: a move that fails is undone, the others go on, and there is one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shardids import mover
from shardids.errors import ClusterConflict
from shardids.mover.balance import Transfer
from shardids.pg.embedded import temporary_servers
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes

SMALL = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.notes (id bigint primary key, body text)"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 12)
        yield nodes
        nodes.catalog.close()


def test_a_move_that_fails_is_undone_and_the_others_go_on(nodes: TwoNodes) -> None:
    shards = [nodes.new_shard(SMALL) for _ in range(3)]

    def change(event: mover.Event) -> None:
        if event == mover.StepDone(shard=shards[0], step="indexes"):
            with nodes.connected("a") as source:
                source.execute(f"create table {schema(shards[0])}.late (id bigint primary key)")

    transfers = [Transfer(shard=shard, source="a", target="b", weight=1) for shard in shards]
    failed, *moved = mover.carry_out(nodes.catalog, transfers, mover.Options(), change)
    assert isinstance(failed, mover.NotMoved)
    assert not failed.is_open
    assert str(failed).startswith(f'shard {shards[0]} was not moved from node "a" to "b": ')
    assert 'table "late" was changed while it was moved' in failed.reason
    assert [one.outcome for one in moved if isinstance(one, mover.Result)] == ["moved", "moved"]
    assert mover.open_moves(nodes.catalog) == []
    assert [nodes.catalog.node_of(shard).name for shard in shards] == ["a", "b", "b"]
    assert nodes.leftovers() == []
    for shard in shards:
        assert_one_owner(nodes, shard)


def test_a_drain_reports_the_shards_that_stayed(nodes: TwoNodes) -> None:
    there = [shard for shard, node in nodes.catalog.placement().node_of.items() if node == "a"]
    assert len(there) > 1
    with nodes.connected("a") as source:
        source.execute(f"create table {schema(there[0])}.loose (body text)")
    catalog = {"SHARDIDS_CATALOG": nodes.catalog_url}
    ran = command_here("rebalance", "--drain", "a", "--json", **catalog)
    assert ran.returncode == 1
    assert sorted(row["shard"] for row in json.loads(ran.stdout)) == there[1:]
    assert f'shard {there[0]} was not moved from node "a" to "b": ' in ran.stderr
    assert "1 left. To try again, run the command again." in ran.stderr
    with nodes.connected("a") as source:
        source.execute(f"drop table {schema(there[0])}.loose")
    assert command_here("rebalance", "--drain", "a", **catalog).returncode == 0


def test_a_second_rebalance_is_refused_by_name(nodes: TwoNodes) -> None:
    with mover.rebalancing(nodes.catalog):
        with (
            pytest.raises(
                ClusterConflict, match=r"another rebalance is under way: shardids rebalance by \S+"
            ),
            mover.rebalancing(nodes.catalog),
        ):
            pass
        ran = command_here("rebalance", SHARDIDS_CATALOG=nodes.catalog_url)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "another rebalance is under way: shardids rebalance by " in ran.stderr
        assert command_here("rebalance", "--dry-run", SHARDIDS_CATALOG=nodes.catalog_url).returncode == 0
    assert command_here("rebalance", SHARDIDS_CATALOG=nodes.catalog_url).returncode == 0
