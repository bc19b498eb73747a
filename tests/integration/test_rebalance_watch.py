"""A rebalance that runs on: its decisions, its limits, and what happens when it is stopped or killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from shardids import mover
from shardids.catalog import pins
from shardids.mover import watching as watching_module
from shardids.mover.journal import alone
from shardids.pg.embedded import find_binaries, temporary_servers
from tests.support.clusters import command_here
from tests.support.lengths import long
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for
from tests.support.watches import QUICK, Watched, watching

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.notes (id bigint primary key, body text);
    insert into {s}.users (name) select repeat('x', 100) from generate_series(1, 2000)"""
SHARDS = range(4)


@pytest.fixture(scope="module")
def still() -> Iterator[TwoNodes]:
    """The same, for tests that change nothing."""
    yield from uneven_nodes()


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Four shards of a size on node a; four empty ones on node b."""
    yield from uneven_nodes()


def uneven_nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 2 * len(SHARDS))
        assert [nodes.new_shard(TABLES) for _ in SHARDS] == list(SHARDS)
        yield nodes
        nodes.catalog.close()


def terms(**how: object) -> mover.Terms:
    """Quick ones, of sizes."""
    values = {"by": mover.By.SIZE, "over_s": 0.1, "max_latency_s": 5.0} | how
    return mover.Terms(**values)  # type: ignore[arg-type]  # of the caller


def on_a(nodes: TwoNodes) -> list[int]:
    return [shard for shard in SHARDS if nodes.catalog.node_of(shard).name == "a"]


def window_at(now: datetime, begins_in: timedelta, lasts: timedelta) -> mover.Window:
    begin = now + begins_in
    return mover.Window.parse(f"{begin:%H:%M}-{begin + lasts:%H:%M}")


def test_uneven_nodes_are_evened_out_and_then_left_alone(nodes: TwoNodes) -> None:
    with Watched(nodes.catalog_url, terms()) as watched:
        watched.wait_for("even")
        seen = len(watched.decisions)
        with nodes.connected("b") as connection:
            # Now b has most. Its new shards rest, and the empty ones weigh little.
            for shard in [shard for shard in SHARDS if shard not in on_a(nodes)]:
                connection.execute(
                    f"insert into {schema(shard)}.users (name) select repeat('x', 900)"
                    " from generate_series(1, 5000)".encode()
                )
        time.sleep(1.5)
        assert watched.says("moving") == [
            one.says for one in watched.decisions[:seen] if one.what == "moving"
        ]
    assert len(on_a(nodes)) == 2
    assert [one.what for one in watched.decisions[:seen]] == [
        *("started", "uneven", "moving", "moved", "moving", "moved", "even")
    ]
    assert watched.says("stopped") == ["no move is open"]
    moves = mover.all_moves(nodes.catalog)
    assert [(one.automatic, one.outcome) for one in moves] == [(True, "moved")] * 2
    assert all((one.size_bytes or 0) > 100_000 for one in moves)
    for shard in SHARDS:
        assert_one_owner(nodes, shard)


def test_pinned_and_excluded_shards_stay(nodes: TwoNodes) -> None:
    for shard in SHARDS[1:]:
        pins.pin_shard(nodes.catalog, shard)
    with Watched(nodes.catalog_url, terms()) as watched:
        watched.wait_for("even")
    assert on_a(nodes) == [1, 2, 3]
    assert [one.shard for one in watched.decisions if one.what == "moved"] == [0]


@pytest.mark.long
def test_a_move_waits_for_followers_and_for_the_window(nodes: TwoNodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute("select pg_create_logical_replication_slot('nobody', 'pgoutput')")
        with Watched(nodes.catalog_url, terms(max_lag_s=0.3)) as watched:
            assert watched.wait_for("waiting") == 'slot "nobody" of node "a": more than 0.3 s behind'
            assert on_a(nodes) == list(SHARDS)
            connection.execute("select pg_drop_replication_slot('nobody')")
            watched.wait_for("moved")
    nodes.catalog.engine.dispose()


@pytest.mark.long
def test_a_standby_that_does_not_replay_keeps_moves_waiting(nodes: TwoNodes) -> None:
    with standby_of(nodes.servers["b"]) as standby, psycopg.connect(standby.url(), autocommit=True) as there:
        there.execute("select pg_wal_replay_pause()")
        with nodes.connected("b") as connection:
            connection.execute(f"create table {schema(5)}.more (id bigint primary key)".encode())
        with Watched(nodes.catalog_url, terms(max_lag_s=0.5)) as watched:
            assert 'of node "b": more than 0.5 s behind' in watched.wait_for("waiting", "standby")
            assert on_a(nodes) == list(SHARDS)
            there.execute("select pg_wal_replay_resume()")
            watched.wait_for("moved")


@pytest.mark.long
def test_a_receiver_that_only_writes_the_log_keeps_no_move_waiting(nodes: TwoNodes, tmp_path: Path) -> None:
    receiver = [find_binaries() / "pg_receivewal", "-D", tmp_path, "-d", nodes.servers["b"].url(), "-s", "1"]
    with subprocess.Popen(list(map(str, receiver))) as running:
        try:
            with nodes.connected("b") as connection:
                wait_for(
                    lambda: (
                        connection.execute(
                            "select write_lsn is not null and replay_lsn is null from pg_stat_replication"
                        ).fetchone()
                        == (True,)
                    ),
                    "the receiver",
                )
            with Watched(nodes.catalog_url, terms(max_lag_s=10)) as watched:
                watched.wait_for("moved")
        finally:
            running.terminate()


def test_a_plan_is_held_against_moves_of_others_before_each_of_its_moves(nodes: TwoNodes) -> None:
    first, second = mover.plan_balance(nodes.catalog, mover.By.SIZE).transfers
    with nodes.connected("a") as connection:
        connection.execute("select pg_create_logical_replication_slot('nobody', 'pgoutput')")
        with Watched(nodes.catalog_url, terms(max_lag_s=0.3)) as watched:
            watched.wait_for("waiting", 'slot "nobody"')
            mover.move(nodes.catalog, first.shard, "b")
            mover.move(nodes.catalog, first.shard, "a", back=True)
            with mover.moves.Journal.opened(nodes.catalog, 7) as journal:
                journal.enter("a", offline=False)
                connection.execute("select pg_drop_replication_slot('nobody')")
                watched.wait_for("waiting", "for the move of shard 7 by another command")
                assert watched.says("moving") == []
                journal.end("aborted")
            watched.wait_for("left", f"shard {first.shard}: another command has moved it")
            watched.wait_for("moving", f"shard {second.shard}")
            watched.wait_for("moved")
    assert first.shard in on_a(nodes)


def test_a_slow_node_keeps_moves_waiting(still: TwoNodes) -> None:
    with Watched(still.catalog_url, terms(max_latency_s=1e-9)) as watched:
        assert "ms for a statement" in watched.wait_for("waiting")
        time.sleep(0.5)
    assert on_a(still) == list(SHARDS)
    assert len(watched.says("waiting")) == 1


def test_a_move_begins_in_the_window_and_only_if_it_is_likely_to_end_there(still: TwoNodes) -> None:
    now = datetime.now(UTC)
    closed = window_at(now, timedelta(hours=2), timedelta(hours=1))
    with Watched(still.catalog_url, terms(window=closed)) as watched:
        watched.wait_for("waiting", f"for the window {closed}")
    short = mover.Terms(window=window_at(now, timedelta(hours=-1), timedelta(hours=2)), by=mover.By.SIZE)
    watch = mover.Watch(still.catalog, short, watched.decisions.append)
    assert short.window is not None
    transfer = mover.Transfer(shard=0, source="a", target="b", weight=1)
    assert watch.not_now(transfer, now) is None
    close = now + timedelta(seconds=(short.window.left_s(now) or 0) - 5)
    assert "shard 0 would take about 15 s, and 5 s are left" in str(watch.not_now(transfer, close))
    assert on_a(still) == list(SHARDS)


def test_a_shard_that_can_t_be_moved_is_said_once_and_the_others_go(nodes: TwoNodes) -> None:
    with nodes.connected("a") as connection:
        connection.execute(f"create table {schema(0)}.loose (body text)".encode())
        connection.execute(f"create table {schema(1)}.loose (body text)".encode())
    with Watched(nodes.catalog_url, terms()) as watched:
        watched.wait_for("even")
        time.sleep(1)
    assert sorted(on_a(nodes)) == [0, 1]
    failed = watched.says("failed")
    assert len(failed) == len({*failed}) <= 2


@pytest.mark.long
def test_the_catalog_s_outage_is_waited_for_with_a_bound(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching_module, "_RETRY_S", 0.2)
    far = window_at(datetime.now(UTC), timedelta(hours=2), timedelta(hours=1))
    with Watched(nodes.catalog_url, terms(window=far)) as watched:
        watched.wait_for("waiting", "for the window")
        nodes.servers["a"].stop("immediate")
        watched.wait_for("waiting", "for the catalog")
        nodes.servers["a"].restart()
        watched.wait_for("started", "the catalog answers again")
        monkeypatch.setattr(watching_module, "OUTAGE_S", 0.5)
        nodes.servers["a"].stop("immediate")
        wait_for(lambda: watched.error, "that it gives up")
        nodes.servers["a"].restart()


@pytest.mark.long
def test_a_node_that_is_down_is_waited_for(nodes: TwoNodes) -> None:
    nodes.servers["b"].stop("immediate")
    with Watched(nodes.catalog_url, terms()) as watched:
        assert 'node "b"' in watched.wait_for("waiting")
        nodes.servers["b"].restart()
        watched.wait_for("moved")


def test_a_dry_run_prints_the_decisions_of_one_reading(still: TwoNodes) -> None:
    ran = command_here("rebalance", "--watch", "--dry-run", *QUICK, SHARDIDS_CATALOG=still.catalog_url)
    assert ran.returncode == 0
    kinds = [line.split()[1] for line in ran.stdout.splitlines()]
    assert kinds == ["uneven:", "moving:", "moving:"]
    ran = command_here(
        *("rebalance", "--watch", "--dry-run", "--json", "--over", "1s"), SHARDIDS_CATALOG=still.catalog_url
    )
    assert [json.loads(line)["what"] for line in ran.stdout.splitlines()] == ["even"]
    assert mover.all_moves(still.catalog) == []


def test_options_that_a_watch_does_not_take(still: TwoNodes) -> None:
    for words in (
        ("--watch", "--by", "writes"),
        ("--watch", "--drain", "a"),
        ("--watch", "--resume"),
        ("--watch", "--window", "22-6"),
        ("--watch", "--timezone", "Europe/Berlin"),
        ("--watch", "--window", "22:00-06:00", "--timezone", "Nowhere"),
        ("--watch", "--max-lag", "long"),
        ("--rest", "1h"),
        ("--over", "1s"),
    ):
        assert command_here("rebalance", *words, SHARDIDS_CATALOG=still.catalog_url).returncode == 2, words


def test_load_is_measured_between_two_readings(nodes: TwoNodes) -> None:
    with nodes.connected("a") as connection:
        for shard in SHARDS:
            connection.execute(f"select count(*) from {schema(shard)}.users".encode())
    ran = command_here("rebalance", "--by", "load", "--over", "1s", SHARDIDS_CATALOG=nodes.catalog_url)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGINT)])
def test_a_signal_ends_it_with_0(still: TwoNodes, number: int) -> None:
    far = window_at(datetime.now(UTC), timedelta(hours=2), timedelta(hours=1))
    window = f"{far.start:%H:%M}-{far.end:%H:%M}"
    with watching(still.catalog_url, *QUICK, "--window", window) as running:
        running.wait_for("waiting")
        with watching(still.catalog_url, *QUICK) as second:
            assert second.ended() == 1
            assert "another rebalance is under way: shardids rebalance --watch by" in second.said
        assert running.ended(number) == 0
        assert running.decisions[-1]["says"] == "no move is open"


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGKILL)])
def test_a_move_that_was_interrupted_is_resumed_by_the_next_run(nodes: TwoNodes, number: int) -> None:
    with nodes.connected("a") as other:
        # A transaction that writes keeps the move from its cutover.
        other.execute("begin")
        for shard in SHARDS:
            other.execute(f"insert into {schema(shard)}.users (name) values ('ann')".encode())
        with watching(nodes.catalog_url, *QUICK, "--max-latency", "5s") as running:
            moving = running.wait_for("moving")
            wait_for(lambda: mover.open_moves(nodes.catalog), "the open move")
            code = running.ended(number)
            assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
            if number == signal.SIGTERM:
                assert running.decisions[-1]["what"] == "stopped"
                assert "the next run resumes it" in running.decisions[-1]["says"]
        other.execute("commit")
    (move,) = mover.open_moves(nodes.catalog)
    assert (move.automatic, move.shard) == (True, moving["shard"])
    with watching(nodes.catalog_url, *QUICK, "--max-latency", "5s") as running:
        assert running.wait_for("resuming")["shard"] == move.shard
        assert running.wait_for("even")
        assert running.ended(signal.SIGTERM) == 0
    assert len(on_a(nodes)) == 2
    for shard in SHARDS:
        assert_one_owner(nodes, shard)
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            found = connection.execute(f"select count(*) from {schema(shard)}.users".encode()).fetchone()
        assert found == (2001,)


@pytest.mark.long
def test_a_person_s_interrupted_move_is_left_to_them(nodes: TwoNodes) -> None:
    with mover.moves.Journal.opened(nodes.catalog, 0) as journal:
        journal.enter("b", offline=False)
    with Watched(nodes.catalog_url, terms()) as watched:
        watched.wait_for("moved")
        watched.wait_for("even")
    assert [one.shard for one in mover.open_moves(nodes.catalog)] == [0]
    assert 0 not in [one.shard for one in watched.decisions if one.what == "moved"]
    mover.abort(nodes.catalog, 0)


def test_a_shard_that_another_command_changes_is_left_for_later(nodes: TwoNodes) -> None:
    for shard in SHARDS[1:]:
        pins.pin_shard(nodes.catalog, shard)
    with alone(nodes.catalog, 0, "fence"), Watched(nodes.catalog_url, terms()) as watched:
        assert "shard 0 is being changed by another command" in watched.wait_for("failed")
        watched.wait_for("even")
    assert on_a(nodes) == list(SHARDS)


@pytest.mark.long
def test_one_that_sleeps_and_wakes_takes_the_lock_again(nodes: TwoNodes) -> None:
    far = window_at(datetime.now(UTC), timedelta(hours=2), timedelta(hours=1))
    with watching(nodes.catalog_url, *QUICK, "--window", f"{far.start:%H:%M}-{far.end:%H:%M}") as running:
        running.wait_for("waiting")
        running.process.send_signal(signal.SIGSTOP)

        def is_free() -> bool:
            return command_here("rebalance", SHARDIDS_CATALOG=nodes.catalog_url).returncode == 0

        wait_for(is_free, "that the catalog has ended its session", 90)
        running.process.send_signal(signal.SIGCONT)
        wait_for(
            lambda: [one["what"] for one in running.decisions].count("started") == 2, "that it begins again"
        )
        assert running.ended(signal.SIGTERM) == 0
