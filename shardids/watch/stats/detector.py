"""The detector of anomalies in counts of IDs by shard and interval, in leads, and in what runs out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.watch.stats.series import Series

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Kind(StrEnum):
    """The kind of an anomaly."""

    HOT = "hot shard"
    BURST = "burst"
    SILENCE = "silence"
    CLOCK = "clock jump"
    FUTURE = "future"
    OUTSIDE = "outside"
    SEQUENCE = "sequence"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One thing that is unusual.

    Attributes:
        shard: its shard; None if it is of all shards together.
        start: when it begins, in UTC, and ``end`` when it ends; None where it has no time.
        value: the observed value, and ``expected`` the usual one, in the unit of ``message``.
        message: both in words.
    """

    kind: Kind
    shard: int | None = None
    start: datetime | None = None
    end: datetime | None = None
    value: float
    expected: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The bounds of the detector. A rule reports an anomaly that passes all of the rule's bounds.

    Attributes:
        chance: the highest probability of one false alarm by chance, per rule and call. It is divided by the
            number of places that the rule looks at (Bonferroni).
        ratio: the factor over the usual of a hot shard and a burst. Three is more than the difference of
            shards' shares by the hash of a key, and more than the change of a load in a quarter of a day.
        least_ids: the fewest IDs of a burst, and of a silent shard: fewer do not show its usual rate.
        deviations: deviations from the median; 1.4826 median absolute deviations are one, as in a normal
            distribution. Two of a thousand million values pass six.
        clock_ms: how far a shard's clock is from the others'. The generator itself differs by up to 16 ms
            ahead and 100 ms behind.
        clock_ids: the fewest IDs in a row, of one shard, that show it.
        future_ms: how far an ID is ahead of now. The usual draw goes up to a minute ahead.
        sequence_share: the used share of a shard's IDs per second in its busiest interval.
        layout_years: the years that the layout's time lasts.
    """

    chance: float = 1e-3
    ratio: float = 3.0
    least_ids: int = 20
    deviations: float = 6.0
    clock_ms: int = 1000
    clock_ids: int = 5
    future_ms: int = 60_000
    sequence_share: float = 0.8
    layout_years: float = 1.0


DEFAULTS: Final = Thresholds()


_TIMES: Final = ((1, "a second"), (60, "a minute"), (3600, "an hour"), (86_400, "a day"))
_UNITS: Final = ((365.2425 * 86_400, "years"), (86_400, "days"), (3600, "h"))


def span(seconds: float, digits: int = 1) -> str:
    """Return a length of time in the largest unit that it has two of: ``61.0 s``, ``3.2 h``, ``9.0 days``.

    ``digits`` is how many a figure in seconds has after the point.
    """
    for unit, name in _UNITS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.{digits}f} s"


def plain(number: float) -> str:
    """Return a number without an exponent: whole from 100 on, else of two decimals at most."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rate(per_second: float, unit: str) -> str:
    """Return a rate in the shortest unit with at least one ID: ``12 IDs a second``, ``3.4 IDs a day``."""
    seconds, name = next((one for one in _TIMES if per_second * one[0] >= 1), _TIMES[-1])
    return f"{plain(per_second * seconds)} {unit}s {name}"


def time_of(unix_ms: int) -> datetime:
    """Return the time in UTC, also of milliseconds that a float would round."""
    return _EPOCH + timedelta(milliseconds=int(unix_ms))


