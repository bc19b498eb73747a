"""Rebalances: a move that fails is undone, the others go on, and there is one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from shardids import mover
from shardids.errors import ClusterConflict, StatementFailed
from shardids.mover.balance import By, Transfer, weigh
from shardids.pg import locks
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url
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


def test_who_keeps_a_table_locked_is_named(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", "300ms")
    shard, stays = nodes.new_shard(SMALL), nodes.new_shard(SMALL)
    mover.move(nodes.catalog, shard, "b")
    with nodes.connected("a") as holder:
        who = f"table users is locked by process {holder.info.backend_pid} of role"

        def refused(act: Callable[[], object]) -> str:
            with pytest.raises(StatementFailed) as error:
                act()
            assert f"pg_terminate_backend({holder.info.backend_pid})" in (error.value.hint or "")
            return error.value.message

        holder.execute(f"begin; lock table {schema(stays)}.users in access exclusive mode")
        found = refused(lambda: weigh(nodes.catalog.placement(), parse_url(nodes.catalog_url), By.SIZE))
        assert found.startswith(f'node "a": {who}')
        holder.execute(f"commit; begin; lock table {schema(shard)}.users in access exclusive mode")
        assert refused(lambda: mover.old_copies(nodes.catalog, [shard])).startswith(f'node "a": {who}')
        holder.execute(f"commit; begin; lock table {schema(shard)}.users in access share mode")
        found = refused(lambda: mover.purge(nodes.catalog, [shard]))
        assert found.startswith(f'shard {shard}, node "a": {who}')
        holder.execute("commit")
    assert [copy.node for copy in mover.purge(nodes.catalog, [shard])] == ["a"]


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
