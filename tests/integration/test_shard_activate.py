"""``shard activate``: a shard issues IDs on its node only if the catalog and every node allow it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from shardids import mover
from shardids.catalog.moves import all_moves
from shardids.errors import ClusterConflict, MoveRefused, ShardFenced, ShardLost, UnknownShard
from shardids.pg.embedded import temporary_servers
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.notes (id bigint primary key, body text)"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 32)
        yield nodes
        nodes.catalog.close()


def activate(nodes: TwoNodes, shard: int, *words: str) -> subprocess.CompletedProcess[str]:
    return command_here("shard", "activate", str(shard), *words, SHARDIDS_CATALOG=nodes.catalog_url)


def at(nodes: TwoNodes, node: str, statement: str) -> None:
    with nodes.connected(node) as connection:
        connection.execute(statement.encode())


def draws(nodes: TwoNodes, node: str, shard: int) -> bool:
    with nodes.connected(node) as connection:
        try:
            connection.execute(f"select {schema(shard)}.next_id()")
        except psycopg.Error:
            return False
    return True


def test_a_fenced_shard_is_activated(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.fence({shard})")
    planned = activate(nodes, shard, "--dry-run", "--json")
    assert json.loads(planned.stdout) == [{"shard": shard, "node": "a", "before": "fenced"}]
    assert not draws(nodes, "a", shard)
    assert activate(nodes, shard).returncode == 0
    assert draws(nodes, "a", shard)
    again = activate(nodes, shard, "--json")
    assert json.loads(again.stdout) == [{"shard": shard, "node": "a", "before": "active"}]


def test_a_catalog_without_its_last_move_activates_no_second_copy(nodes: TwoNodes) -> None:
    """As after the catalog was restored from a backup."""
    shard = nodes.new_shard(TABLES)
    mover.move(nodes.catalog, shard, "b")
    with psycopg.connect(nodes.catalog_url, autocommit=True) as catalog:
        catalog.execute("update shardids_catalog.placement set node = 'a' where shard = %s", [shard])
        catalog.execute("delete from shardids_catalog.move where shard = %s", [shard])
        with pytest.raises(MoveRefused, match="it is moved on node") as refused:
            mover.move(nodes.catalog, shard, "b", back=True)
        printed = re.search(r"shardids shard activate \d+", refused.value.hint)
        assert printed is not None
        assert "select shardids." not in refused.value.hint
        done = command_here(*printed.group().split()[1:], SHARDIDS_CATALOG=nodes.catalog_url)
        assert (done.returncode, done.stdout) == (1, "")
        assert f'shard {shard} is active on node "b": node "a" must not have it active' in done.stderr
        assert not draws(nodes, "a", shard)
    with pytest.raises(ClusterConflict, match=f'shard {shard} is active on node "b": node "a" must not'):
        mover.place(nodes.catalog, shard, "a")
    words = ("shard", "place", str(shard), "--node", "b", "--json")
    for more in (["--dry-run"], []):
        done = command_here(*words, *more, SHARDIDS_CATALOG=nodes.catalog_url)
        assert json.loads(done.stdout) == [{"shard": shard, "before": "a", "node": "b"}], done.stderr
    assert_one_owner(nodes, shard)
    assert mover.place(nodes.catalog, shard, "b").before == "b"
    # A failover judges copies by the last arrival.
    (arrival,) = [one for one in all_moves(nodes.catalog) if one.shard == shard]
    assert (arrival.source, arrival.target, arrival.outcome) == ("a", "b", "moved")
    assert arrival.high_water_tick is not None


def test_a_shard_is_placed_only_where_it_is_active_and_all_nodes_say_so(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.fence({shard})")
    with pytest.raises(ClusterConflict, match=f'shard {shard} is not active on node "a"'):
        mover.place(nodes.catalog, shard, "a")
    with pytest.raises(UnknownShard, match=f'node "b" does not have shard {shard}'):
        mover.place(nodes.catalog, shard, "b")
    mover.activate(nodes.catalog, shard)
    nodes.servers["b"].stop()
    try:
        with pytest.raises(ClusterConflict, match='node "b" may have it active, and was not examined'):
            mover.place(nodes.catalog, shard, "a")
    finally:
        nodes.servers["b"].start(attached=True)
    assert_one_owner(nodes, shard)


def test_an_active_shard_loses_write_barriers(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.add_barriers({shard})")
    mover.activate(nodes.catalog, shard)
    with nodes.connected("a") as connection:
        left = connection.execute(
            "select count(*) from pg_trigger where tgname = 'shardids_barrier' and tgrelid = any (%s)",
            [connection.execute("select shardids.tables_of(%s)::oid[]", [shard]).fetchone()[0]],
        ).fetchone()
    assert left == (0,)


def test_tables_that_are_in_use_hold_up_the_others_for_a_moment_only(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardids.mover.activation.LOCK_MS", 200)
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.add_barriers({shard})")
    with nodes.connected("a") as other, other.transaction():
        other.execute(f"lock table {schema(shard)}.users in access share mode")
        with pytest.raises(ClusterConflict, match=f'tables of shard {shard} on node "a" are locked by'):
            mover.activate(nodes.catalog, shard)
    mover.activate(nodes.catalog, shard)
    assert draws(nodes, "a", shard)


def test_an_old_copy_of_a_lost_shard_is_not_activated(nodes: TwoNodes) -> None:
    """A fence raises its ticks past those of a newer copy."""
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.fence({shard})")
    with psycopg.connect(nodes.catalog_url, autocommit=True) as catalog:
        placed = "update shardids_catalog.placement set state = %s where shard = %s"
        catalog.execute(placed, ["lost", shard])
        try:
            with pytest.raises(ShardLost, match=f"shard {shard} was lost"):
                mover.activate(nodes.catalog, shard)
        finally:
            catalog.execute(placed, ["active", shard])
    assert mover.activate(nodes.catalog, shard).before == "fenced"


def test_an_interrupted_activation_at_the_nodes_own_address_is_repeated(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    url = nodes.catalog.existing_node("a").url
    assert mover.activate(nodes.catalog, shard, url=url).before == "active"


def test_a_newer_copy_elsewhere_is_not_passed_over(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    mover.move(nodes.catalog, shard, "b")
    at(nodes, "b", f"select {schema(shard)}.next_id()")
    at(nodes, "b", f"select shardids.fence({shard})")
    with psycopg.connect(nodes.catalog_url, autocommit=True) as catalog:
        catalog.execute("update shardids_catalog.placement set node = 'a' where shard = %s", [shard])
        with pytest.raises(
            ClusterConflict, match=f'node "b" has a newer copy of shard {shard} than node "a"'
        ):
            mover.activate(nodes.catalog, shard)
        catalog.execute("update shardids_catalog.placement set node = 'b' where shard = %s", [shard])
    assert mover.activate(nodes.catalog, shard).node == "b"
    assert_one_owner(nodes, shard)


def test_a_node_that_does_not_answer_may_have_it_active(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"select shardids.fence({shard})")
    nodes.servers["b"].stop()
    try:
        with pytest.raises(ClusterConflict, match='node "b" may have it active, and was not examined'):
            mover.activate(nodes.catalog, shard)
        assert not draws(nodes, "a", shard)
    finally:
        nodes.servers["b"].start(attached=True)
    mover.activate(nodes.catalog, shard)


def test_a_shard_that_is_being_moved_is_left_alone(nodes: TwoNodes) -> None:
    shard, met = nodes.new_shard(TABLES), list[ClusterConflict]()

    def interfere(event: mover.Event) -> None:
        if event == mover.StepBegun(shard=shard, step="copy"):
            with pytest.raises(ClusterConflict) as refused:
                mover.activate(nodes.catalog, shard)
            met.append(refused.value)

    mover.move(nodes.catalog, shard, "b", on_event=interfere)
    assert [error.message for error in met] == [f"shard {shard} is being moved by another process"]


def test_a_copy_is_activated_when_somebody_says_that_the_original_is_dead(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "a", f"update shardids.shard set server = 'another' where id = {shard}")
    assert not draws(nodes, "a", shard)
    asked = activate(nodes, shard)
    assert asked.returncode == 2
    assert f"Shard {shard}: copied from another server." in asked.stderr
    assert activate(nodes, shard, "--yes").returncode == 0
    assert draws(nodes, "a", shard)


def test_it_begins_above_a_tick(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    with nodes.connected("a") as connection:
        tick = connection.execute(
            "select (shardids.ms_of(clock_timestamp()) + 60000) << shardids.sequence_bits()"
        ).fetchone()
        assert tick is not None
        assert activate(nodes, shard, "--above-tick", str(tick[0])).returncode == 0
        drawn = connection.execute(
            f"select shardids.tick_of({schema(shard)}.next_id()) > %s", tick
        ).fetchone()
    assert drawn == (True,)
    refused = activate(nodes, shard, "--above-tick", str(tick[0] << 4))
    assert (refused.returncode, "the limit is max_ahead" in refused.stderr) == (1, True)


def test_another_node_does_not_take_the_place_of_a_shards_node(nodes: TwoNodes) -> None:
    shard, url = nodes.new_shard(TABLES), nodes.servers["b"].url()
    with pytest.raises(ClusterConflict, match=r'the database is node "b" of cluster \S+, not node "a" of'):
        mover.activate(nodes.catalog, shard, url=url)


def test_errors_of_a_fenced_shard_name_the_command(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    with nodes.connected("a") as connection:
        connection.execute("select shardids.fence(%s)", [shard])
        with pytest.raises(psycopg.Error) as refused:
            connection.execute(f"select {schema(shard)}.next_id()")
    assert refused.value.sqlstate == ShardFenced.sqlstate
    assert refused.value.diag.message_hint == f"To let it issue again: shardids shard activate {shard}"


def purge(nodes: TwoNodes, shard: int, *words: str) -> subprocess.CompletedProcess[str]:
    return command_here("shard", "purge", str(shard), *words, SHARDIDS_CATALOG=nodes.catalog_url)


def test_a_schema_that_is_no_shard_of_its_node_is_dropped_when_the_node_is_named(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    for number in (shard, 99):
        at(nodes, "b", f"create schema {schema(number)}; create table {schema(number)}.t (n integer)")
        assert purge(nodes, number if number == shard else 0).stderr == "No old copy is left\n"
        assert purge(nodes, number, "--node", "b").returncode == 2
        done = purge(nodes, number, "--node", "b", "--yes", "--json")
        (dropped,) = json.loads(done.stdout)
        assert (dropped["shard"], dropped["node"], dropped["schema"]) == (number, "b", "unknown")
        with nodes.connected("b") as connection:
            there = connection.execute("select to_regnamespace(%s)::text", [schema(number)]).fetchone()
        assert there == (None,)
    assert_one_owner(nodes, shard)


def test_a_schema_stays_that_may_be_the_shard(nodes: TwoNodes) -> None:
    shard = nodes.new_shard(TABLES)
    at(nodes, "b", f"create schema {schema(shard)}; create table {schema(shard)}.t (n integer)")
    place = "update shardids_catalog.placement set state = '{}' where shard = {}"
    with psycopg.connect(nodes.catalog_url, autocommit=True) as catalog:
        for state, error, said in (
            ("creating", ClusterConflict, f"shard {shard} is being created"),
            ("lost", ShardLost, f"shard {shard} was lost"),
        ):
            catalog.execute(place.format(state, shard).encode())
            with pytest.raises(error, match=said):
                mover.purge(nodes.catalog, [shard], node="b")
        catalog.execute(place.format("active", shard).encode())
    at(nodes, "a", f"select shardids.fence({shard})")
    with pytest.raises(ClusterConflict, match='on its owner, node "a", the shard is fenced'):
        mover.purge(nodes.catalog, [shard], node="b")
    mover.activate(nodes.catalog, shard)
    at(nodes, "b", f"create view public.of_it as select * from {schema(shard)}.t")
    with pytest.raises(ClusterConflict, match=r"view public\.of_it on node"):
        mover.purge(nodes.catalog, [shard], node="b")
    at(nodes, "b", "drop view public.of_it")
    assert mover.purge(nodes.catalog, [shard], node="a") == []
    assert [copy.node for copy in mover.purge(nodes.catalog, [shard], node="b")] == ["b"]
    assert_one_owner(nodes, shard)
