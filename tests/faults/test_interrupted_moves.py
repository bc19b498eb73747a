"""Movers that are killed at some step: resumed or aborted, a move ends in one clean state."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from shardids import mover
from shardids.errors import ClusterConflict, MoveFailed
from shardids.pg.embedded import temporary_servers
from shardids.replication import sides, subscriptions
from tests.support.clusters import Nursery
from tests.support.interrupts import interrupt_after
from tests.support.killed_moves import finish, killed_move
from tests.support.moves import TwoNodes, Writers, assert_nothing_lost, assert_one_owner, schema, two_nodes
from tests.support.waiting import wait_for


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


def test_killed_and_resumed_or_aborted(nodes: TwoNodes, nursery: Nursery) -> None:
    """One shard, each move beginning with what the one before has left; tests/faults has all steps."""
    shard = nodes.new_shard()
    with Writers(nodes, shard, 2, every_s=0.005) as writers:
        for step, how, owner in (
            ("copy", mover.abort, "a"),
            ("cutover", mover.resume, "b"),
            ("activate", mover.abort, "b"),
        ):
            assert killed_move(nodes, nursery, shard, step, kind="StepDone")
            finish(nodes, shard, how)
            assert nodes.catalog.node_of(shard).name == owner
            assert_one_owner(nodes, shard)
    assert_nothing_lost(nodes, shard, writers)


def test_after_the_switch_a_move_only_goes_forward(nodes: TwoNodes, nursery: Nursery) -> None:
    shard = nodes.new_shard()
    assert killed_move(nodes, nursery, shard, "place", kind="StepDone")
    with pytest.raises(
        ClusterConflict, match=f'a move of shard {shard} from .* was interrupted at step "clean"'
    ):
        finish(nodes, shard, lambda catalog, number: mover.move(catalog, number, "a"))
    assert finish(nodes, shard, mover.abort).outcome == "moved"
    assert nodes.catalog.node_of(shard).name == "b"
    assert_one_owner(nodes, shard)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_interrupt_between_the_switch_and_its_answer(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    shard = nodes.new_shard()
    with monkeypatch.context() as patch:
        interrupt_after(
            patch,
            "select from shardids_catalog.move where step = 'clean' and ended_at is null",
            is_lost=is_lost,
        )
        with pytest.raises(KeyboardInterrupt):
            mover.move(nodes.catalog, shard, "b")
    assert nodes.catalog.node_of(shard).name == "b"
    with nodes.connected("a") as connection:
        state = connection.execute("select state from shardids.shard where id = %s", [shard])
        assert state.fetchone() == ("moved",)
    assert finish(nodes, shard, mover.abort).outcome == "moved"
    assert_one_owner(nodes, shard)


def test_a_target_that_ends_the_idle_activation_is_activated_again(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog answers late: somebody else holds the shard's row of the placement."""
    monkeypatch.setitem(sides.SESSION, "idle_in_transaction_session_timeout", "2s")
    shard, timers = nodes.new_shard(), []

    def hold(event: mover.Event) -> None:
        if isinstance(event, mover.StepBegun) and event.step == "place":
            holder = psycopg.connect(nodes.catalog_url)
            holder.execute("select from shardids_catalog.placement where shard = %s for update", [shard])
            timers.append(threading.Timer(4, holder.close))
            timers[0].start()

    assert mover.move(nodes.catalog, shard, "b", on_event=hold).outcome == "moved"
    timers[0].join()
    assert_one_owner(nodes, shard)


def test_an_offline_move_that_was_killed(nodes: TwoNodes, nursery: Nursery) -> None:
    shard = nodes.new_shard()
    with Writers(nodes, shard, 1, every_s=0.01) as writers:
        for step, how, owner in (("copy", mover.abort, "a"), ("stop", mover.resume, "b")):
            assert killed_move(nodes, nursery, shard, step, kind="StepDone", offline=True)
            finish(nodes, shard, how)
            assert nodes.catalog.node_of(shard).name == owner
            assert_one_owner(nodes, shard)
    assert_nothing_lost(nodes, shard, writers)


def test_an_abort_that_was_killed_is_an_abort_still(nodes: TwoNodes, nursery: Nursery) -> None:
    shard = nodes.new_shard()
    killed_move(nodes, nursery, shard, "activate", kind="StepDone")
    nursery.start(
        "import os, time\nfrom shardids import mover\nfrom shardids.catalog import Catalog\n"
        "def die(event):\n  print('dying', flush=True)\n  os.kill(os.getpid(), 9)\n"
        "time.sleep(0.3)\n"
        f"mover.abort(Catalog({nodes.catalog_url!r}), {shard}, on_event=die)"
    )
    assert nursery.line() == "dying"
    assert finish(nodes, shard, mover.resume).outcome == "aborted"
    assert_one_owner(nodes, shard)


