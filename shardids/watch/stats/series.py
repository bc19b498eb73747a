"""Load by shard and time: how many IDs each shard gave in each interval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from shardids.errors import BadArgument

_MOST_INTERVALS: Final = 1008
_MOST_CELLS: Final = 1 << 20
# So many an interval: of a load that has IDs in each, three times as many still pass the bounds of chance.
_BATCHES: Final = 64
_LONGEST_BATCH_MS: Final = 1000
_STRAY, _STRAYS, _STRAYS_OF, _LEAST_GAP_MS = 1000, 5, 20, 60_000
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
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Counts of IDs: a row per shard, a column per interval.

    Attributes:
        shards: the number of each row's shard.
        counts: how many IDs it gave in each interval.
        start_ms: when the first interval begins, in Unix milliseconds.
        interval_ms: how long an interval is.
        batch: how many IDs come together, for each shard: the mean over its IDs of how many come in the same
            64th of an interval, or second if that is shorter. None: they come one by one. ``batch_of_all`` is
            the same of all shards together.
        unit: the counted thing in the singular, for messages.

    Raises:
        BadArgument: the shapes don't fit, an interval of no length, or a count below zero.
    """

    shards: Integers
    counts: Integers
    start_ms: int
    interval_ms: int
    batch: Floats | None = None
    batch_of_all: float = 1.0
    unit: str = "ID"

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or self.shards.shape != self.counts.shape[:1]:
            raise BadArgument(
                f"counts must have {self.shards.size} rows, one per shard, not the shape {self.counts.shape}"
            )
        if self.batch is not None and self.batch.shape != self.shards.shape:
            raise BadArgument(f"batch must be {self.shards.size} numbers, not of shape {self.batch.shape}")
        if self.interval_ms < 1:
            raise BadArgument(f"interval_ms must be at least 1, not {self.interval_ms}")
        if self.counts.size and int(self.counts.min()) < 0:
            raise BadArgument("counts must not be negative")

    @property
    def batches(self) -> Floats:
        """``batch``, with ones where it is not known."""
        return np.ones(self.shards.size) if self.batch is None else self.batch

    @property
    def intervals(self) -> int:
        """How many intervals there are."""
        return int(self.counts.shape[1])

    def coarser(self, factor: int) -> Series:
        """Return the same in intervals ``factor`` times as long; the rest at the end is dropped."""
        whole = self.intervals // factor
        counts = self.counts[:, : whole * factor].reshape(self.shards.size, whole, factor).sum(axis=2)
        return replace(self, counts=counts, interval_ms=self.interval_ms * factor)

    def start_of(self, interval: int) -> int:
        """When an interval begins, in Unix milliseconds."""
        return self.start_ms + interval * self.interval_ms


def series_of(
    shards: Integers, row: npt.NDArray[np.intp], ms: Integers, first_ms: int, last_ms: int
) -> Series:
    """Count IDs from ``first_ms`` until ``last_ms``, both included, in intervals of a length that people
    use: up to a week, or of several weeks where there would be over a million counts.

    ``row`` is each ID's place in ``shards``. Times outside count nowhere. The last interval ends after
    ``last_ms``, so the part of it that is still to come is empty.
    """
    # One more may be there, since the first begins at a whole multiple of the length.
    most = max(1, min(_MOST_INTERVALS, _MOST_CELLS // max(shards.size, 1) - 1))
    span, longest = last_ms - first_ms + 1, _LENGTHS_MS[-1]
    length = next((one for one in _LENGTHS_MS if span <= one * most), -(-span // (longest * most)) * longest)
    start = first_ms // length * length
    intervals = (last_ms - start) // length + 1
    inside = (ms >= first_ms) & (ms <= last_ms)
    if not inside.all():
        row, ms = row[inside], ms[inside]
    cell = row * intervals + (ms - start) // length
    counts = np.bincount(cell, minlength=shards.size * intervals).reshape(shards.size, intervals)
    windows = (ms - start) // max(1, min(_LONGEST_BATCH_MS, length // _BATCHES))
    of_all, batch = _batch(windows, np.zeros_like(row), 1), _batch(windows, row, shards.size)
    return Series(
        shards=shards,
        counts=counts.astype(np.int64),
        start_ms=start,
        interval_ms=length,
        batch=batch,
        batch_of_all=float(of_all[0]),
    )


def _batch(windows: Integers, row: npt.NDArray[np.intp], rows: int) -> Floats:
    """Return the mean over each row's IDs of how many are in an ID's window; 1 for a row without IDs."""
    many = int(windows.max(initial=0)) + 1
    at, sizes = np.unique(row * many + windows, return_counts=True)
    count, squares = (np.bincount(at // many, sizes.astype(float) ** power, rows) for power in (1, 2))
    return np.asarray(np.where(count > 0, squares / np.maximum(count, 1), 1.0))


def bounds_of(ordered: Integers) -> tuple[int, int]:
    """Return the first and the last of sorted times, in ms, without a few that lie far from all others.

    Of 20 times or more, up to a thousandth, or 5 (but a twentieth at most), are left out at each end if a gap
    lies between them and the rest that is longer than all the rest, and than a minute.
    """
    few = min(max(ordered.size // _STRAY, _STRAYS), ordered.size // _STRAYS_OF)
    low, high = few, ordered.size - 1 - few
    while True:
        least = max(int(ordered[high] - ordered[low]), _LEAST_GAP_MS)
        before = np.flatnonzero(np.diff(ordered[: low + 1]) > least)
        after = np.flatnonzero(np.diff(ordered[high:]) > least)
        first = int(before[-1]) + 1 if before.size else 0
        last = high + int(after[0]) if after.size else ordered.size - 1
        if (first, last) == (low, high):
            return int(ordered[first]), int(ordered[last])
        # What is not behind such a gap is of the rest, which may last longer with it.
        low, high = first, last
