"""What ends: the IDs of a millisecond, and the layout's time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from typing import Final

import numpy as np

from shardids.ids.layout import Layout
from shardids.stats.anomalies import Anomaly, Kind, Thresholds, time_of
from shardids.stats.series import Series

_WEEK_MS: Final = 604_800_000
_LEAST_WEEKS: Final = 4
_FORESIGHT: Final = 4
_RISING: Final = 0.9
_DAYS_A_YEAR: Final = 365.2425


def limits(series: Series, layout: Layout, now: datetime, bounds: Thresholds) -> Iterator[Anomaly]:
    """Yields shards near their IDs a second, growth that leads there, and a layout whose time ends."""
    yield from _sequence(series, layout, bounds)
    years = layout.years_left(now)
    if years < bounds.layout_years:
        yield Anomaly(
            kind=Kind.LAYOUT,
            end=layout.last_time,
            value=years,
            expected=bounds.layout_years,
            message=f"the layout's time ends at {layout.last_time:%Y-%m-%d}, in {max(years, 0.0):.2f} years",
        )


def growth_a_week(series: Series) -> float | None:
    """Returns by how much the logarithm of a week's IDs rises (Theil and Sen), or None if that can't be told.

    Whole weeks are compared, so that weekends are part of each: four at least, and nine of ten pairs must
    rise.
    """
    per_week = _WEEK_MS // series.interval_ms
    weeks = series.intervals // per_week if per_week else 0
    if weeks < _LEAST_WEEKS:
        return None
    of_all = series.counts.sum(axis=0)[series.intervals - weeks * per_week :]
    totals = of_all.reshape(weeks, per_week).sum(axis=1)
    if not totals.all():
        return None
    first, second = np.triu_indices(weeks, 1)
    scale = np.log(totals)
    slopes = (scale[second] - scale[first]) / (second - first)
    return float(np.median(slopes)) if (slopes > 0).mean() >= _RISING else None


def _sequence(series: Series, layout: Layout, bounds: Thresholds) -> Iterator[Anomaly]:
    if not series.counts.size:
        return
    # The busiest second, or longer interval.
    whole = max(1, 1000 // series.interval_ms)
    intervals = series.intervals // whole
    if not intervals:
        return
    counts = series.counts[:, : intervals * whole].reshape(series.shards.size, intervals, whole).sum(axis=2)
    rates = counts.max(axis=1) / (series.interval_ms * whole / 1000)
    limit = layout.ids_per_second
    for row in np.flatnonzero(rates >= bounds.sequence_share * limit):
        at = time_of(series.start_of(int(counts[row].argmax()) * whole))
        yield Anomaly(
            kind=Kind.SEQUENCE,
            shard=int(series.shards[row]),
            start=at,
            value=float(rates[row]),
            expected=float(limit),
            message=f"{rates[row]:,.0f} {series.unit}s a second;"
            f" from {limit:,} on it runs ahead of the clock",
        )
    busiest = int(rates.argmax())
    growth = growth_a_week(series)
    if not growth or not rates[busiest] or rates[busiest] >= bounds.sequence_share * limit:
        return
    weeks = math.log(limit / rates[busiest]) / growth
    if weeks <= _FORESIGHT * series.intervals * series.interval_ms / _WEEK_MS:
        a_year = math.expm1(growth * _DAYS_A_YEAR / 7)
        yield Anomaly(
            kind=Kind.SEQUENCE,
            shard=int(series.shards[busiest]),
            value=weeks,
            expected=float(limit),
            message=f"growing by {a_year:.0%} a year, its {rates[busiest]:,.0f} {series.unit}s a second reach"
            f" {limit:,} in {weeks:.0f} weeks",
        )
