"""The generator on a real server: IDs are unique and in order, whatever happens to sessions and server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Layout
from shardids.errors import TooFarAhead
from shardids.migrate.install import trees
from shardids.pg.connections import open_engine
from shardids.pg.urls import parse_url
from tests.conftest import dsn
from tests.support.generator import (
    DEFAULT,
    Ids,
    advisory_locks,
    at_once,
    connect,
    distinct,
    draw,
    draw_block,
    increases,
    install,
    paused,
    refused,
    reserve,
    row,
    run_ahead,
    scalar,
    ticks,
)
from tests.support.waiting import PATIENCE_S, wait_for

Db = psycopg.Connection[Any]
MakeNode = Callable[..., str]

AFTER_SETVAL = r"\bsetval\([^;]*;"
AFTER_COUNTER_READ = r"\bc1 := [^;]*;"
STEP_MS = 16
AFTER_NEXTVAL = r"\bnextval\(counter\)\)\s+then case when"
at_the_clock_and_behind = pytest.mark.parametrize("function", ["shardids.current_id", "shardids.lagging_id"])
NEXT = "select shard_0005.next_id()"


@pytest.fixture
def make_node(blank_database: Callable[[], URL]) -> MakeNode:
    """Makes nodes with a layout and shards; gives their DSNs."""

    def make(layout: Layout = DEFAULT, shards: tuple[int, ...] = (5,)) -> str:
        url = blank_database()
        install(url, layout, shards)
        return dsn(url)

    return make


@pytest.fixture
def node(make_node: MakeNode) -> str:
    """The DSN of a database with the default layout and the active shards 5 and 6."""
    return make_node(shards=(5, 6))


def offset(connection: Db, shard: int = 5) -> int:
    return scalar(connection, f"select pg_sequence_last_value('shard_{shard:04}.id_offset')")


def counter(connection: Db) -> int:
    return scalar(connection, "select pg_sequence_last_value('shard_0005.id_counter')")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# Order and uniqueness


def test_ids_of_autocommit_statements_strictly_increase(db: Db) -> None:
    ids = np.array([scalar(db, NEXT) for _ in range(500)])
    assert increases(ids)
    assert {DEFAULT.decode(int(id_)).shard for id_ in ids} == {5}


def test_ids_of_one_statement_strictly_increase(db: Db) -> None:
    ids = draw(db, 100_000)
    assert len(ids) == 100_000
    assert increases(ids)


@pytest.mark.long
def test_a_million_ids_of_sixteen_sessions_are_distinct_and_in_order(node: str) -> None:
    ready = threading.Barrier(16)

    def session(_number: int) -> Ids:
        with connect(node) as connection:
            ready.wait(PATIENCE_S)
            return np.concatenate([draw(connection, 6_250) for _ in range(10)])

    drawn = at_once(16, session)
    assert sum(map(len, drawn)) == 1_000_000
    assert distinct(drawn)
    assert all(map(increases, drawn))


def test_draws_blocks_and_reservations_of_many_sessions_mix(node: str) -> None:
    ready = threading.Barrier(8)

    def session(number: int) -> Ids:
        chance = random.Random(number)
        parts: list[Ids] = []
        with connect(node) as connection:
            ready.wait(PATIENCE_S)
            for _ in range(60):
                size = chance.randrange(1, 3000)
                match chance.randrange(3):
                    case 0:
                        parts.append(ticks(draw(connection, size)))
                    case 1:
                        parts.append(ticks(draw_block(connection, size)))
                    case _:
                        first, last = reserve(connection, size)
                        assert last - first + 1 == size
                        parts.append(np.arange(first, last + 1))
        return np.concatenate(parts)

    drawn = at_once(8, session)
    assert distinct(drawn)
    assert all(map(increases, drawn))


@pytest.mark.parametrize("size", [1, 10, 5000])
@pytest.mark.parametrize("after", [AFTER_COUNTER_READ, AFTER_SETVAL], ids=["counter read", "setval"])
def test_a_reservation_shares_no_tick_with_draws_made_while_it_is_under_way(
    after: str, size: int, db: Db, node: str
) -> None:
    """Many draws, as of a busy server on which the reserving session loses its turn."""
    with connect(node) as reserving, connect(node) as drawing:
        drawing.execute(NEXT)
        run_ahead(drawing, 5_000)  # so that no draw has to wait for the reserving session's lock
        with paused(db, "shardids.advance", after, reserving, lambda db: reserve(db, size)) as go_on:
            drawn = ticks(draw(drawing, 30_000))
            first, last = go_on()
    assert last - first + 1 == size
    assert increases(drawn)
    assert not ((drawn >= first) & (drawn <= last)).any()


def prepare_draw(db: Db, function: str) -> None:
    """Brings the shard to where the next draw gets its ID from the function."""
    db.execute(NEXT)
    if function == "shardids.current_id":
        run_ahead(db, 5_000)
    else:
        time.sleep(0.1)


@at_the_clock_and_behind
def test_a_draw_that_is_overtaken_by_a_reservation_draws_again(function: str, db: Db, node: str) -> None:
    with connect(node) as slow, connect(node) as quick:
        prepare_draw(slow, function)
        with paused(db, function, AFTER_NEXTVAL, slow, draw) as go_on:
            _, last = reserve(quick, 100_000)
            later = draw(quick, 10)
            overtaken = go_on()[0]
    assert ticks(overtaken) > last
    assert overtaken not in later


@at_the_clock_and_behind
def test_a_draw_that_is_overtaken_by_a_fence_fails(function: str, db: Db, node: str) -> None:
    with connect(node) as slow, connect(node) as quick:
        prepare_draw(slow, function)
        with paused(db, function, AFTER_NEXTVAL, slow, draw) as go_on:
            quick.execute("select shardids.fence(5)")
            with refused("SI002"):
                go_on()


@at_the_clock_and_behind
def test_a_draw_that_is_overtaken_by_fence_and_activation_is_above_the_high_water_tick(
    function: str, db: Db, node: str
) -> None:
    with connect(node) as slow, connect(node) as quick:
        prepare_draw(slow, function)
        with paused(db, function, AFTER_NEXTVAL, slow, draw) as go_on:
            high_water = scalar(quick, "select shardids.fence(5)")
            quick.execute("select shardids.activate(5)")
            between = draw(quick, 10)
            overtaken = go_on()[0]
    assert ticks(overtaken) > high_water
    assert overtaken not in between


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 100_000])
def test_next_ids_gives_so_many_consecutive_ticks_in_order(size: int, db: Db) -> None:
    before = scalar(db, NEXT)
    block = draw_block(db, size)
    assert len(block) == size
    assert (np.diff(ticks(block)) == 1).all()
    assert before < block[0]
    assert block[-1] < scalar(db, NEXT)


@pytest.mark.parametrize("count", [0, -1, None, 4_194_305, -(2**31), 2**31 - 1])
def test_a_reservation_of_a_wrong_size_is_refused_and_changes_nothing(count: int | None, db: Db) -> None:
    db.execute(NEXT)
    before = (offset(db), counter(db))
    with refused("SI007", "shard 5", 'node "a"'):
        reserve(db, count)
    with refused("SI007", "shard 5", 'node "a"'):
        db.execute("select * from shard_0005.next_ids(%s)", [count])
    assert (offset(db), counter(db)) == before


def test_the_bound_of_a_reservation_is_a_setting_of_the_node(db: Db) -> None:
    db.execute("update shardids.node set max_reserve = 100")
    assert len(draw_block(db, 100)) == 100
    with refused("SI007"):
        draw_block(db, 101)


def test_small_reservations_keep_pace_with_the_clock(db: Db) -> None:
    """A reservation of a few IDs takes two ms of the shard's time at most; else a busy shard runs away."""
    scalar(db, NEXT)
    started_at = now_ms()
    first, _ = reserve(db, 10)
    blocks = draw(db, 500, "(shardids.reserve(5, 10 + 0 * generate_series)).last_tick")
    elapsed_ms = now_ms() - started_at
    assert len(blocks) == 500
    assert (int(blocks[-1]) - first) >> DEFAULT.sequence_bits <= 500 * 2 + elapsed_ms


