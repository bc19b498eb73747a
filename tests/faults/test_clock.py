"""The server's clock is stepped under load, and reaches the end of the layout."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pytest

from tests.faults.conftest import Finish, Record
from tests.support.faults import (
    LAYOUT,
    assert_refused,
    clock_ms,
    connect,
    draw,
    scalar,
    scaled,
)
from tests.support.server_clock import Clock
from tests.support.waiting import wait_for

SESSIONS = 16
AHEAD_S = 7200.0
"""How far the clock is ahead of the machine's when it is right.

libfaketime shows signal handlers the machine's clock: under an earlier one PostgreSQL ends each wait for a
lock at its first alarm, a second after it began.
"""
EXHAUSTED_S = (LAYOUT.epoch_ms + (1 << LAYOUT.time_bits)) / 1000


def test_a_clock_that_is_stepped_under_load(
    clock: Clock, faked_node: str, record: Record, finish: Finish
) -> None:
    clock.set(AHEAD_S)
    recorder = record(faked_node)
    with connect(faked_node) as admin:
        admin.execute("update shardids.node set max_ahead = '1 day'")
        recorder.start(SESSIONS, most=500)
        recorder.await_ids()
        for ahead_s in (-5, 0, -3600, 0, 3600, 0, -3600, 3600, 0):
            clock.set(AHEAD_S + ahead_s)
            wait_for(
                partial(is_ahead, admin, AHEAD_S + ahead_s), f"the server's clock is stepped by {ahead_s} s"
            )
            recorder.await_ids()
            time.sleep(scaled(0.0, 1.0))
    clock.swing(scaled(4.0, 20.0), steps=scaled(400, 4000), around_s=AHEAD_S)
    recorder.await_ids()
    finish(recorder)


def is_ahead(connection: psycopg.Connection[Any], ahead_s: float) -> bool:
    """Whether the server's clock differs so much from the machine's."""
    machine_ms = time.time_ns() // 1_000_000 - LAYOUT.epoch_ms
    return abs(clock_ms(connection) - machine_ms - ahead_s * 1000) < 1000


def test_ticks_too_far_ahead_wait_for_the_clock(
    clock: Clock, faked_node: str, record: Record, finish: Finish
) -> None:
    recorder = record(faked_node, expected=("SI005",))
    clock.set(3603)
    recorder.start(SESSIONS, kinds=("one",))
    recorder.await_ids()
    clock.set(0)
    with connect(faked_node) as connection:
        wait_for(lambda: recorder.refusals()["SI005"] >= SESSIONS, "draws are refused")
        with pytest.raises(psycopg.Error, match=r"would issue IDs 360\d{4} ms ahead of the clock") as refused:
            draw(connection.cursor(binary=True), "one", 1)
        assert refused.value.sqlstate == "SI005"
        ahead_ms = int(str(refused.value).split("IDs ")[1].split(" ms")[0])
        tick_ms = scalar(connection, "select shardids.offset_ms(last_value) from shard_0000.id_offset")
        assert 0 <= ahead_ms - (tick_ms - clock_ms(connection)) < 60_000
    recorder.await_ids()
    finish(recorder)


def test_sessions_that_draw_across_the_end_of_time(
    clock: Clock, faked_node: str, record: Record, finish: Finish
) -> None:
    recorder = record(faked_node, expected=("SI006",))
    clock.set(EXHAUSTED_S - time.time() - scaled(3.0, 8.0))
    with connect(faked_node) as admin:
        admin.execute("update shardids.node set clock_confirmed_at = clock_timestamp()")
    recorder.start(SESSIONS)
    recorder.await_ids()
    wait_for(lambda: all(one.refusals for one in recorder.sessions), "the layout's time ends")
    clock.set(EXHAUSTED_S - time.time() + 60)
    exhausted = recorder.next_phase()
    with connect(faked_node) as connection:
        assert clock_ms(connection) > 1 << LAYOUT.time_bits
        assert_refused(connection, "SI006", "has no more IDs: the layout's time ended")
    time.sleep(0.5)
    finish(recorder)
    assert not len(recorder.ticks_since(exhausted))
    ticks = recorder.ticks_since(0)
    end = 1 << (LAYOUT.time_bits + LAYOUT.sequence_bits)
    assert np.all((ticks > end - (1 << 40)) & (ticks < end))
