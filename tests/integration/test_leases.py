"""One lease per shard: moves, migrations and purges wait for each other, or report whom they met."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest

from shardids import mover
from shardids.adopt.inplace.functions import replace_function
from shardids.catalog.leases import Lease, Leases, OnBusy, Standing, lock_key, read_leases
from shardids.catalog.nodes import Nodes
from shardids.errors import BadArgument, LeaseLost, ShardBusy
from shardids.mover.steps import DEFAULTS, Options
from shardids.pg.embedded import temporary_servers
from shardids.pg.locks import AdvisoryLock
from shardids.pg.urls import parse_url
from tests.support.clusters import Nursery, command_here
from tests.support.killed_moves import finish, killed_move
from tests.support.migrations import App
from tests.support.moves import TwoNodes, assert_one_owner, two_nodes
from tests.support.waiting import wait_for

SKIP = Options(on_busy=OnBusy.SKIP)
ADDED = 'op.execute("create table added (id bigint primary key)")'


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 64)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def app(
    nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> App:
    made = App(tmp_path / "migrations", parse_url(nodes.catalog_url), capsys)
    monkeypatch.setenv("SHARDIDS_CATALOG", nodes.catalog_url)
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(made.folder))
    made.add(
        "one", 'op.execute("create table added (id bigint primary key)")', 'op.execute("drop table added")'
    )
    return made


def leases(nodes: TwoNodes) -> list[Lease]:
    with Nodes(nodes.catalog.nodes(), nodes.catalog.url) as engines:
        return read_leases(nodes.catalog, engines)


def of(nodes: TwoNodes, shard: int) -> list[tuple[str, str, str]]:
    return [(one.node, one.purpose, one.standing.value) for one in leases(nodes) if one.shard == shard]


@contextmanager
def held(nodes: TwoNodes, shard: int, purpose: str, node: str = "a") -> Iterator[UUID]:
    """A command that lives has the shard's lease."""
    with psycopg.connect(nodes.catalog_url, autocommit=True) as holder, nodes.connected(node) as there:
        epoch = uuid4()
        holder.execute("select pg_advisory_lock(%s, %s)", [AdvisoryLock.LEASE_HOLDER, lock_key(epoch)])
        there.execute(
            "insert into shardids.lease (shard, epoch, purpose, holder)"
            " values (%s, %s, %s, 'ann@desk, process 7')",
            [shard, epoch, purpose],
        )
        yield epoch
        there.execute("delete from shardids.lease where epoch = %s", [epoch])


@contextmanager
def stopped_at(nodes: TwoNodes, shard: int, step: str) -> Iterator[Callable[[], None]]:
    """A move that waits at a step; yields what lets it go on and waits for its end."""
    reached, go_on, ended = threading.Event(), threading.Event(), list[object]()

    def watch(event: mover.Event) -> None:
        if event == mover.StepBegun(shard=shard, step=step):
            reached.set()
            assert go_on.wait(60)

    def work() -> None:
        try:
            ended.append(mover.move(nodes.catalog, shard, "b", on_event=watch).outcome)
        except BaseException as error:
            ended.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> None:
        go_on.set()
        thread.join(60)
        assert ended == ["moved"]

    try:
        assert reached.wait(60)
        yield end
    finally:
        go_on.set()
        thread.join(60)