# How it is called


def test_a_column_default_is_inlined_to_the_engine_with_constants(db: Db) -> None:
    db.execute("create table item (id bigint default shard_0005.next_id() primary key, name text)")
    plan = db.execute("explain (verbose, costs off) insert into item (name) values ('x')").fetchall()
    text = "\n".join(line for (line,) in plan)
    assert (
        "shardids.current_id(pg_sequence_last_value('shard_0005.id_offset'::regclass), "
        "'shard_0005.id_counter'::regclass, 'shard_0005.id_offset'::regclass, 5" in text
    )
    assert "shard_0005.next_id()" not in text


def test_a_subquery_is_evaluated_once(db: Db) -> None:
    first, second = row(db, "select x, x from (select shard_0005.next_id() as x) s")
    assert first == second
    first, second = row(db, "with s as (select shard_0005.next_id() as x) select a.x, b.x from s a, s b")
    assert first == second


def test_two_calls_in_one_row_give_two_ids(db: Db) -> None:
    first, second = row(db, "select shard_0005.next_id(), shard_0005.next_id()")
    assert first < second


@pytest.mark.parametrize(
    "statements",
    [
        "insert into item (n) select generate_series(1, 3000)",
        "insert into item (n) values (1); insert into item (n) select n + 1 from generate_series(1, 2999) n",
        "insert into item select shard_0005.next_id(), n from generate_series(1, 3000) n order by random()",
        "insert into item select generate_series(1, 3000), 1; update item set id = shard_0005.next_id()",
        """insert into item select generate_series(1, 3000), 1; alter table item drop id;
           alter table item add id bigint default shard_0005.next_id()""",
        "do $$ begin for n in 1..3000 loop insert into item (n) values (n); end loop; end $$",
        """prepare one as insert into item (n) values ($1);
           do $$ begin for n in 1..3000 loop execute format('execute one(%s)', n); end loop; end $$""",
        """insert into item select x, n from generate_series(1, 3000) n,
           lateral (select shard_0005.next_id() + 0 * n as x) s""",
    ],
    ids=["select", "values", "sort", "update", "add column", "plpgsql", "prepared", "lateral"],
)
def test_every_row_of_a_table_gets_an_id_of_its_own(statements: str, db: Db) -> None:
    db.execute("create table item (id bigint default shard_0005.next_id(), n int)")
    for statement in statements.split("; ") if "$$" not in statements else [statements]:
        db.execute(statement)
    assert row(db, "select count(*), count(distinct id), count(id) from item") == (3000, 3000, 3000)
    assert scalar(db, "select bool_and(shardids.shard_of(id) = 5) from item")