_PEERS: Final = 4
_AROUND: Final = 24
NORMAL: Final = 1.4826
"""How many median absolute deviations are one standard deviation of a normal distribution."""
_REPEATED: Final = 2
_APART: Final = 3
_LENGTHS: Final = (1, 6, 36)
_BLUR: Final = 1.5

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def find(
    series: Series,
    *,
    layout: Layout,
    now: datetime,
    leads_ms: npt.ArrayLike | None = None,
    thresholds: Thresholds = DEFAULTS,
) -> list[Anomaly]:
    """Return the anomalies, hot shards first, then by kind and time.

    ``leads_ms`` has for each row of ``series`` how far the shard's ticks are ahead of a clock that is one for
    all, if that is known. Shards are compared with each other only if there are four or more.

    Raises:
        BadArgument: ``leads_ms`` is not of as many shards as ``series``.
    """
    found = [
        *_hot(series, thresholds),
        *_bursts_of_any_length(series, thresholds),
        *_silences(series, thresholds),
        *_of_all(series, thresholds),
    ]
    if leads_ms is not None:
        leads = np.asarray(leads_ms, np.float64)
        if leads.shape != series.shards.shape:
            raise BadArgument(f"leads_ms must be {series.shards.size} numbers, not of shape {leads.shape}")
        found += _leads(series, leads, thresholds)
    return [*found, *limits(series, layout, now, thresholds)]


def _hot(series: Series, bounds: Thresholds) -> Iterator[Anomaly]:
    totals = series.counts.sum(axis=1).astype(np.float64)
    if totals.size < _PEERS or not totals.any():
        return
    # Its peers are the others that are used, if any: where most are empty, all with rows would be hot.
    rows = np.flatnonzero(totals) if np.count_nonzero(totals) > 1 else np.arange(totals.size)
    totals, whole, count = totals[rows], totals.sum(), rows.size
    usual = np.maximum(np.median(totals), (whole - totals) / (count - 1))
    scale = np.log1p(totals)
    off = scale - np.median(scale)
    bound = bounds.deviations * NORMAL * np.median(np.abs(off))
    is_hot = (totals >= bounds.ratio * usual) & (off > bound)
    is_hot &= poisson_tail(totals, usual) / series.batches[rows] < math.log(bounds.chance / count)
    for row in sorted(np.flatnonzero(is_hot), key=lambda one: -totals[one]):
        share, peers = totals[row] / whole, usual[row] / whole
        yield Anomaly(
            kind=Kind.HOT,
            shard=int(series.shards[rows[row]]),
            value=float(share),
            expected=float(peers),
            message=f"{share:.2%} of all {series.unit}s, "
            + (
                f"{totals[row] / usual[row]:.1f} times as many as its peers"
                if peers
                else "its peers have none"
            ),
        )


def _bursts_of_any_length(series: Series, bounds: Thresholds) -> list[Anomaly]:
    """Look at intervals of three lengths: a burst that is thin, or a long one, shows in longer ones."""
    found: list[Anomaly] = []
    for factor in _LENGTHS:
        for burst in _bursts(series.coarser(factor), bounds):
            same = [one for one in found if one.shard == burst.shard and _overlap(one, burst)]
            # One of a longer interval is blurred: it counts where it holds more.
            if sum(map(_excess, same)) * _BLUR < _excess(burst):
                found = [one for one in found if one not in same] + [burst]
    return found


def _overlap(one: Anomaly, other: Anomaly) -> bool:
    (start, end), (other_start, other_end) = _seconds(one), _seconds(other)
    return start < other_end and other_start < end


def _excess(burst: Anomaly) -> float:
    start, end = _seconds(burst)
    return (burst.value - burst.expected) * (end - start)


def _seconds(burst: Anomaly) -> tuple[float, float]:
    return (burst.start.timestamp() if burst.start else 0.0), (burst.end.timestamp() if burst.end else 0.0)


