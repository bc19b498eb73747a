"""The rates of the last hour, as the console keeps them."""

from __future__ import annotations

import pytest

from shardids.console.history import HISTORY_S, History, rate_of


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