def test_copy_gives_the_rows_ids_in_the_order_of_the_file(db: Db) -> None:
    db.execute("create table item (id bigint default shard_0005.next_id(), n int)")
    with db.cursor().copy("copy item (n) from stdin") as copy:
        for n in range(3000):
            copy.write_row([n])
    assert scalar(db, "select count(distinct id) from item") == 3000
    assert scalar(
        db, "select bool_and(rising) from (select id > lag(id) over (order by n) rising from item)s"
    )


# Clock and settings


def test_an_idle_shard_comes_back_to_the_clock(db: Db) -> None:
    db.execute(NEXT)
    for _ in range(20):
        db.execute("select pg_sleep(0.005)")
        before, id_, after = row(db, "select clock_timestamp(), shard_0005.next_id(), clock_timestamp()")
        at = DEFAULT.decode(id_).ms
        assert scalar(db, "select shardids.ms_of(%s)", before) - 2 <= at
        assert at <= scalar(db, "select shardids.ms_of(%s)", after) + STEP_MS


def test_advance_never_lowers_an_offset(db: Db) -> None:
    scalar(db, NEXT)
    run_ahead(db, 10_000)
    before = offset(db)
    for _ in range(50):
        db.execute("select shardids.advance(5, 'shard_0005.id_offset')")
    assert offset(db) == before
    assert ticks(scalar(db, NEXT)) >> DEFAULT.sequence_bits > now_ms() - DEFAULT.epoch_ms + 5_000


