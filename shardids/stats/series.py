"""Load by shard and time: how many IDs each shard gave in each interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardids.errors import BadArgument

_MOST_INTERVALS: Final = 1008
_MOST_CELLS: Final = 1 << 20
_LENGTHS_MS: Final = (
    1,
    10,
    100,
    1000,
    10_000,
    60_000,
    600_000,
    3_600_000,
    21_600_000,
    86_400_000,
    604_800_000,
)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Counts of IDs: a row a shard, a column an interval.

    Attributes:
        shards: the number of each row's shard.
        counts: how many IDs it gave in each interval.
        start_ms: when the first interval begins, in Unix milliseconds.
        interval_ms: how long an interval is.

    Raises:
        BadArgument: the shapes don't fit, an interval of no length, or a count below zero.
    """

    shards: Integers
    counts: Integers
    start_ms: int
    interval_ms: int

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or self.shards.shape != self.counts.shape[:1]:
            raise BadArgument(
                f"counts must have {self.shards.size} rows, one a shard, not the shape {self.counts.shape}"
            )
        if self.interval_ms < 1:
            raise BadArgument(f"interval_ms must be at least 1, not {self.interval_ms}")
        if self.counts.size and int(self.counts.min()) < 0:
            raise BadArgument("counts must not be negative")

    @property
    def intervals(self) -> int:
        """How many intervals there are."""
        return int(self.counts.shape[1])

    def coarser(self, factor: int) -> Series:
        """Returns the same in intervals ``factor`` times as long; what is left at the end is dropped."""
        whole = self.intervals // factor
        counts = self.counts[:, : whole * factor].reshape(self.shards.size, whole, factor).sum(axis=2)
        return Series(
            shards=self.shards,
            counts=counts,
            start_ms=self.start_ms,
            interval_ms=self.interval_ms * factor,
        )

    def start_of(self, interval: int) -> int:
        """When an interval begins, in Unix milliseconds."""
        return self.start_ms + interval * self.interval_ms


def series_of(
    shards: Integers, row: npt.NDArray[np.intp], ms: Integers, first_ms: int, last_ms: int
) -> Series:
    """Counts IDs from ``first_ms`` until ``last_ms``, both included, in intervals of a length that people
    use.

    ``row`` is each ID's place in ``shards``. Times outside count nowhere. The last interval ends after
    ``last_ms``, so the part of it that is still to come is empty.
    """
    most = max(1, min(_MOST_INTERVALS, _MOST_CELLS // max(shards.size, 1)))
    span = last_ms - first_ms + 1
    length = next((one for one in _LENGTHS_MS if span <= one * most), _LENGTHS_MS[-1])
    start = first_ms // length * length
    intervals = (last_ms - start) // length + 1
    inside = (ms >= first_ms) & (ms <= last_ms)
    if not inside.all():
        row, ms = row[inside], ms[inside]
    cell = row * intervals + (ms - start) // length
    counts = np.bincount(cell, minlength=shards.size * intervals).reshape(shards.size, intervals)
    return Series(shards=shards, counts=counts.astype(np.int64), start_ms=start, interval_ms=length)
