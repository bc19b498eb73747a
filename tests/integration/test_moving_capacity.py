"""What servers have too little of for a move is found before it begins, each setting by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import sql as psql

from shardids import mover
from shardids.errors import MoveRefused
from shardids.mover import requirements
from shardids.pg.embedded import temporary_servers
from tests.support.moves import TwoNodes, two_nodes
from tests.support.replicas import unsubscribe
from tests.support.standbys import with_password
from tests.support.waiting import wait_for

TABLE = "create table {s}.users (id bigint primary key default {s}.next_id(), name text)"
SETTINGS = {
    "max_replication_slots": "4",
    "max_wal_senders": "4",
    "max_logical_replication_workers": "2",
    # One is the launcher of logical replication's workers.
    "max_worker_processes": "3",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2, settings=SETTINGS) as servers:
        nodes = two_nodes(servers, 4)
        nodes.new_shard(TABLE)
        yield nodes
        nodes.catalog.close()


def obstacles(nodes: TwoNodes) -> str:
    """What stands in the way of moving shard 0, if anything does."""
    try:
        mover.plan_move(nodes.catalog, 0, "b")
    except MoveRefused as refused:
        return refused.message
    return ""


def test_slots_and_senders_that_are_used_up_on_the_source(nodes: TwoNodes) -> None:
    with nodes.connected("a") as source:
        source.execute(
            "select pg_create_physical_replication_slot('kept_' || n) from generate_series(1, 2) n"
        )
        assert 'node "a" has 2 free of max_replication_slots; it takes 3' in obstacles(nodes)
        source.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        senders = "select count(*) from pg_stat_activity where backend_type = 'walsender'"
        url = nodes.servers["a"].url()
        with (
            closing(psycopg.connect(url, autocommit=True, replication="database")),
            closing(psycopg.connect(url, autocommit=True, replication="database")),
        ):
            assert source.execute(senders).fetchone() == (2,)
            assert 'node "a" has 2 free of max_wal_senders; it takes 3' in obstacles(nodes)
        wait_for(lambda: source.execute(senders).fetchone() == (0,), "the senders have ended")
    assert obstacles(nodes) == ""


def test_workers_that_are_used_up_on_the_target(nodes: TwoNodes) -> None:
    with nodes.connected("a") as source, nodes.connected("b") as target:
        source.execute("create publication others")
        target.execute(
            psql.SQL("create subscription copied connection {} publication others").format(
                psql.Literal(with_password(nodes.servers["a"].url()))
            )
        )
        workers = (
            "select count(*) from pg_stat_activity where backend_type ~ '^logical replication .*worker$'"
        )
        wait_for(lambda: target.execute(workers).fetchone() == (1,), "one worker is left")
        found = obstacles(nodes)
        assert 'node "b" has 1 free of max_logical_replication_workers; it takes 2' in found
        assert 'node "b" has 1 free of max_worker_processes; it takes 2' in found
        unsubscribe(source, target)
        source.execute("drop publication others")
        wait_for(lambda: target.execute(workers).fetchone() == (0,), "no worker is left")
    assert obstacles(nodes) == ""


def test_origins_and_workers_that_copy_tables(nodes: TwoNodes) -> None:
    with nodes.connected("b") as target:
        setting = "max_active_replication_origins"
        if target.info.server_version < 180000:
            setting = "max_replication_slots"
        (most,) = target.execute(f"select current_setting('{setting}')::integer").fetchone()
        target.execute(
            "select pg_replication_origin_create('kept_' || n) from generate_series(1, %s) n", [most - 1]
        )
        assert f'node "b" has 1 free of {setting}; it takes 2' in obstacles(nodes)
        target.execute("select pg_replication_origin_drop(roname) from pg_replication_origin")
        target.execute("alter system set max_sync_workers_per_subscription = 0")
        target.execute("select pg_reload_conf()")
        wait_for(
            lambda: (
                'node "b" has 0 free of max_sync_workers_per_subscription; it takes 1' in obstacles(nodes)
            ),
            "the setting is noticed",
        )
        target.execute("alter system reset max_sync_workers_per_subscription")
        target.execute("select pg_reload_conf()")
    wait_for(lambda: obstacles(nodes) == "", "nothing is in the way")


def test_a_disk_that_is_too_full(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A superuser may run df on the server; what others may not is said in a note."""
    monkeypatch.setattr(requirements, "_ROOM_FACTOR", 1 << 50)
    assert 'node "b" has ' in obstacles(nodes)
    assert " MB of room; the shard is 0 MB and takes up to" in obstacles(nodes)
