"""Moving shards between nodes: with PostgreSQL's own replication, while they are written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, MoveFailed, MoveRefused
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.mover import Options, StepDone, Waiting
from shardids.pg.embedded import temporary_server, temporary_servers
from tests.support.clusters import objects, whole_story
from tests.support.moves import (
    TwoNodes,
    Writers,
    assert_nothing_lost,
    digests_at,
    schema,
    two_nodes,
)
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 80)
        yield nodes
        nodes.catalog.close()


def definitions(nodes: TwoNodes, node: str, shard: int) -> list[tuple[str, str, str]]:
    """What is in a shard, without the rejection of writes."""
    return [row for row in objects(nodes.url(node), schema(shard)) if "shardids_barrier" not in row[1]]


def rows(nodes: TwoNodes, node: str, shard: int) -> list[tuple[str, int, str | None]]:
    return _rows_at(nodes.url(node), shard)


def _rows_at(url: str | URL, shard: int) -> list[tuple[str, int, str | None]]:
    return sorted((name, one.rows, one.digest) for name, one in digests_at(url, shard).items())


def sequences(nodes: TwoNodes, node: str, shard: int) -> list[tuple[object, ...]]:
    with nodes.connected(node) as connection:
        return connection.execute("select * from shardids.sequences_of(%s)", [shard]).fetchall()


def test_a_plan_passes_over_a_shard_that_another_process_has_moved(nodes: TwoNodes) -> None:
    planned = [mover.Transfer(shard=nodes.new_shard(), source="a", target="b", weight=1) for _ in range(2)]
    mover.move(nodes.catalog, planned[0].shard, "b")
    done = mover.carry_out(nodes.catalog, planned, Options(), lambda _event: None)
    assert [one.shard for one in done] == [planned[1].shard]
    assert {nodes.catalog.node_of(one.shard).name for one in planned} == {"b"}


@pytest.mark.parametrize("offline", [False, True])
def test_all_that_is_in_a_shard_arrives(nodes: TwoNodes, offline: bool) -> None:
    shard = nodes.new_shard()
    s = schema(shard)
    there, content, values = (
        definitions(nodes, "a", shard),
        rows(nodes, "a", shard),
        sequences(nodes, "a", shard),
    )
    with nodes.connected("a") as source:
        (last_id,) = source.execute(f"select {s}.next_id()").fetchone()
    version = nodes.catalog.placement().version
    done = mover.move(nodes.catalog, shard, "b", options=Options(offline=offline, verify=True))
    assert (done.source, done.target, done.outcome) == ("a", "b", "moved")
    assert done.rows_verified == sum(table[1] for table in content if table[2] is not None)
    assert definitions(nodes, "b", shard) == there
    assert rows(nodes, "b", shard) == content
    assert sequences(nodes, "b", shard) == values
    assert nodes.catalog.node_of(shard).name == "b"
    assert nodes.catalog.placement().version == version + 1
    assert nodes.leftovers() == []
    with nodes.connected("b") as target:
        first_id, number = target.execute(
            f"insert into {s}.users (name) values ('new') returning id, number"
        ).fetchone()
        assert first_id > last_id
        assert number == 501
        # Not ahead of the clock: all that was issued is known.
        ahead = target.execute("select shardids.time_of(%s) - now() < '1 s'", [first_id]).fetchone()
        assert ahead == (True,)
        assert target.execute(f"select nextval('{s}.invoices')").fetchone() == (114,)
        assert target.execute(f"select * from {s}.sizes").fetchone() == (500,)
        bound = f"select shardids.is_bound('{s}.id_counter', '{s}.id_offset', {shard})"
        assert target.execute(bound).fetchone() == (True,)


@pytest.mark.parametrize(
    "statement",
    [
        "insert into {s}.users (name) values ('late')",
        "update {s}.photos set size = 2",
        "delete from {s}.users",
        "truncate {s}.photos",
        "insert into {s}.events values (1, '2026-01-01', 'x')",
        "delete from {s}.events_old",
        "set session_replication_role = replica; delete from {s}.notes",
        "select {s}.next_id()",
        "select shardids.reserve({n}, 10)",
    ],
)
def test_what_was_left_behind_takes_no_writes(nodes: TwoNodes, moved_shard: int, statement: str) -> None:
    text = statement.replace("{s}", schema(moved_shard)).replace("{n}", str(moved_shard))
    with nodes.connected("a") as source, pytest.raises(psycopg.Error, match='moved to node "b"') as refused:
        source.execute(text)
    assert refused.value.sqlstate == "SI003"


@pytest.fixture(scope="module")
def moved_shard(nodes: TwoNodes) -> int:
    shard = nodes.new_shard()
    mover.move(nodes.catalog, shard, "b")
    return shard


def test_no_write_is_lost_while_a_shard_moves_there_and_back(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    with Writers(nodes, shard) as writers:
        time.sleep(0.2)
        mover.move(nodes.catalog, shard, "b", options=Options(verify=True))
        time.sleep(0.2)
        mover.move(nodes.catalog, shard, "a", back=True, options=Options(verify=True))
        time.sleep(0.2)
    assert_nothing_lost(nodes, shard, writers)
    assert all(written.refusals <= {"SI002", "SI003"} for written in writers.written)
    assert max(max(written.pauses_s) for written in writers.written) < 2
    assert nodes.leftovers() == []
    assert mover.former_node(nodes.catalog, shard) == "b"


@pytest.mark.long
def test_a_long_transaction_holds_up_the_move_but_nobody_else(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    s, waits, seen = schema(shard), [], threading.Event()

    def watch(event: mover.Event) -> None:
        # Earlier it would hold up the replication slot instead, which keeps nobody waiting either.
        if isinstance(event, StepDone) and event.step == "catch up":
            long.execute(f"begin; insert into {s}.notes values ('slow')")
        elif isinstance(event, Waiting):
            waits.append(event)
            if len(waits) == 3:
                seen.set()

    with nodes.connected("a") as long, Writers(nodes, shard, 2) as writers:
        pid = long.info.backend_pid
        moving = threading.Thread(
            target=mover.move, args=(nodes.catalog, shard, "b"), kwargs={"on_event": watch}
        )
        moving.start()
        assert seen.wait(PATIENCE_S)
        long.execute("commit")
        moving.join(PATIENCE_S)
    # An attempt may also meet a writer between the lock of its table and the barrier.
    assert any(
        f"process {pid} of postgres has been in a writing transaction" in wait.reason for wait in waits
    )
    assert nodes.catalog.node_of(shard).name == "b"
    assert_nothing_lost(nodes, shard, writers)
    with nodes.connected("b") as target:
        assert target.execute(f"select count(*) from {s}.notes where body = 'slow'").fetchone() == (1,)
    # An attempt keeps writers waiting for 0.1 s; this machine may be slow.
    assert max(max(written.pauses_s) for written in writers.written) < 2


def test_rows_that_were_copied_later_wait_for_those_that_they_refer_to(nodes: TwoNodes) -> None:
    """Photos are copied when the changes since the copy of users are far from being applied."""
    shard = nodes.new_shard()
    s = schema(shard)

    def hold_up(event: mover.Event) -> None:
        match event:
            case StepDone(step="publish"):
                target.execute(f"begin; lock table {s}.photos in share row exclusive mode")
            case StepDone(step="subscribe"):
                copied = """select count(*) from pg_subscription_rel
                            where srrelid = any (%s::regclass[]) and srsubstate = 'r'"""
                tables = [f"{s}.users", f"{s}.notes"]
                wait_for(lambda: watching.execute(copied, [tables]).fetchone() == (2,), "users are copied")
                watching.execute(f"""
                    create function public.slow() returns trigger language plpgsql as
                      $$ begin perform pg_sleep(0.2); return new; end $$;
                    create trigger slow before insert on {s}.notes for each row
                      execute function public.slow();
                    alter table {s}.notes enable always trigger slow""")
                for number in range(10):
                    source.execute(f"insert into {s}.notes values (%s)", [str(number)])
                source.execute(f"""
                    with made as (insert into {s}.users (name) values ('late') returning id)
                    insert into {s}.photos (user_id) select id from made""")
                target.execute("commit")
            case StepDone(step="indexes"):
                watching.execute("drop function public.slow cascade")

    with nodes.connected("a") as source, nodes.connected("b") as target, nodes.connected("b") as watching:
        mover.move(nodes.catalog, shard, "b", options=Options(verify=True), on_event=hold_up)
        late = f"select count(*) from {s}.photos join {s}.users u on u.id = user_id where u.name = 'late'"
        assert target.execute(late).fetchone() == (1,)


def test_a_difference_is_found(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    s = schema(shard)

    def tamper(event: mover.Event) -> None:
        if isinstance(event, StepDone) and event.step == "place":
            with nodes.connected("a") as source:
                source.execute(f"alter table {s}.seats disable trigger shardids_barrier")
                source.execute(f"update {s}.seats set taken = 'bob'")

    with pytest.raises(MoveFailed, match=rf"table {s}.seats differs: 1 row .* on node \"a\", 1 row"):
        mover.move(nodes.catalog, shard, "b", options=Options(verify=True), on_event=tamper)
    assert nodes.catalog.node_of(shard).name == "b"
    assert nodes.leftovers() == []


def test_a_shard_that_can_not_go_there(nodes: TwoNodes, moved_shard: int) -> None:
    with pytest.raises(ClusterConflict, match=rf'shard {moved_shard} is on node "b" already'):
        mover.move(nodes.catalog, moved_shard, "b")
    with pytest.raises(ClusterConflict, match='there is no node "z"'):
        mover.move(nodes.catalog, moved_shard, "z")
    with pytest.raises(MoveRefused, match=r'node "a" still has the copy that was left there.*\n.*--back'):
        mover.move(nodes.catalog, moved_shard, "a")


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        (
            "create table {s}.bare (x integer)",
            "table {s}.bare has no replica identity",
            "replica identity full",
        ),
        (
            "alter table {s}.notes replica identity nothing",
            "table {s}.notes has no replica identity",
            "replica identity full",
        ),
        ("alter table {s}.notes set unlogged", "table {s}.notes is unlogged", "set logged"),
        ("select shardids.fence({n})", 'it is fenced on node "a"', "shardids shard activate {n}"),
        (
            "begin; select shardids.fence({n}); rollback",
            'it is fenced on node "a"',
            "shardids shard activate {n}",
        ),
        (
            "create role only_a; grant select on {s}.users to only_a",
            'node "b" lacks roles that own or may use its objects: "only_a"',
            "Create them there first",
        ),
        (
            "create role of_column; grant select (name) on {s}.users to of_column;"
            " create role of_policy; create policy p on {s}.users to of_policy",
            'node "b" lacks roles that own or may use its objects: "of_column", "of_policy"',
            "Create them there first",
        ),
        (
            "create schema elsewhere; create table elsewhere.t (id bigint primary key);"
            " alter table {s}.notes add x bigint references elsewhere.t",
            'its schema can\'t be made there: node "b": schema "elsewhere" does not exist',
            "The objects that a shard uses outside of its schema must be on every node",
        ),
    ],
)
def test_what_speaks_against_a_move(nodes: TwoNodes, change: str, reason: str, remedy: str) -> None:
    shard = nodes.new_shard()

    def told(text: str) -> str:
        return text.replace("{s}", schema(shard)).replace("{n}", str(shard))

    with nodes.connected("a") as source:
        source.execute(told(change))
    before = [definitions(nodes, node, shard) for node in "ab"], len(mover.all_moves(nodes.catalog))
    with pytest.raises(MoveRefused) as refused:
        mover.move(nodes.catalog, shard, "b")
    assert told(reason) in refused.value.message
    assert told(remedy) in refused.value.hint
    assert ([definitions(nodes, node, shard) for node in "ab"], len(mover.all_moves(nodes.catalog))) == before
    assert nodes.leftovers() == []


def test_between_databases_of_one_server(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    url = nodes.servers["a"].url("other")
    with nodes.connected("a") as connection:
        connection.execute("create database other")
    provision.add_node(nodes.catalog, "c", url)
    content = rows(nodes, "a", shard)
    assert mover.move(nodes.catalog, shard, "c", options=Options(verify=True)).outcome == "moved"
    assert _rows_at(url, shard) == content
    with psycopg.connect(url) as connection:
        connection.execute(f"insert into {schema(shard)}.users (name) values ('there')")
    back = mover.move(nodes.catalog, shard, "a", back=True, options=Options(verify=True))
    assert back.rows_verified == sum(table[1] for table in content if table[2] is not None) + 1
    assert nodes.leftovers() == []
    assert [copy.node for copy in mover.purge(nodes.catalog, [shard])] == ["c"]


@pytest.mark.long
def test_commits_that_are_not_on_disk_are_not_lost(nodes: TwoNodes) -> None:
    """With synchronous_commit off, what was acknowledged last may not be in the log's flushed part."""
    shard = nodes.new_shard()
    for node in "ab":
        with nodes.connected(node) as connection:
            connection.execute("alter database postgres set synchronous_commit = off")
    try:
        with Writers(nodes, shard, 3) as writers:
            for to in "ba":
                mover.move(nodes.catalog, shard, to, back=to == "a", options=Options(verify=True))
        assert_nothing_lost(nodes, shard, writers)
    finally:
        for node in "ab":
            with nodes.connected(node) as connection:
                connection.execute("alter database postgres reset synchronous_commit")


