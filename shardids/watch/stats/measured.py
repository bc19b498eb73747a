"""The evidence of an array of IDs: shards, rates, gaps, order, clocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import numpy.typing as npt

from shardids.errors import BadArgument
from shardids.ids.arrays import decode_array
from shardids.ids.layout import DEFAULT, Layout
from shardids.ids.order import against_neighbours, pairs_out_of_order
from shardids.watch.stats.detector import (
    DEFAULTS,
    NORMAL,
    Anomaly,
    Kind,
    Thresholds,
    find,
    jump,
    span,
    time_of,
)
from shardids.watch.stats.series import Series, bounds_of, series_of

_MOST_OUT_OF_ORDER: Final = 0.3
_PEERS: Final = 4

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByShard:
    """The IDs' evidence on each shard, in arrays of one length, by number of the shard.

    Attributes:
        count: IDs, duplicates included.
        first_ms: the earliest time, and ``last_ms`` the latest, in Unix milliseconds.
        gap_ms: the longest time between two IDs that follow each other, and ``gap_start_ms`` when it began.
        most_in_ms: the most IDs of one millisecond.
        run: the most ticks without a gap: a block, or a shard that gave all it had.
    """

    shard: Integers
    count: Integers
    first_ms: Integers
    last_ms: Integers
    gap_ms: Integers
    gap_start_ms: Integers
    most_in_ms: Integers
    run: Integers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdStats:
    """Statistics of many IDs; :func:`of` makes them.

    Attributes:
        count: IDs that the layout can tell about, duplicates included. ``old`` are those from before the
            cluster.
        duplicates: IDs that had come before.
        ahead: IDs whose time is after ``now``, and ``most_ahead_ms`` by how much at most.
        out_of_order: the share of all pairs that stand in another order than that of their times and numbers.
        is_sorted: whether none of several IDs stands before a smaller one; then their order says nothing.
        tells_clocks: whether their order says whose clock is off.
        per_second: IDs a second from the first to the last that ``series`` has; 0 if they are of one
            millisecond.
        series: counts by shard and interval, until now, and a minute more at most, and without a few IDs that
            are far from all others.
    """

    layout: Layout
    now: datetime
    count: int
    old: int
    duplicates: int
    ahead: int
    most_ahead_ms: int
    out_of_order: float
    is_sorted: bool
    tells_clocks: bool
    per_second: float
    shards: ByShard
    series: Series
    anomalies: list[Anomaly]

    @property
    def first(self) -> datetime | None:
        """When the earliest ID was born, or None without IDs."""
        return time_of(int(self.shards.first_ms.min())) if self.count else None

    @property
    def last(self) -> datetime | None:
        """When the latest ID was born, or None without IDs."""
        return time_of(int(self.shards.last_ms.max())) if self.count else None


def of(
    ids: npt.ArrayLike,
    layout: Layout = DEFAULT,
    *,
    now: datetime | None = None,
    old_ids_below: int | None = None,
) -> IdStats:
    """Return the evidence of IDs, given in the order of insertion if clocks are to be judged.

    ``old_ids_below`` is for clusters with adopted tables (``cluster.old_ids.rules.below``): positive IDs
    below it are counted apart. ``now`` is the time against which IDs are in the future; without it, the time
    of the call.

    Raises:
        BadArgument: not integers, or an ID that :meth:`Layout.decode` refuses; the message names the first
            such and its index among those that are not old.
    """
    now = now or datetime.now(UTC)
    if now.utcoffset() is None:
        raise BadArgument(f"{now.isoformat()} has no time zone: a time must be an aware datetime")
    given = np.asarray(ids).reshape(-1)
    if not given.size:
        given = given.astype(np.int64)
    old = 0
    if old_ids_below is not None and given.dtype.kind in "iu":
        is_old = (given >= 0) & (given < old_ids_below)
        old = int(is_old.sum())
        given = given[~is_old] if old else given
    parts = decode_array(layout, given)
    ms = parts.time.view(np.int64)
    numbers, row = _rows(parts.shard, layout)
    bits = given.astype(np.int64, copy=False).view(np.uint64)
    now_ms = (now - time_of(0)) // _MS
    by_shard, duplicates = _by_shard(numbers, row, bits, layout)
    out_of_order = pairs_out_of_order(bits)
    # Sorted IDs are so whatever the clocks said.
    tells_clocks = numbers.size >= _PEERS and 0 < out_of_order <= _MOST_OUT_OF_ORDER
    is_ahead = ms > now_ms
    ordered = np.sort(ms)
    ordered = ordered[: np.searchsorted(ordered, now_ms + DEFAULTS.future_ms, "right")]
    first, last = bounds_of(ordered) if ordered.size else (now_ms, now_ms)
    series = series_of(numbers, row, ms, first, last)
    anomalies = find(series, layout=layout, now=now) if ms.size else []
    anomalies += _future(by_shard, now_ms, DEFAULTS)
    anomalies += _outside(ordered, first, last)
    if tells_clocks:
        anomalies += _jumps(numbers, row, ms, DEFAULTS)
    return IdStats(
        layout=layout,
        now=now,
        count=given.size,
        old=old,
        duplicates=duplicates,
        ahead=int(is_ahead.sum()),
        most_ahead_ms=max(int(ms.max()) - now_ms, 0) if ms.size else 0,
        out_of_order=out_of_order,
        is_sorted=given.size > 1 and not out_of_order,
        tells_clocks=tells_clocks,
        per_second=int(series.counts.sum()) * 1000 / (last - first) if last > first else 0.0,
        shards=by_shard,
        series=series,
        anomalies=anomalies,
    )


_MS: Final = time_of(1) - time_of(0)


def _rows(shard: npt.NDArray[np.int32], layout: Layout) -> tuple[Integers, npt.NDArray[np.intp]]:
    """Return the shards that occur, and the place of each ID's shard among them."""
    occurs = np.zeros(layout.shard_limit, bool)
    occurs[shard] = True
    place = np.cumsum(occurs) - 1
    return np.flatnonzero(occurs).astype(np.int64), place[shard]