def test_advance_refuses_the_sequence_of_another_shard(db: Db) -> None:
    db.execute("create sequence other; select setval('other', 7)")
    db.execute("select shard_0005.next_id(), shard_0006.next_id()")
    before = (offset(db), offset(db, 6))
    for name in ("shard_0006.id_offset", "shard_0005.id_counter", "other"):
        with refused("SI004", "shard 5"):
            db.execute("select shardids.advance(5, %s, 10)", [name])
    assert (offset(db), offset(db, 6), scalar(db, "select last_value from other")) == (*before, 7)


def test_advance_refuses_more_ticks_than_may_be_reserved(db: Db) -> None:
    scalar(db, NEXT)
    before = offset(db)
    with refused("SI007"):
        db.execute("select shardids.advance(5, 'shard_0005.id_offset', 4194305)")
    assert offset(db) == before


def test_draws_go_on_above_a_million_reserved_ids(db: Db) -> None:
    first, last = reserve(db, 1_000_000)
    ids = draw(db, 1000)
    assert last - first == 999_999
    assert ticks(ids[0]) > last
    assert increases(ids)


def test_draws_more_than_a_minute_ahead_of_the_clock_are_distinct_and_in_order(db: Db, node: str) -> None:
    last = run_ahead(db, 70_000)

    def session(_number: int) -> Ids:
        with connect(node) as connection:
            return np.concatenate([draw(connection, 250), draw_block(connection, 250), draw(connection, 250)])

    drawn = at_once(4, session)
    assert distinct(drawn)
    assert all(map(increases, drawn))
    assert min(ticks(ids[0]) for ids in drawn) > last


def test_draws_more_than_a_minute_ahead_of_the_clock_wait_for_no_lock(db: Db, node: str) -> None:
    last = run_ahead(db, 70_000)
    with connect(node) as holder:
        holder.execute("select pg_advisory_lock(1936220516, 5)")
        db.execute("set statement_timeout = '10s'")
        ids = draw(db, 1000)
    assert ticks(ids[0]) > last
    assert increases(ids)


def test_a_shard_too_far_ahead_of_the_clock_refuses_and_says_by_how_much(db: Db) -> None:
    db.execute("update shardids.node set max_ahead = '1 minute'")
    with refused("SI005", "shard 5", " ms ahead of the clock", "max_ahead = 00:01:00", 'node "a"'):
        run_ahead(db, 120_000)
    ahead_ms = scalar(db, "select shardids.offset_ms(%s)", offset(db)) - (now_ms() - DEFAULT.epoch_ms)
    assert ahead_ms < 60_000
    before = offset(db)
    with refused("SI005") as _:
        reserve(db, 4_194_304)
    assert offset(db) == before
    assert advisory_locks(db) == 0


def test_a_draw_too_far_ahead_of_the_clock_is_refused_until_the_setting_allows_it(db: Db) -> None:
    last = run_ahead(db, 90_000)
    db.execute("update shardids.node set max_ahead = '1 minute'")
    with refused("SI005", " ms ahead of the clock"):
        db.execute(NEXT)
    db.execute("update shardids.node set max_ahead = '1 hour'")
    assert ticks(scalar(db, NEXT)) > last


# Fences


def test_a_fence_stops_other_sessions_before_it_is_committed(db: Db, node: str) -> None:
    with connect(node) as reading, psycopg.connect(node) as fencing:
        reading.execute("begin isolation level repeatable read")
        draw(reading, 1000)
        reading.execute("savepoint s")
        fencing.execute("select shardids.fence(5)")
        with refused("SI002", "shard 5", 'node "a"'):
            reading.execute(NEXT)
        reading.execute("rollback to s")
        with refused("SI002"):
            reserve(reading, 10)
        with refused("SI002"):
            db.execute(NEXT)
        assert scalar(db, "select shardids.shard_of(shard_0006.next_id())") == 6


def test_a_fence_stops_a_statement_that_is_under_way(db: Db, node: str) -> None:
    with connect(node) as drawing, ThreadPoolExecutor(1) as pool:
        drawing.execute(NEXT)
        drawing.execute("set statement_timeout = '20s'")
        before = counter(db)
        endless = (
            "select count(shard_0005.next_id()) from generate_series(1, 9999) a, generate_series(1, 9999) b"
        )
        running = pool.submit(drawing.execute, endless)
        wait_for(lambda: counter(db) > before + 1000, "the statement draws")
        db.execute("select shardids.fence(5)")
        with refused("SI002"):
            running.result(PATIENCE_S)


