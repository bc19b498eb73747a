"""A shard is fenced and activated again and again under load."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from tests.faults.conftest import Finish, Record
from tests.support.faults import assert_refused, connect, draw, scalar, scaled, ticks_of
from tests.support.recorder import Recorder
from tests.support.waiting import wait_for

SESSIONS = 16


def test_a_fenced_shard_issues_nothing_and_goes_on_above(node: str, record: Record, finish: Finish) -> None:
    recorder = record(node, expected=("SI002",))
    recorder.start(SESSIONS)
    fences: list[tuple[int, int, int]] = []
    end = time.monotonic() + scaled(4, 30)
    with connect(node) as admin:
        while time.monotonic() < end:
            recorder.await_ids(SESSIONS // 2)
            high_water = scalar(admin, "select shardids.fence(0)")
            fenced = recorder.next_phase()
            assert_refused(admin, "SI002", "shard 0 is fenced")
            wait_for(partial(all_refused, recorder, fenced), "all sessions are refused")
            active = recorder.next_phase()
            admin.execute("select shardids.activate(0)")
            fences.append((fenced, active, high_water))
    recorder.await_ids()
    finish(recorder)
    assert len(fences) > scaled(5, 40)
    batches = [batch for batch in recorder.batches() if len(batch.ids)]
    asked = np.array([batch.asked.phase for batch in batches])
    received = np.array([batch.received.phase for batch in batches])
    lowest = ticks_of(np.array([batch.ids[0] for batch in batches]))
    highest = ticks_of(np.array([batch.ids[-1] for batch in batches]))
    for fenced, active, high_water in fences:
        assert not np.any((asked >= fenced) & (received < active)), "a fenced shard issued IDs"
        assert np.all(highest[received < active] <= high_water)
        assert np.all(lowest[asked >= fenced] > high_water)


def test_an_active_shard_that_is_activated_above_a_tick(node: str) -> None:
    """Its ticks are ahead of the clock, so that no draw looks closer by itself."""
    with connect(node) as connection:
        scalar(connection, "select shard_0000.next_id()")
        _, last = connection.execute("select * from shardids.reserve(0, 4000000)").fetchone()
        above = last + 5_000_000
        connection.execute("select shardids.activate(0, %s)", (above,))
        assert ticks_of(draw(connection.cursor(binary=True), "one", 1))[0] > above


def all_refused(recorder: Recorder, since: int) -> bool:
    """Whether each session sent a statement since that phase, and it failed."""
    recorder.raise_failures()
    return all(one.refusals and one.refusals[-1].asked.phase >= since for one in recorder.sessions)