def _by_shard(
    numbers: Integers, row: npt.NDArray[np.intp], bits: npt.NDArray[np.uint64], layout: Layout
) -> tuple[ByShard, int]:
    # Shard above, tick below: sorting gives each shard's ticks in order.
    sequence_bits, tick_bits = layout.sequence_bits, layout.time_bits + layout.sequence_bits
    tick = (bits >> (layout.shard_bits + sequence_bits) << sequence_bits) | bits & (layout.sequence_limit - 1)
    key = np.sort((row.astype(np.uint64) << tick_bits) | tick)
    tick = (key & ((1 << tick_bits) - 1)).view(np.int64)
    start = (
        np.flatnonzero(np.r_[True, key[1:] >> tick_bits != key[:-1] >> tick_bits])
        if key.size
        else np.empty(0, np.intp)
    )
    count = np.diff(np.r_[start, key.size])
    ms = (tick >> sequence_bits) + layout.epoch_ms
    step = np.diff(tick, prepend=tick[:1])
    step[start] = -1
    gap = np.diff(ms, prepend=ms[:1])
    gap[start] = 0
    end = start + count - 1
    longest = _first_at(gap, start, count)
    by_shard = ByShard(
        shard=numbers,
        count=count,
        first_ms=ms[start],
        last_ms=ms[end],
        gap_ms=gap[longest],
        gap_start_ms=ms[np.maximum(longest - 1, start)],
        most_in_ms=_longest(gap == 0, start),
        run=_longest(step == 1, start),
    )
    return by_shard, int((step == 0).sum())


def _first_at(values: Integers, start: npt.NDArray[np.intp], count: Integers) -> npt.NDArray[np.intp]:
    """Where each group has its greatest value."""
    if not start.size:
        return start
    greatest = np.repeat(np.maximum.reduceat(values, start), count)
    places = np.flatnonzero(values == greatest)
    return places[np.searchsorted(places, start)]


def _longest(goes_on: npt.NDArray[np.bool_], start: npt.NDArray[np.intp]) -> Integers:
    """Return the longest run, in each group, of elements that each continue the one before."""
    if not start.size:
        return np.empty(0, np.int64)
    begins = ~goes_on
    begins[start] = True
    first = np.flatnonzero(begins)
    lengths = np.diff(np.r_[first, goes_on.size])
    return np.maximum.reduceat(lengths, np.searchsorted(first, start)).astype(np.int64)


def _outside(ordered: Integers, first_ms: int, last_ms: int) -> Iterator[Anomaly]:
    """Yield the IDs outside of the series, before it and after it."""
    before, after = np.searchsorted(ordered, first_ms), np.searchsorted(ordered, last_ms, "right")
    for far, where in ((ordered[:before], "before"), (ordered[after:], "after")):
        if far.size:
            yield Anomaly(
                kind=Kind.OUTSIDE,
                start=time_of(int(far[0])),
                end=time_of(int(far[-1])),
                value=float(far.size),
                expected=0.0,
                message=f"{far.size:,} ID{'s' * (far.size > 1)}, long {where} all others:"
                " left out of rates, bursts and silences",
            )


def _future(shards: ByShard, now_ms: int, bounds: Thresholds) -> Iterator[Anomaly]:
    for row in np.flatnonzero(shards.last_ms > now_ms + bounds.future_ms):
        lead = (int(shards.last_ms[row]) - now_ms) / 1000
        yield Anomaly(
            kind=Kind.FUTURE,
            shard=int(shards.shard[row]),
            start=time_of(int(shards.last_ms[row])),
            value=lead,
            expected=bounds.future_ms / 1000,
            message=f"its last ID is {span(lead)} ahead of now",
        )


def _jumps(
    numbers: Integers, row: npt.NDArray[np.intp], ms: Integers, bounds: Thresholds
) -> Iterator[Anomaly]:
    """Yield shards with several IDs in a row among others of another time."""
    off = against_neighbours(ms)
    bound = max(bounds.clock_ms, bounds.deviations * NORMAL * float(np.median(np.abs(off))))
    side = np.where(off > bound, 1, np.where(off < -bound, -1, 0))
    if not side.any():
        return
    affected = np.isin(row, np.unique(row[side != 0]))
    places = np.flatnonzero(affected)
    places = places[np.argsort(row[places], kind="stable")]
    its_row, its_side = row[places], side[places]
    begins = np.flatnonzero(np.r_[True, (its_row[1:] != its_row[:-1]) | (its_side[1:] != its_side[:-1])])
    lengths = np.diff(np.r_[begins, places.size])
    is_jump = (its_side[begins] != 0) & (lengths >= bounds.clock_ids)
    for first, length in zip(begins[is_jump], lengths[is_jump], strict=True):
        run = places[first : first + length]
        start, end = ms[run] - off[run], np.median(off[run])
        yield jump(
            int(numbers[row[run[0]]]), float(end), time_of(int(start.min())), time_of(int(start.max()))
        )