def test_a_fence_that_is_rolled_back_stays_until_activation(db: Db, node: str) -> None:
    with psycopg.connect(node) as fencing:
        last = scalar(fencing, NEXT)
        fencing.execute("select shardids.fence(5)")
        fencing.rollback()
    assert scalar(db, "select state from shardids.shard where id = 5") == "active"
    for _ in range(2):
        with refused("SI002"):
            db.execute(NEXT)
    db.execute("select shardids.activate(5)")
    assert scalar(db, NEXT) > last


def test_an_activation_that_is_rolled_back_has_released_nothing(db: Db, node: str) -> None:
    db.execute("select shardids.fence(5)")
    with psycopg.connect(node) as activating:
        activating.execute("select shardids.activate(5)")
        with refused("SI002"):
            db.execute(NEXT)
        activating.rollback()
    with refused("SI002"):
        db.execute(NEXT)


def test_an_activation_releases_no_later_fence(db: Db, node: str) -> None:
    db.execute("select shardids.fence(5); ")
    db.execute("select shardids.activate(5)")
    with psycopg.connect(node) as fencing:
        fencing.execute("select shardids.fence(5)")
        fencing.rollback()
    with refused("SI002"):
        db.execute(NEXT)


def test_ids_after_an_activation_are_above_the_high_water_tick(db: Db) -> None:
    last = run_ahead(db, 20_000)
    high_water = scalar(db, "select shardids.fence(5)")
    assert high_water >= last
    assert scalar(db, "select high_water_tick from shardids.shard where id = 5") == high_water
    db.execute("select shardids.activate(5)")
    ids = draw(db, 100)
    assert ticks(ids[0]) > high_water
    assert increases(ids)


def test_a_shard_that_moved_names_its_node(db: Db) -> None:
    db.execute("select shardids.fence(5, 'b')")
    with refused("SI003", "shard 5", 'moved to node "b"', '[node "a"]'):
        db.execute(NEXT)
    with refused("SI003", 'moved to node "b"'):
        reserve(db, 10)
    assert row(db, "select state, moved_to from shardids.shard where id = 5") == ("moved", "b")


def test_a_second_fence_changes_nothing_and_one_activation_lifts_both(db: Db) -> None:
    last = ticks(scalar(db, NEXT))
    first = scalar(db, "select shardids.fence(5)")
    second = scalar(db, "select shardids.fence(5)")
    assert last <= first <= second
    assert row(db, "select state, moved_to from shardids.shard where id = 5") == ("fenced", None)
    with refused("SI002"):
        db.execute(NEXT)
    db.execute("select shardids.activate(5)")
    assert ticks(scalar(db, NEXT)) > second


def test_fence_and_activation_in_one_transaction_leave_the_shard_active(db: Db) -> None:
    last = scalar(db, NEXT)
    with db.transaction():
        db.execute("select shardids.fence(5)")
        db.execute("select shardids.activate(5)")
    assert scalar(db, NEXT) > last


def test_an_activation_above_a_tick_starts_above_it(db: Db) -> None:
    high_water = scalar(db, "select shardids.fence(5)")
    above = high_water + 5_000_000
    db.execute("select shardids.activate(5, %s)", [above])
    assert ticks(scalar(db, NEXT)) > above


def test_an_activation_above_a_tick_lifts_a_shard_that_is_active(db: Db) -> None:
    above = run_ahead(db, 10_000) + 5_000_000
    db.execute("select shardids.activate(5, %s)", [above])
    assert ticks(scalar(db, NEXT)) > above


def draw_unless_fenced(connection: Db, count: int) -> Ids:
    try:
        return draw(connection, count)
    except psycopg.Error as error:
        if error.sqlstate != "SI002":
            raise
        return np.array([], np.int64)