def test_a_password_is_told_nobody(nodes: TwoNodes) -> None:
    """Neither the error nor the log of the target holds it when the source does not let the target in."""
    with nodes.connected("b") as target:
        conninfo = "host=127.0.0.1 port=1 user=postgres dbname=postgres password=sesame"
        target.execute("begin; set local log_min_error_statement = panic")
        with pytest.raises(psycopg.Error, match="could not connect") as refused:
            target.execute("select shardids.try_subscribing(%s)", [conninfo])
    assert "sesame" not in whole_story(refused.value)
    assert "could not connect" in nodes.servers["b"].log_file.read_text()
    assert "sesame" not in nodes.servers["b"].log_file.read_text()


def test_without_logical_wal_a_shard_moves_offline() -> None:
    with (
        temporary_server(settings={"wal_level": "replica"}) as server,
        closing(Catalog(server.url())) as catalog,
    ):
        provision.init(catalog, DEFAULT, 2)
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("create database other")
            provision.add_node(catalog, "a", server.url())
            provision.create_shards(catalog, [0, 1])
            provision.add_node(catalog, "b", server.url("other"))
            connection.execute("create unlogged table shard_0000.cache (x integer)")
            connection.execute("insert into shard_0000.cache values (7)")
        with pytest.raises(MoveRefused) as refused:
            mover.move(catalog, 0, "b")
        assert 'node "a" has wal_level = replica' in refused.value.message
        assert "table shard_0000.cache is unlogged" in refused.value.message
        assert "alter system set wal_level = logical, and restart that server" in refused.value.hint
        assert "--offline, which stops writes" in refused.value.hint
        assert mover.all_moves(catalog) == []
        assert mover.move(catalog, 0, "b", options=Options(offline=True)).outcome == "moved"
        with psycopg.connect(server.url("other")) as connection:
            assert connection.execute("select x from shard_0000.cache").fetchall() == [(7,)]
            connection.execute("insert into shard_0000.cache values (8)")