def _bursts(series: Series, bounds: Thresholds) -> Iterator[Anomaly]:
    """More of an interval's IDs than the shard's share, and more than in the intervals around it."""
    counts = series.counts.astype(np.float64)
    if counts.shape[0] < _PEERS or counts.shape[1] < _PEERS:
        return
    of_all, own = counts.sum(axis=0), counts.sum(axis=1)
    whole = own.sum()
    outside = own[:, None] - counts
    others = of_all[None, :] - counts
    others_outside = whole - own[:, None] - others
    with np.errstate(divide="ignore", invalid="ignore"):
        share = outside / (outside + others_outside)
        usual = outside * others / others_outside
    is_more = (counts >= bounds.ratio * usual) & (others_outside > 0)
    rows, columns = np.nonzero(is_more & (counts >= bounds.least_ids))
    tail = binomial_tail(
        counts[rows, columns], np.broadcast_to(of_all, counts.shape)[rows, columns], share[rows, columns]
    )
    is_rare = tail / series.batches[rows] < math.log(bounds.chance / counts.size / len(_LENGTHS))
    places: dict[int, list[int]] = {}
    for row, column in zip(rows[is_rare].tolist(), columns[is_rare].tolist(), strict=True):
        if counts[row, column] >= bounds.ratio * around(counts[row], column):
            places.setdefault(row, []).append(column)
    for row, all_columns in places.items():
        for run in _runs(all_columns):
            yield _burst(series, run, int(series.shards[row]), counts[row], usual[row])


def _burst(series: Series, run: tuple[int, int], shard: int | None, counts: Floats, usual: Floats) -> Anomaly:
    first, last = run
    seconds = (last - first + 1) * series.interval_ms / 1000
    seen, expected = counts[first : last + 1].sum() / seconds, usual[first : last + 1].sum() / seconds
    then = rate(expected, series.unit) if expected else "none"
    return Anomaly(
        kind=Kind.BURST,
        shard=shard,
        start=time_of(series.start_of(first)),
        end=time_of(series.start_of(last + 1)),
        value=float(seen),
        expected=float(expected),
        message=f"{rate(seen, series.unit)}, {then} are usual then",
    )


def _silences(series: Series, bounds: Thresholds) -> Iterator[Anomaly]:
    """No ID of a shard while others go on, for longer than chance and the shard's own habits explain."""
    if series.shards.size < _PEERS:
        return
    so_far = np.r_[0, np.cumsum(series.counts.sum(axis=0))].astype(np.float64)
    bound = math.log(bounds.chance / series.counts.size)
    for row in range(series.shards.size):
        used = np.flatnonzero(series.counts[row])
        own = float(series.counts[row].sum())
        if own < bounds.least_ids:
            continue
        for first, after, others in _longest_gaps(used, so_far, series.intervals):
            share = own / (so_far[-1] - others)
            if share < 1 and others * math.log1p(-share) < bound * series.batches[row]:
                expected = own / (so_far[-1] - others - own) * others
                yield _silence(series, first, after, int(series.shards[row]), expected)


def _longest_gaps(used: npt.NDArray[np.intp], so_far: Floats, end: int) -> Iterator[tuple[int, int, float]]:
    """Yield the two gaps with most of the others' IDs, if they are twice as large as any third."""
    after = np.r_[used[1:], end]
    others = so_far[after] - so_far[used + 1]
    order = np.argsort(others)[::-1]
    third = others[order[_REPEATED]] if order.size > _REPEATED else 0.0
    for place in order[:_REPEATED]:
        if others[place] > 2 * third:
            yield int(used[place]) + 1, int(after[place]), float(others[place])


def _silence(series: Series, first: int, after: int, shard: int | None, expected: float) -> Anomaly:
    is_over = after < series.intervals
    return Anomaly(
        kind=Kind.SILENCE,
        shard=shard,
        start=time_of(series.start_of(first)),
        end=time_of(series.start_of(after)) if is_over else None,
        value=0.0,
        expected=expected,
        message=f"no {series.unit}, where {expected:,.0f} are usual{'' if is_over else '; it has not ended'}",
    )