def test_no_id_passes_a_fence_under_load(db: Db, node: str) -> None:
    """Draws that ended before a fence are below its high-water tick, those that began after it above."""
    done = threading.Event()

    def session(_number: int) -> list[tuple[float, float, Ids]]:
        batches = []
        with connect(node) as connection:
            while not done.is_set():
                began = time.monotonic()
                ids = draw_unless_fenced(connection, 40)
                batches.append((began, time.monotonic(), ids))
        return batches

    fences = []
    with ThreadPoolExecutor(4) as pool:
        sessions = [pool.submit(session, number) for number in range(4)]
        try:
            for _ in range(25):
                draw(db, 2000)
                called = time.monotonic()
                high_water = scalar(db, "select shardids.fence(5)")
                fenced = time.monotonic()
                with refused("SI002"):
                    db.execute(NEXT)
                activating = time.monotonic()
                db.execute("select shardids.activate(5)")
                fences.append((called, fenced, activating, high_water))
        finally:
            done.set()
        drawn = [future.result(PATIENCE_S) for future in sessions]

    assert sum(len(ids) == 0 for batches in drawn for _, _, ids in batches) > 25
    assert all(increases(np.concatenate([ids for _, _, ids in batches])) for batches in drawn)
    successes = [batch for batches in drawn for batch in batches if len(batch[2])]
    assert distinct([ids for _, _, ids in successes])
    for called, fenced, activating, high_water in fences:
        below = [ids for _, ended, ids in successes if ended < called]
        above = [(ended, ids) for began, ended, ids in successes if began > fenced]
        assert all(ticks(ids[-1]) <= high_water for ids in below)
        assert all(ticks(ids[0]) > high_water and ended > activating for ended, ids in above)
    assert [fence[3] for fence in fences] == sorted({fence[3] for fence in fences})


def test_an_unknown_shard_is_refused(db: Db) -> None:
    for statement in (
        "select shardids.reserve(7, 1)",
        "select shardids.fence(7)",
        "select shardids.activate(7)",
        "select shardids.advance(7, 'shard_0005.id_offset')",
    ):
        with refused("SI001", "shard 7", 'node "a"'):
            db.execute(statement)


@pytest.mark.parametrize("call", ["reserve(null, 1)", "fence(null)", "activate(null)", "advance(null, null)"])
def test_no_shard_at_all_is_an_unknown_shard(call: str, db: Db) -> None:
    with refused("SI001"):
        db.execute(f"select shardids.{call}")


# Locks and transactions


def test_a_draw_holds_no_lock_until_the_end_of_its_transaction(node: str) -> None:
    with psycopg.connect(node) as first, connect(node) as second:
        one = scalar(first, NEXT)
        first.execute("select pg_sleep(0.01)")
        reserve(first, 5000)
        last = scalar(first, NEXT)
        assert advisory_locks(first) == 0
        second.execute("set lock_timeout = '100ms'")
        two = draw(second, 2000)
        reserve(second, 5000)
        second.execute("select shardids.fence(5)")
        with refused("SI002"):
            first.execute(NEXT)
    assert one < last < two[0]


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout"])
def test_a_session_that_gives_up_waiting_for_the_lock_leaves_none(setting: str, db: Db, node: str) -> None:
    with connect(node) as other:
        last = scalar(other, NEXT)
        db.execute("select pg_advisory_lock(1936220516, 5)")
        other.execute("select pg_sleep(0.01)")
        other.execute(f"set {setting} = '30ms'")
        with pytest.raises((psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)):
            reserve(other, 10)
        db.execute("select pg_advisory_unlock(1936220516, 5)")
        assert advisory_locks(db) == 0
        assert scalar(other, NEXT) > last


def test_statements_cancelled_at_any_point_leave_no_lock_and_lose_no_order(db: Db, node: str) -> None:
    kept = []
    with connect(node) as other, ThreadPoolExecutor(1) as pool:
        other.execute("set client_min_messages = error")
        for number in range(25):
            kept.append(scalar(other, NEXT))
            endless = (
                "select count((shardids.reserve(5, 1 + 0 * n)).first_tick) from generate_series(1, 10000) n"
            )
            running = pool.submit(other.execute, endless)
            wait_for(lambda: advisory_locks(db), "the statement holds the lock")
            if number % 2:
                db.execute("select pg_cancel_backend(%s)", [other.info.backend_pid])
            else:
                other.cancel_safe()
            with pytest.raises(psycopg.errors.QueryCanceled):
                running.result(PATIENCE_S)
            assert advisory_locks(db) == 0
    assert increases(np.array(kept))


