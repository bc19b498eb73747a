"""The rates of the last hour, as the console keeps them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from shardids.watch.console.watching import HISTORY_S, History, rate_of


@pytest.mark.parametrize("interval_s", [1.0, 5.0, 7.5])
def test_an_hour_is_kept_however_far_apart_the_readings_are(interval_s: float) -> None:
    history = History()
    for number in range(int(2 * HISTORY_S / interval_s)):
        history.add(number * interval_s, {"a": 1.0}, {3: 1.0})
    points = history.points()
    assert points[-1].time - points[0].time == HISTORY_S
    assert len(points) == HISTORY_S / interval_s + 1


def test_what_was_not_read_has_no_rate() -> None:
    history = History()
    history.add(0.0, {"a": 1.0, "b": None}, {3: 1.0}, unread=[9, 7])
    (point,) = history.points()
    assert [rate_of(point, shard) for shard in (2, 3, 7, 8, 9)] == [0.0, 1.0, None, 0.0, None]


def test_times_stay_in_order_when_the_clock_is_set_back() -> None:
    history = History()
    for time in (0.0, 5.0, 90_000.0, 90_005.0, 10.0, 15.0):
        history.add(time, {"a": time}, {})
    assert [point.time for point in history.points()] == [10.0, 15.0]
    for time in (20.0, 25.0, 12.0, 17.0):
        history.add(time, {"a": time}, {})
    assert [point.time for point in history.points()] == [10.0, 12.0, 17.0]


def test_an_hour_of_4096_shards_fits_in_40_mb() -> None:
    rates = np.random.default_rng(0).uniform(1, 100, 4096).tolist()
    tracemalloc.start()
    try:
        history = History()
        for number in range(int(HISTORY_S / 5.0) + 50):  # three times as often as so many are read
            history.add(5.0 * number, {"a": 1.0}, dict(enumerate(rates)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (last,) = history.points()[-1:]
    assert [rate_of(last, shard) for shard in (0, 4095)] == pytest.approx([rates[0], rates[4095]])
    assert used < 40e6


def test_the_busiest_shards_are_those_of_the_whole_hour() -> None:
    history = History()
    for number in range(1500):
        now = {3: 10.0, 4: 9.0 + number % 2, 5: 500.0 if number < 3 else 0.0, 6: 1e-3}
        history.add(5.0 * number, {"a": 1.0}, {s: rate for s, rate in now.items() if rate}, unread=[9])
    assert history.busiest(10) == [3, 4, 6]  # shard 5 drew more than an hour ago
    history.add(7500.0, {"a": 1.0}, {7: 20_000.0}, unread=[9])
    assert history.busiest(2) == [7, 3]


def test_a_mean_is_over_the_times_at_which_a_shard_was_read() -> None:
    history = History()
    for number in range(100):
        unread = [8] if number % 2 else []
        history.add(5.0 * number, {"a": 1.0}, {7: 6.0} if unread else {7: 6.0, 8: 10.0}, unread=unread)
    assert history.busiest(2) == [8, 7]
