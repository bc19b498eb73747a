"""The time of day at which moves may begin."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shardids.errors import BadArgument
from shardids.mover import Window

NOON = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("window", "zone", "hour", "left_h"),
    [
        ("10:00-14:00", "UTC", 12, 2),
        ("10:00-14:00", "UTC", 14, None),
        ("10:00-14:00", "UTC", 10, 4),
        ("22:00-06:00", "UTC", 12, None),
        ("22:00-06:00", "UTC", 23, 7),
        ("22:00-06:00", "UTC", 5, 1),
        ("22:00-06:00", "UTC", 6, None),
        # Berlin is an hour ahead of UTC in November.
        ("22:00-06:00", "Europe/Berlin", 21, 8),
        ("22:00-06:00", "Europe/Berlin", 5, None),
    ],
)
def test_how_long_a_window_stays_open(window: str, zone: str, hour: int, left_h: int | None) -> None:
    left_s = Window.parse(window, zone).left_s(NOON.replace(hour=hour))
    assert left_s == (None if left_h is None else left_h * 3600)


def test_a_night_in_which_clocks_are_put_back_is_longer() -> None:
    window = Window.parse("22:00-06:00", "Europe/Berlin")
    assert window.left_s(datetime(2026, 10, 24, 20, 0, tzinfo=UTC)) == timedelta(hours=9).total_seconds()
    assert window.left_s(datetime(2026, 3, 28, 21, 0, tzinfo=UTC)) == timedelta(hours=7).total_seconds()


@pytest.mark.parametrize("window", ["22-06", "22:00", "25:00-06:00", "22:61-06:00", "22:00-22:00", ""])
def test_what_is_no_window(window: str) -> None:
    with pytest.raises(BadArgument, match="is not a window of time"):
        Window.parse(window)


@pytest.mark.parametrize("zone", ["Nowhere/Town", "", "../etc/passwd"])
def test_what_is_no_time_zone(zone: str) -> None:
    with pytest.raises(BadArgument, match=r"time zone .* is not known here"):
        Window.parse("22:00-06:00", zone)