def test_an_error_with_the_lock_held_leaves_none_in_an_open_transaction(db: Db, node: str) -> None:
    run_ahead(db, 61_000)
    db.execute("update shardids.node set max_ahead = '1 minute'")
    with psycopg.connect(node) as connection:
        for _ in range(3):
            with refused("SI005"), connection.transaction():
                connection.execute(NEXT)
        caught = """do $$ begin perform shard_0005.next_id(); raise 'it drew';
                    exception when sqlstate 'SI005' then null; end $$"""
        connection.execute(caught)
        assert advisory_locks(connection) == 0


def test_ids_go_on_increasing_over_a_rollback_to_a_savepoint(node: str) -> None:
    ids = []
    with psycopg.connect(node) as connection:
        for _ in range(20):
            connection.execute("savepoint s")
            ids += draw(connection, 100).tolist()
            ids += draw_block(connection, 100).tolist()
            connection.execute("rollback to s")
        connection.rollback()
        ids.append(scalar(connection, NEXT))
    assert increases(np.array(ids))


def test_a_read_only_transaction_can_not_draw_and_breaks_nothing(db: Db) -> None:
    last = scalar(db, NEXT)
    before = (offset(db), counter(db))
    for statement in (NEXT, "select shard_0005.next_ids(3)", "select shardids.reserve(5, 3)"):
        db.execute("begin read only")
        with refused("25006"):
            db.execute(statement)
        db.execute("rollback")
    assert (offset(db), counter(db)) == before
    assert scalar(db, NEXT) > last


def test_serializable_sessions_draw_without_conflicts(node: str) -> None:
    def session(_number: int) -> Ids:
        with psycopg.connect(node) as connection:
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            parts = []
            for _ in range(10):
                parts += [draw(connection, 20), draw_block(connection, 20)]
                connection.commit()
            return np.concatenate(parts)

    assert distinct(at_once(4, session))


# The ends of a layout's time


def near_the_end(left_ms: int, **widths: int) -> Layout:
    """A layout of 12.4 days that has so many ms left."""
    bits = {"time_bits": 30, "shard_bits": 12, "sequence_bits": 10} | widths
    return Layout(**bits, epoch_ms=now_ms() - (1 << 30) + left_ms)


def test_time_exhausted_by_the_clock_is_an_error(make_node: MakeNode) -> None:
    with connect(make_node(near_the_end(800))) as connection:
        time.sleep(1)
        for statement in (NEXT, "select shardids.reserve(5, 1)", "select shard_0005.next_ids(9)"):
            with refused("SI006", "shard 5", "no more IDs"):
                connection.execute(statement)


def test_draws_up_to_the_very_end_of_time_are_never_wrapped(make_node: MakeNode) -> None:
    layout = near_the_end(20_000, sequence_bits=1)
    with connect(make_node(layout)) as connection:
        parts = [draw(connection)]
        with refused("SI006", layout.last_time.strftime("%Y-%m-%d %H:%M:%S")):
            while True:
                left = (1 << 31) - int(ticks(parts[-1][-1], layout))
                parts.append(draw(connection, 500 if left > 1500 else 1))
        for statement in (NEXT, "select shardids.reserve(5, 1)"):
            with refused("SI006"):
                connection.execute(statement)
    ids = np.concatenate(parts)
    assert increases(ids)
    assert layout.decode(int(ids[-1])).ms == (1 << 30) - 1
    assert ids[0] > 0


def test_reservations_up_to_the_end_of_time_are_never_wrapped(make_node: MakeNode) -> None:
    layout = near_the_end(30_000)
    with connect(make_node(layout)) as connection:
        blocks = []
        for size in (4_000_000, 400_000, 1000, 1):
            with refused("SI006"):
                while True:
                    blocks.append(reserve(connection, size))
        ids = draw(connection, 1)
    assert all(last < first for (_, last), (first, _) in pairwise(blocks))
    assert blocks[-1][1] < ticks(ids[0], layout) < 1 << 40
    assert blocks[-1][1] > (1 << 40) - 20_000


