"""Draws from shards that lag: they follow the clock in steps of the offset, and wait for nobody."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.errors import QueryCanceled

from tests.support.generator import (
    DEFAULT,
    Ids,
    at_once,
    connect,
    distinct,
    draw,
    increases,
    paused,
    refused,
    reserve,
    row,
    scalar,
    ticks,
)
from tests.support.waiting import wait_for

Db = psycopg.Connection[Any]

AFTER_STEP = r"\braised := shardids\.raised\([^;]*;"
STEP_MS = 16
LATE_S = 0.03
RACE_S = 1.5
NEXT = "select shard_0005.next_id()"
TIMED = "select shardids.ms_of(clock_timestamp()), shard_0005.next_id(), shardids.ms_of(clock_timestamp())"


def offset(db: Db, shard: int = 5) -> int:
    return scalar(db, f"select pg_sequence_last_value('shard_{shard:04}.id_offset')")


def locks(db: Db) -> int:
    """How many sessions hold the lock of shard 5, or wait for it."""
    return scalar(db, "select count(*) from pg_locks where locktype = 'advisory' and classid = 1936220516")


def test_a_late_draw_takes_steps_and_gives_the_lock_back(db: Db) -> None:
    db.execute(NEXT)
    for idle_s in (0.005, 0.02, 0.1):
        before = offset(db)
        time.sleep(idle_s)
        earlier, id_, later = row(db, TIMED)
        raised = offset(db) - before
        assert raised % STEP_MS == 0
        assert raised <= (idle_s + 1) * 1000
        assert earlier - 2 <= ticks(id_) >> DEFAULT.sequence_bits <= later + STEP_MS
    assert locks(db) == 0


def test_after_a_long_pause_the_offset_is_raised_at_once_and_the_row_looked_at(db: Db) -> None:
    db.execute(NEXT)
    time.sleep(0.3)
    earlier, id_, later = row(db, TIMED)
    assert earlier - 2 <= ticks(id_) >> DEFAULT.sequence_bits <= later + 1
    db.execute("update shardids.shard set state = 'fenced' where id = 5")
    time.sleep(0.3)
    with refused("SI002", "shard 5"):
        db.execute(NEXT)


def test_a_draw_does_not_wait_for_who_raises_the_offset(db: Db, node: str) -> None:
    with connect(node) as other:
        before = draw(other, 1)
        db.execute("select pg_advisory_lock(1936220516, 5)")
        other.execute("set lock_timeout = '1ms'")
        time.sleep(0.01)
        held = offset(db)
        drawn = draw(other, 1)
        assert offset(db) == held
        time.sleep(0.15)  # Longer than a tick may lag: now it needs the lock.
        with refused("55P03", "shard 5"):
            other.execute(NEXT)
        db.execute("select pg_advisory_unlock_all()")
        assert increases(np.concatenate([before, drawn, draw(other, 1)]))


@pytest.mark.parametrize("ending", ["cancel", "terminate", "error"])
def test_a_draw_that_ends_between_its_steps_gives_the_lock_back(ending: str, db: Db, node: str) -> None:
    session = psycopg.connect(node, autocommit=True)
    before = draw(session, 1)
    if ending == "error":
        session.execute("set lock_timeout = '300ms'")
    time.sleep(LATE_S)
    with paused(db, "shardids.catch_up", AFTER_STEP, session, draw) as go_on:
        assert locks(db) == 1
        if ending == "cancel":
            session.cancel()
        elif ending == "terminate":
            db.execute("select pg_terminate_backend(%s)", [session.info.backend_pid])
        wait_for(lambda: locks(db) == 0, "the lock is free")
        with pytest.raises(QueryCanceled if ending == "cancel" else psycopg.OperationalError):
            go_on()
    assert increases(np.concatenate([before, draw(db, 3)]))
    session.close()


@pytest.mark.parametrize(
    "statement", ["select * from shardids.fence(5)", "select * from shardids.reserve(5, 100)"]
)
def test_fences_and_reservations_wait_for_the_steps_of_a_draw(statement: str, db: Db, node: str) -> None:
    with connect(node) as slow, connect(node) as other, ThreadPoolExecutor(1) as pool:
        slow.execute(NEXT)
        time.sleep(LATE_S)
        with paused(db, "shardids.catch_up", AFTER_STEP, slow, draw) as go_on:
            waiting = pool.submit(lambda: row(other, statement))
            wait_for(lambda: locks(db) == 2, "the other session waits")
            try:
                drawn = int(ticks(go_on()[0]))
            except psycopg.DatabaseError:
                drawn = -1  # by the fence
            first, last = (waiting.result() * 2)[-2:]
    if "fence" in statement:
        assert drawn <= last
    else:
        assert not first <= drawn <= last


def test_no_sequence_is_stepped_that_is_not_the_shards(db: Db) -> None:
    db.execute("select shard_0005.next_id(), shard_0006.next_id()")
    db.execute("create sequence low increment 16; create sequence mine increment 16 start 1")
    db.execute("select setval('mine', pg_sequence_last_value('shard_0005.id_offset'))")
    time.sleep(LATE_S)
    before = [offset(db), offset(db, 6), scalar(db, "select last_value from mine")]
    for counter, sequence, shard in (
        ("shard_0006.id_counter", "shard_0005.id_offset", 5),
        ("shard_0005.id_counter", "shard_0005.id_offset", 6),
        ("low", "shard_0005.id_offset", 5),
        ("shard_0005.id_counter", "mine", 5),
        ("shard_0005.id_counter", "shard_0006.id_offset", 5),
    ):
        db.execute("select nextval('low')")
        seen = f"pg_sequence_last_value('{sequence}')"
        db.execute(f"select shardids.catch_up({seen}, '{counter}', '{sequence}', {shard})".encode())
    assert [offset(db), offset(db, 6), scalar(db, "select last_value from mine")] == before
    assert locks(db) == 0


def test_an_activation_binds_a_fenced_shard_and_leaves_one_that_draws(db: Db) -> None:
    bound = "select shardids.is_bound('shard_0005.id_counter', 'shard_0005.id_offset', 5)"
    before = draw(db, 10)
    assert scalar(db, bound)
    db.execute("alter sequence shard_0005.id_offset start 1")
    db.execute("select shardids.activate(5)")
    assert not scalar(db, bound)
    time.sleep(LATE_S)
    between = draw(db, 10)
    db.execute("select shardids.fence(5), shardids.activate(5)")
    assert scalar(db, bound)
    time.sleep(LATE_S)
    assert increases(np.concatenate([before, between, draw(db, 10)]))


def test_an_activation_does_not_wait_for_a_transaction_that_tried_to_draw(db: Db, node: str) -> None:
    db.execute("select shardids.fence(5)")
    db.execute("alter sequence shard_0005.id_offset start 1")
    with psycopg.connect(node) as idle:
        idle.execute("select pg_sequence_last_value('shard_0005.id_offset')")
        db.execute("select shardids.activate(5)")
        assert len(draw(db, 3)) == 3


def test_draws_with_pauses_and_reservations_share_no_tick_and_keep_their_order(node: str) -> None:
    """Each session's IDs rise, and all are above what any session had received before the draw began."""

    def work(number: int) -> tuple[Ids, list[tuple[int, int]]]:
        chance = random.Random(number)
        drawn: list[Ids] = []
        blocks = []
        with connect(node) as session:
            until = time.monotonic() + RACE_S
            while time.monotonic() < until:
                time.sleep(chance.choice((0, 0, 0.001, 0.005, 0.02, 0.3 * (chance.random() < 0.1))))
                if chance.random() < 0.05:
                    blocks.append(reserve(session, chance.choice((1, 500, 2000))))
                else:
                    drawn.append(draw(session, chance.choice((1, 1, 20))))
        return np.concatenate(drawn), blocks

    done = at_once(6, work)
    assert all(increases(drawn) for drawn, _ in done)
    blocks = [np.arange(first, last + 1) for _, own in done for first, last in own]
    assert distinct([*(ticks(drawn) for drawn, _ in done), *blocks])


def test_an_offset_that_the_caller_makes_up_raises_no_shard_over_an_hour(db: Db) -> None:
    db.execute("select shard_0005.next_id()")
    db.execute(
        "select setval('shard_0005.id_offset', pg_sequence_last_value('shard_0005.id_offset') - 7200000)"
    )
    before = offset(db)
    made_up = "shardids.clock_offset('shard_0005.id_counter') - 5"
    db.execute(
        f"select shardids.catch_up({made_up}, 'shard_0005.id_counter', 'shard_0005.id_offset', 5)".encode()
    )
    assert offset(db) == before
    assert locks(db) == 0