def test_a_move_that_is_under_way_is_left_alone(nodes: TwoNodes) -> None:
    shard, seen = nodes.new_shard(), []

    def interfere(event: mover.Event) -> None:
        if isinstance(event, mover.StepBegun) and event.step == "copy":
            for attempt in (
                lambda: mover.move(nodes.catalog, shard, "b"),
                lambda: mover.resume(nodes.catalog, shard),
                lambda: mover.abort(nodes.catalog, shard),
            ):
                with pytest.raises(ClusterConflict, match=f"shard {shard} is being moved by another process"):
                    attempt()
                seen.append(event)

    mover.move(nodes.catalog, shard, "b", on_event=interfere)
    assert len(seen) == 3
    with pytest.raises(ClusterConflict, match=f"no move of shard {shard} is under way"):
        mover.resume(nodes.catalog, shard)


def test_a_table_that_is_changed_meanwhile_stops_the_move(nodes: TwoNodes) -> None:
    shard = nodes.new_shard()

    def change(event: mover.Event) -> None:
        if isinstance(event, mover.StepDone) and event.step == "indexes":
            with nodes.connected("a") as source:
                source.execute(f"create table shard_{shard:04}.late (id bigint primary key)")

    with pytest.raises(ClusterConflict, match='table "late" was changed while it was moved'):
        mover.move(nodes.catalog, shard, "b", on_event=change)
    assert mover.abort(nodes.catalog, shard).outcome == "aborted"
    assert_one_owner(nodes, shard)


def test_a_slot_that_the_source_gave_up_is_not_waited_for(nodes: TwoNodes) -> None:
    """It stays listed when the log that it needs was removed."""
    shard = nodes.new_shard()

    def give_up(event: mover.Event) -> None:
        if event == mover.StepDone(shard=shard, step="publish"):
            wait_for(lambda: lost_slot(source), "the slot is lost")

    with nodes.connected("a") as source:
        source.execute("alter system set max_slot_wal_keep_size = '1MB'")
        source.execute("select pg_reload_conf()")
        try:
            with pytest.raises(
                MoveFailed, match=r'node "a" was invalidated .*\n.* raise max_slot_wal_keep_size'
            ):
                mover.move(nodes.catalog, shard, "b", on_event=give_up)
        finally:
            source.execute("alter system reset max_slot_wal_keep_size")
            source.execute("select pg_reload_conf()")
    assert finish(nodes, shard, mover.abort).outcome == "aborted"
    assert_one_owner(nodes, shard)


def lost_slot(source: psycopg.Connection) -> bool:
    """Whether the one slot is lost, after more log was written and removed."""
    source.execute("select pg_logical_emit_message(false, '', ''), pg_switch_wal()")
    source.execute("checkpoint")
    return source.execute("select wal_status from pg_replication_slots").fetchall() == [("lost",)]


def test_rows_that_do_not_come_are_not_waited_for_without_end(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "PATIENCE_S", 2.0)
    shard = nodes.new_shard()

    def hold_up(event: mover.Event) -> None:
        if event == mover.StepDone(shard=shard, step="publish"):
            # Not held for ever, so that a move that would wait for it comes to its end.
            holder.execute("set idle_in_transaction_session_timeout = '20s'")
            holder.execute(f"begin; lock table {schema(shard)}.photos in share row exclusive mode")

    with nodes.connected("b") as holder:
        with pytest.raises(MoveFailed, match=r'node "b" has received no rows for 2 s, and \d tables are'):
            mover.move(nodes.catalog, shard, "b", on_event=hold_up)
        holder.execute("rollback")
    monkeypatch.undo()
    assert finish(nodes, shard, mover.resume).outcome == "moved"
    assert_one_owner(nodes, shard)


def test_a_resume_does_not_count_failures_from_before(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps counting from where it was; the reason for the failures was removed."""
    shard = nodes.new_shard()
    photos = f"{schema(shard)}.photos"

    def forbid(event: mover.Event) -> None:
        if event == mover.StepDone(shard=shard, step="tables"):
            target.execute(f"alter table {photos} add constraint forbidden check (size < 0)")

    with nodes.connected("b") as target:
        is_counted = target.info.server_version >= 150000
        # A server before version 15 does not count failures: then it is rows that are missing.
        monkeypatch.setattr(subscriptions, "PATIENCE_S", 300.0 if is_counted else 2.0)
        with pytest.raises(MoveFailed, match=r"failed \d+ times to apply rows|has received no rows for"):
            mover.move(nodes.catalog, shard, "b", on_event=forbid)
        monkeypatch.undo()
        target.execute(f"alter table {photos} drop constraint forbidden")
        assert finish(nodes, shard, mover.resume).outcome == "moved"
    assert_one_owner(nodes, shard)


def test_a_target_that_is_gone_is_not_needed_to_abort(nodes: TwoNodes, nursery: Nursery) -> None:
    shard = nodes.new_shard()
    assert killed_move(nodes, nursery, shard, "barrier")
    nodes.servers["b"].stop()
    try:
        done = finish(nodes, shard, mover.abort)
        assert (done.outcome, done.left_behind) == ("aborted", "b")
        with nodes.connected("a") as source:
            source.execute(f"insert into shard_{shard:04}.users (name) values ('home')")
            assert source.execute("select count(*) from pg_replication_slots").fetchone() == (0,)
            assert source.execute("select count(*) from pg_publication").fetchone() == (0,)
    finally:
        nodes.servers["b"].start(attached=True)