def _of_all(series: Series, bounds: Thresholds) -> Iterator[Anomaly]:
    """Yield bursts and silences of all shards together, against the intervals around."""
    of_all = series.counts.sum(axis=0).astype(np.float64)
    if of_all.size < _AROUND:
        return
    # Not of empty ones: what follows a silence is no burst.
    usual = np.array([around(of_all, place, at_least=1) for place in range(of_all.size)])
    # IDs that come together count once: a bound on a logarithm is that many times as low.
    rare = math.log(bounds.chance / of_all.size) * series.batch_of_all
    is_burst = (of_all >= np.maximum(bounds.least_ids, bounds.ratio * usual)) & (usual > 0)
    is_burst &= poisson_tail(of_all, usual) < rare
    for run in _runs(np.flatnonzero(is_burst).tolist()):
        yield _burst(series, run, None, of_all, usual)
    used = np.flatnonzero(of_all)
    gaps = np.diff(used) - 1
    if not gaps.size:
        return
    third = np.sort(gaps)[-_REPEATED - 1] if gaps.size > _REPEATED else 0
    for place in np.flatnonzero(gaps > 2 * third):
        first, after = int(used[place]) + 1, int(used[place + 1])
        beside = np.r_[of_all[max(0, first - _AROUND) : first], of_all[after : after + _AROUND]]
        if beside.size >= _AROUND and -float(np.median(beside)) * (after - first) < rare:
            yield _silence(series, first, after, None, float(np.median(beside)) * (after - first))


def _leads(series: Series, leads: Floats, bounds: Thresholds) -> Iterator[Anomaly]:
    if leads.size < _PEERS:
        return
    median = float(np.median(leads))
    off = leads - median
    bound = max(bounds.clock_ms, bounds.deviations * NORMAL * float(np.median(np.abs(off))))
    for row in np.flatnonzero(np.abs(off) > bound):
        yield jump(int(series.shards[row]), float(off[row]), None, None)


def jump(shard: int, off_ms: float, start: datetime | None, end: datetime | None) -> Anomaly:
    """Return that a shard's time is so far from that of its peers."""
    where = "ahead of" if off_ms > 0 else "behind"
    return Anomaly(
        kind=Kind.CLOCK,
        shard=shard,
        start=start,
        end=end,
        value=off_ms,
        expected=0.0,
        message=f"{span(abs(off_ms) / 1000)} {where} the others"
        + ("; up to 20 s ahead is usual after a restart" if 10_000 <= off_ms <= 20_100 else ""),
    )


def around(counts: Floats, place: int, *, at_least: int = 0) -> float:
    """Return the median of the 24 intervals before a place and the 24 after it, of those with so many."""
    beside = np.r_[counts[max(0, place - _AROUND) : place], counts[place + 1 : place + 1 + _AROUND]]
    beside = beside[beside >= at_least]
    return float(np.median(beside)) if beside.size else 0.0


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of places whose neighbours are at most three apart."""
    first = last = None
    for place in places:
        if first is None or last is None:
            first = last = place
        elif place <= last + _APART:
            last = place
        else:
            yield first, last
            first = last = place
    if first is not None and last is not None:
        yield first, last


def poisson_tail(seen: Floats, usual: Floats) -> Floats:
    """Return the logarithm of a bound (Chernoff's) of how probable it is to see so many or more."""
    mean = np.maximum(usual, 1e-9)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.where(seen > 0, seen - mean - seen * np.log(seen / mean), 0.0)
    return np.where(seen > mean, bound, 0.0)


def binomial_tail(seen: Floats, of: Floats, share: Floats) -> Floats:
    """Return the logarithm of a bound (Chernoff's) of how probable so many or more of ``of`` are."""
    part = seen / np.maximum(of, 1)
    share = np.clip(share, 1e-12, 1 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(part < 1, (1 - part) * np.log((1 - part) / (1 - share)), 0.0)
        bound = -of * (part * np.log(part / share) + rest)
    return np.where(part > share, bound, 0.0)


_WEEK_MS: Final = 604_800_000
_LEAST_WEEKS: Final = 4
_FORESIGHT: Final = 4
_RISING: Final = 0.9
_DAYS_A_YEAR: Final = 365.2425


def limits(series: Series, layout: Layout, now: datetime, bounds: Thresholds) -> Iterator[Anomaly]:
    """Yield shards near their IDs a second, growth that leads there, and a layout whose time ends."""
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
    """Return by how much the logarithm of a week's IDs rises (Theil and Sen), or None if that is unknown.

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