def test_a_move_has_the_lease_on_both_nodes_and_returns_it(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    with stopped_at(nodes, shard, "indexes") as end:
        assert of(nodes, shard) == [("a", "move", "running"), ("b", "move", "running")]
        end()
    assert of(nodes, shard) == []


def test_a_migration_waits_for_a_move_and_follows_the_shard(nodes: TwoNodes, app: App) -> None:
    shard, still = nodes.new_shard(), nodes.new_shard()
    with stopped_at(nodes, shard, "indexes") as end:
        run = app.start("up", "--shards", f"{shard},{still}", "--json")
        wait_for(lambda: app.revisions()[still] == ("one",), "the shard that nobody moves is migrated")
        assert app.revisions()[shard] is None
        assert run.poll() is None
        end()
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, (out, err)
    assert f"shard {shard}: waits for a move by " in err
    assert nodes.catalog.node_of(shard).name == "b"
    assert app.revisions()[shard] == ("one",)
    assert_one_owner(nodes, shard)


def test_a_migration_skips_a_shard_and_reports_who_has_it(nodes: TwoNodes, app: App) -> None:
    shard, still = nodes.new_shard(), nodes.new_shard()
    with held(nodes, shard, "move"):
        ran = app("up", "--shards", f"{shard},{still}", "--on-busy", "skip", "--json")
        rows = {row["shard"]: row for row in ran.json["shards"]}
        assert (ran.code, rows[still]["status"], rows[shard]["status"]) == (1, "done", "not started")
        assert rows[shard]["error"].startswith(
            f'shard {shard} is being changed by another command [node "a"]: move by ann@desk, process 7 '
        )
        assert "--on-busy skip" in ran.json["retry"]
        status = app("status", "--json", "--shards", str(shard)).json["leases"]
        assert [(row["shard"], row["what"], row["state"]) for row in status] == [(shard, "move", "running")]
        (listed,) = [row for row in app.command("shard", "list", "--json").json if row["shard"] == shard]
        assert listed["lease"].startswith("move by ann@desk, process 7 since ")
        assert listed["lease"].endswith("(running)")


@pytest.mark.parametrize(
    "work",
    [
        lambda nodes, shard: mover.move(nodes.catalog, shard, "b", options=SKIP),
        lambda nodes, shard: mover.plan_move(nodes.catalog, shard, "b", options=SKIP),
    ],
    ids=["move", "plan"],
)
def test_a_move_that_is_not_to_wait_is_refused_by_name(
    nodes: TwoNodes, work: Callable[[TwoNodes, int], object]
) -> None:
    shard = nodes.new_shard()
    with (
        held(nodes, shard, "migration"),
        pytest.raises(ShardBusy, match=f"shard {shard} is being changed .*: migration by ann@desk"),
    ):
        work(nodes, shard)
    assert mover.open_moves(nodes.catalog, [shard]) == []
    assert of(nodes, shard) == []


def test_of_several_moves_those_that_meet_a_lease_are_left_out(nodes: TwoNodes, app: App) -> None:
    shard, still = nodes.new_shard(), nodes.new_shard()
    with held(nodes, shard, "migration"):
        ran = app.command("shard", "move", f"{shard},{still}", "--to", "b", "--on-busy", "skip", "--json")
    assert (ran.code, [row["shard"] for row in ran.json]) == (1, [still])
    assert f"shard {shard} is being changed by another command" in ran.err
    assert nodes.catalog.node_of(shard).name == "a"


def test_a_move_waits_for_a_migration(nodes: TwoNodes) -> None:
    shard, waited = nodes.new_shard(), threading.Event()
    events = list[mover.Event]()

    def watch(event: mover.Event) -> None:
        events.append(event)
        waited.set()

    with held(nodes, shard, "migration"):
        thread = threading.Thread(
            target=lambda: mover.move(nodes.catalog, shard, "b", options=DEFAULTS, on_event=watch)
        )
        thread.start()
        assert waited.wait(30)
        time.sleep(1)
        assert nodes.catalog.node_of(shard).name == "a"
        assert mover.open_moves(nodes.catalog, [shard]) == []
    thread.join(60)
    assert isinstance(events[0], mover.Waiting)
    assert "migration by ann@desk, process 7" in events[0].reason
    assert nodes.catalog.node_of(shard).name == "b"


def test_a_purge_meets_a_lease(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()
    mover.move(nodes.catalog, shard, "b")
    for node in "ab":
        with held(nodes, shard, "migration", node):
            for dry_run in (True, False):
                met = list[ShardBusy]()
                assert not mover.purge(
                    nodes.catalog, [shard], on_busy=OnBusy.SKIP, on_skip=met.append, dry_run=dry_run
                )
                assert "migration by ann@desk" in met[0].message
    assert [copy.node for copy in mover.purge(nodes.catalog, [shard])] == ["a"]


def test_a_function_that_is_replaced_meets_a_lease(nodes: TwoNodes) -> None:
    """It activates the shard that issues its IDs."""
    shard = nodes.new_shard()
    with held(nodes, shard, "move"):
        for dry_run in (True, False):
            with pytest.raises(ShardBusy, match="move by ann@desk"):
                replace_function(nodes.catalog, "pg_catalog.now", shard, dry_run=dry_run)
    with pytest.raises(BadArgument, match="there is no function"):
        replace_function(nodes.catalog, "public.nonesuch", shard)
    assert of(nodes, shard) == []


def test_a_first_load_waits_for_a_move(nodes: TwoNodes, tmp_path: Path) -> None:
    """Its table in the shard would be one that the move has not copied."""
    photo = "create table if not exists {s}.photo (id bigint primary key default {s}.next_id(), name text)"
    with nodes.connected(nodes.catalog.node_of(0).name) as first:
        first.execute(photo.replace("{s}", "shard_0000").encode())
    shard = nodes.new_shard(photo)
    (tmp_path / "rows.csv").write_text("name\nann\n")
    words = ("load", "--table", "photo", "--shard", str(shard), str(tmp_path / "rows.csv"))
    with stopped_at(nodes, shard, "indexes") as end:
        refused = command_here(*words, SHARDIDS_CATALOG=nodes.catalog_url)
        assert refused.returncode == 1
        assert f"shard {shard} is being changed: move by" in refused.stderr
        end()
    done = command_here(*words, SHARDIDS_CATALOG=nodes.catalog_url)
    assert done.returncode == 0, done.stderr


def test_the_lease_of_a_command_that_is_gone_is_taken_over(nodes: TwoNodes, app: App) -> None:
    shard = nodes.new_shard()
    with held(nodes, shard, "migration") as epoch, nodes.connected("a") as there:
        with psycopg.connect(nodes.catalog_url, autocommit=True) as catalog:
            catalog.execute(
                "select pg_terminate_backend(pid) from pg_locks where classid = %s and locktype = 'advisory'",
                [AdvisoryLock.LEASE_HOLDER],
            )
        wait_for(lambda: of(nodes, shard) == [("a", "migration", "gone")], "its holder is gone")
        app.up("--shards", str(shard))
        assert of(nodes, shard) == []
        with pytest.raises(psycopg.Error, match="this command no longer holds the shard's lease"):
            there.execute("select shardids.require_lease(%s, %s)", [shard, epoch])


def test_a_session_that_still_works_for_it_keeps_it(nodes: TwoNodes) -> None:
    shard, before = nodes.new_shard(), Leases(nodes.catalog, "migration")
    with Nodes(nodes.catalog.nodes(), nodes.catalog.url, connections=2) as engines:
        assert before.take(engines["a"], "a", [shard]) == {}
        after = Leases(nodes.catalog, "purge")
        with nodes.connected("a") as works, works.transaction():
            works.execute("select shardids.require_lease(%s, %s)", [shard, before.epoch])
            (met,) = after.take(engines["a"], "a", [shard]).values()
            assert (met.standing, met.pid) == (Standing.GONE, works.info.backend_pid)
            assert f"process {met.pid} on node" in met.error().message
        assert after.take(engines["a"], "a", [shard]) == {}
        after.give_back(engines["a"], [shard])


def test_an_interrupted_move_keeps_its_lease_until_it_is_resumed(
    nodes: TwoNodes, nursery: Nursery, app: App
) -> None:
    shard = nodes.new_shard()
    assert killed_move(nodes, nursery, shard, "indexes", kind="StepDone")
    wait_for(lambda: ("a", "move", "interrupted") in of(nodes, shard), "the mover is gone")
    ran = app("up", "--shards", str(shard), "--json")
    (row,) = ran.json["shards"]
    assert (ran.code, row["status"]) == (1, "not started")
    assert f'shard {shard} is kept by an interrupted move [node "a"]: move by ' in row["error"]
    assert row["error"].endswith(f"shardids shard move {shard} --resume, or --abort.")
    finish(nodes, shard, mover.resume)
    assert of(nodes, shard) == []
    app.up("--shards", str(shard))
    assert_one_owner(nodes, shard)


def test_an_open_move_whose_lease_was_lost_is_protected_still(
    nodes: TwoNodes, nursery: Nursery, app: App
) -> None:
    """As after the source was restored to a time before the move."""
    shard = nodes.new_shard()
    assert killed_move(nodes, nursery, shard, "copy", kind="StepDone")
    with nodes.connected("a") as connection:
        connection.execute("delete from shardids.lease where shard = %s", [shard])
    wait_for(lambda: of(nodes, shard) == [("b", "move", "interrupted")], "the mover is gone")
    assert app("up", "--shards", str(shard)).code == 1
    finish(nodes, shard, mover.abort)
    app.up("--shards", str(shard))
    assert of(nodes, shard) == []


def test_a_mover_whose_lease_was_taken_over_changes_nothing_more(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()

    def take_over(event: mover.Event) -> None:
        if event == mover.StepBegun(shard=shard, step="barrier"):
            for node in "ab":
                with nodes.connected(node) as connection:
                    connection.execute(
                        "update shardids.lease set epoch = gen_random_uuid() where shard = %s", [shard]
                    )

    with pytest.raises(LeaseLost, match="was taken over: move by "):
        mover.move(nodes.catalog, shard, "b", on_event=take_over)
    with nodes.connected("a") as connection:
        barriers = connection.execute(
            "select count(*) from pg_trigger where tgname = 'shardids_barrier'"
            " and tgrelid = any (shardids.tables_of(%s))",
            [shard],
        ).fetchone()
    assert barriers == (0,)
    assert mover.abort(nodes.catalog, shard).outcome == "aborted"
    assert of(nodes, shard) == []


def test_the_leases_of_a_run_that_fails_are_returned(nodes: TwoNodes, app: App) -> None:
    shards = [nodes.new_shard() for _ in range(2)]
    app.add("two", 'op.execute("select 1 / 0")', after="one")
    assert app("up", "--shards", ",".join(map(str, shards))).code == 1
    assert [of(nodes, shard) for shard in shards] == [[], []]


def test_the_next_run_takes_the_leases_of_one_that_was_killed(nodes: TwoNodes, app: App) -> None:
    shards = [nodes.new_shard() for _ in range(3)]
    app.add("two", 'op.execute("select pg_sleep(0.5)")', after="one")
    chosen = ",".join(map(str, shards))
    run = app.start("up", "--shards", chosen)
    wait_for(lambda: len([one for one in leases(nodes) if one.shard in shards]) == 3, "it has its leases")
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=30)
    wait_for(
        lambda: {one[2] for shard in shards for one in of(nodes, shard)} == {"gone"}, "it counts as gone"
    )
    app.up("--shards", chosen)
    assert {app.revisions()[shard] for shard in shards} == {("two",)}
    assert [of(nodes, shard) for shard in shards] == [[], [], []]


def test_sql_for_psql_is_refused_while_a_command_has_the_lease(nodes: TwoNodes, app: App) -> None:
    shard = nodes.new_shard()
    script = app("up", "base:head", "--sql", "--shards", str(shard)).out
    words = script.replace("\\set ON_ERROR_STOP on\n", "").replace(" \\g /dev/null", ";")
    with held(nodes, shard, "move"), nodes.connected("a") as psql:
        with pytest.raises(psycopg.Error, match=f"shard {shard} is being changed: move by ann@desk"):
            psql.execute(words.encode())
        psql.execute("rollback")
    assert app.revisions()[shard] is None
