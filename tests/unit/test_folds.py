"""Aggregates that Python folds."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import DateTime, column, func, select

from shardids.client.routing.aggregates import folds_of


def test_moments_are_compared_as_such_and_not_by_the_clock_on_the_wall() -> None:
    # As the driver gives them where the server's time zone has summer time.
    berlin = ZoneInfo("Europe/Berlin")
    earlier = datetime(2024, 10, 27, 2, 30, tzinfo=berlin, fold=0)
    later = datetime(2024, 10, 27, 2, 10, tzinfo=berlin, fold=1)
    assert later < earlier
    assert later.timestamp() > earlier.timestamp()
    at: Any = column("at", DateTime(timezone=True))
    lowest, highest = folds_of(select(func.min(at), func.max(at)))
    for values in ([earlier, later], [later, earlier]):
        assert (lowest(values).fold, highest(values).fold) == (0, 1)