def test_the_clock_reaching_the_end_of_time_is_an_error_at_once(make_node: MakeNode) -> None:
    layout = near_the_end(2_500)
    with connect(make_node(layout)) as connection:
        ids = [scalar(connection, NEXT)]
        with refused("SI006"):
            while True:
                ids.append(scalar(connection, NEXT))
    end_ms = layout.epoch_ms + (1 << 30)
    # A step may lead past the clock, and past the end.
    assert end_ms - 16 - 3 <= now_ms() <= end_ms + 1000
    assert increases(np.array(ids))
    assert layout.decode(ids[-1]).ms < 1 << 30


def test_the_highest_mark_of_an_incarnation_overflows_nothing(make_node: MakeNode) -> None:
    layout = Layout(time_bits=42, shard_bits=11, sequence_bits=10, epoch_ms=DEFAULT.epoch_ms)
    url = make_node(layout)
    with connect(url) as connection:
        connection.execute(
            "create or replace function shardids.incarnation() returns bigint"
            " language sql volatile parallel safe security definer"
            " return ((1::bigint << 21) - 1) << 42"
        )
    with connect(url) as connection:
        parts = [draw(connection)]
        run_ahead(connection, 75_000)
        parts.append(draw(connection))
        assert increases(np.concatenate(parts))


@pytest.mark.parametrize("crossing", ["draws", "block"])
def test_ids_cross_the_sign_bit_in_unsigned_order(crossing: str, make_node: MakeNode) -> None:
    layout = Layout(time_bits=40, shard_bits=16, sequence_bits=8, epoch_ms=now_ms() + 5_000 - (1 << 39))
    assert layout.uses_sign_bit
    with connect(make_node(layout, (65535,))) as connection:
        expression = "shard_65535.next_id()"
        parts = [draw(connection, 10, expression)]
        left_ms = (1 << 39) - layout.decode(int(parts[0][-1])).ms
        if crossing == "draws":
            parts.append(draw_block(connection, (left_ms - 60) << 8, 65535))
            parts.append(draw(connection, 30_000, expression))
        else:
            parts.append(draw_block(connection, (left_ms + 60) << 8, 65535))
            assert parts[-1][0] > 0 > parts[-1][-1]
        parts.append(draw(connection, 10, expression))
    ids = np.concatenate(parts)
    assert ids[0] > 0 > ids[-1]
    assert increases(ids.view(np.uint64))
    assert layout.decode(int(ids[-1])).shard == 65535


def test_a_clock_before_the_epoch_gives_ids_of_the_epoch_if_it_is_near(make_node: MakeNode) -> None:
    layout = Layout(time_bits=41, shard_bits=12, sequence_bits=10, epoch_ms=now_ms() + 1_800_000)
    with connect(make_node(layout)) as connection:
        ids = np.concatenate([draw(connection, 500), draw_block(connection, 500), draw(connection, 500)])
    assert increases(ids)
    assert 0 <= layout.decode(int(ids[0])).ms <= 1
    assert layout.decode(int(ids[-1])).ms < 100


def test_a_clock_long_before_the_epoch_is_refused(make_node: MakeNode) -> None:
    layout = Layout(time_bits=41, shard_bits=12, sequence_bits=10, epoch_ms=now_ms() + 2 * 3_600_000)
    with connect(make_node(layout)) as connection:
        with refused("SI005", " ms ahead of the clock"):
            connection.execute(NEXT)
        connection.execute("update shardids.node set max_ahead = '3 hours'")
        assert increases(draw(connection, 500))


# Shards that are made anew


def test_a_generator_ahead_of_the_clock_is_not_taken_away(db: Db, node: str) -> None:
    """One made anew would start at the clock, below what the old one issued."""
    db.execute("select shard_0005.next_id()")
    last = run_ahead(db, 20_000)
    engine = open_engine(parse_url(node), what="node")
    with pytest.raises(TooFarAhead), engine.begin() as connection:
        trees.downgrade(connection, "shard", {"shard": "5"})
    assert ticks(scalar(db, NEXT)) > last
    with engine.begin() as connection:
        trees.downgrade(connection, "shard", {"shard": "6"})
    with engine.begin() as connection:
        trees.upgrade(connection, "shard", {"shard": "6"})
    engine.dispose()
    assert scalar(db, "select shardids.shard_of(shard_0006.next_id())") == 6
