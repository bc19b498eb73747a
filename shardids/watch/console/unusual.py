"""Unusual patterns in the rates of the last hour: the detector of ``watch.stats``, fed with readings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardids.watch.console.watching import Point, Seen
from shardids.watch.stats.detector import Anomaly, Kind, find
from shardids.watch.stats.series import Series

LEAST_INTERVALS: Final = 10
"""Of fewer, nothing is said."""
_INTERVAL_S: Final = 60
_READINGS: Final = 4
"""How many readings an interval has at least, so that a late one leaves no hole."""
_MISSED: Final = 3
"""From so many intervals between readings on, what lies between them was not seen."""
_LEAST_PART: Final = 0.5
_STEADY: Final = 0.9
_TOGETHER: Final = 3
"""From so many shards of a node on, the same of each is said once."""
_MOST_TOLD: Final = 20
_TO_DO: Final[Mapping[Kind, str]] = {
    Kind.HOT: "Find the key or the job that writes to it, and move the key, or the shard. Unattended:"
    " shardids rebalance --watch",
    Kind.BURST: "If no import and no job explains it, look for what wrote then.",
    Kind.SILENCE: "If nobody has stopped writing, look at the application, and run shardids doctor.",
    Kind.CLOCK: "Look at the skew of its node above, and at the time service of the node's machine. If its"
    " clock is right, blocks took it ahead, or sessions with after= went past an ID that led: see why the"
    " shard or the node that issued it did.",
    Kind.SEQUENCE: "Write to more shards: ahead of the clock by max_ahead, draws are refused.",
    Kind.LAYOUT: "Prepare another layout: shardids plan",
}

Floats = npt.NDArray[np.float64]
Values = dict[str, Any]


class Unusual:
    """The detector's findings, once per interval, with the newest reading.

    Attributes:
        values: for the page; ``looked_s``, how much time was looked at, is ``None`` while it is too short.
    """

    def __init__(self) -> None:
        self.values: Values = {"looked_s": None, "found": []}
        self._interval: int | None = None

    def look(self, seen: Seen, points: Sequence[Point], interval_s: float) -> None:
        """Judge anew if an interval has ended since."""
        interval = int(seen.at // _length_s(interval_s))
        if seen.known is None or interval == self._interval:
            return
        self._interval = interval
        node_of = nodes_of(seen)
        series = series_of_rates(points, node_of, interval_s)
        if series is None:
            self.values = {"looked_s": None, "found": []}
            return
        found = find(
            series,
            layout=seen.known.layout,
            now=datetime.fromtimestamp(seen.at, UTC),
            leads_ms=leads_ms(seen, node_of, series.shards.tolist()),
        )
        told = [one for one in found if breaks_habit(one, series)]
        looked_s = series.intervals * series.interval_ms // 1000
        self.values = {"looked_s": looked_s, "found": sentences(told, node_of)}


def nodes_of(seen: Seen) -> dict[int, str]:
    """Return the node of each shard that issues IDs, as far as is known.

    Other parts of the page show fenced, moved and missing shards, so their silence is not reported.
    """
    return {
        shard: name
        for (name, state), shards in (seen.known.placed if seen.known else {}).items()
        if state == "active" and name in seen.nodes
        for shard in shards
        if (there := seen.nodes[name].shards.get(shard)) is not None and there.state == "active"
    }


def series_of_rates(points: Sequence[Point], node_of: Mapping[int, str], interval_s: float) -> Series | None:
    """Return the draws of each shard in whole intervals of the points' time.

    ``None`` if there are fewer than :data:`LEAST_INTERVALS`. Readings that missed a node do not count. The
    first reading after them does not count either: its rate is a mean over the gap. If less than half of an
    interval was read, a shard gets its usual value there; shards read in less than half of the intervals are
    left out.
    """
    length_s = _length_s(interval_s)
    first_s = math.ceil(points[0].time / length_s) * length_s if points else 0
    intervals = int((points[-1].time - first_s) // length_s) if points else 0
    if intervals < LEAST_INTERVALS or not node_of:
        return None
    shards = np.array(sorted(node_of), np.int64)
    names = sorted(set(node_of.values()))
    node = np.array([names.index(node_of[shard]) for shard in shards.tolist()])
    ticks, squares = np.zeros((shards.size, intervals)), np.zeros(shards.size)
    read_s, of_all = np.zeros((len(names), intervals)), [1.0]
    for before, point in pairwise(points):
        place, seconds = int((point.time - first_s) // length_s), point.time - before.time
        # This machine's clock may have been set, or the console may have slept.
        if not (0 <= place < intervals and 0 < seconds < _MISSED * interval_s + 1):
            continue
        is_read = np.array([_is_read(before, name) and _is_read(point, name) for name in names])
        read_s[is_read, place] += seconds
        drawn = _rates(point, shards) * is_read[node] * seconds
        ticks[:, place] += drawn
        squares += drawn**2
        of_all.append(drawn.sum())
    together = np.array(of_all)
    series = Series(
        shards=shards,
        counts=np.rint(ticks).astype(np.int64),
        start_ms=first_s * 1000,
        interval_ms=length_s * 1000,
        batch=np.maximum(1.0, squares / np.maximum(ticks.sum(axis=1), 1.0)),
        batch_of_all=max(1.0, float((together**2).sum() / together.sum())),
        unit="ID",
    )
    return _filled(series, (read_s / length_s)[node])


def _rates(point: Point, shards: npt.NDArray[np.int64]) -> Floats:
    """Return the rates of these shards at a point, in their order."""
    found = np.zeros(1 << 16)
    found[np.asarray(point.shards)] = np.asarray(point.rates)
    return np.asarray(found[shards])


def _is_read(point: Point, node: str) -> bool:
    return point.nodes.get(node) is not None and node not in point.incomplete


def _length_s(interval_s: float) -> int:
    return _INTERVAL_S * max(1, math.ceil(_READINGS * interval_s / _INTERVAL_S))


def _filled(series: Series, part: Floats) -> Series | None:
    """Fill the gaps between readings; ``part`` is the share of each interval that was read."""
    is_known = part >= _LEAST_PART
    kept = is_known.mean(axis=1) >= _LEAST_PART
    if not kept.any():
        return None
    is_known = is_known[kept]
    ticks = np.where(is_known, series.counts[kept] / np.where(is_known, part[kept], 1.0), 0.0)
    mean = ticks.sum(axis=1) / is_known.sum(axis=1)
    usual = (is_known * mean[:, None]).sum(axis=0)
    level = np.where(usual > 0, ticks.sum(axis=0) / np.where(usual > 0, usual, 1.0), 1.0)
    counts = np.rint(np.where(is_known, ticks, mean[:, None] * level)).astype(np.int64)
    return replace(series, shards=series.shards[kept], counts=counts, batch=series.batches[kept])


def breaks_habit(one: Anomaly, series: Series) -> bool:
    """Return whether a burst or a silence is of steady shards: an hour is too short to know others' habits.

    Steady shards have ticks in half of the intervals, and silent ones in nearly all others than the silence.
    """
    if one.kind not in (Kind.BURST, Kind.SILENCE):
        return True
    counts = series.counts if one.shard is None else series.counts[series.shards == one.shard]
    is_used = counts.sum(axis=0) > 0
    if is_used.mean() < _LEAST_PART or one.kind is Kind.BURST or one.start is None:
        return bool(is_used.mean() >= _LEAST_PART)
    starts_s = series.start_ms / 1000 + np.arange(series.intervals) * series.interval_ms / 1000
    is_silent = starts_s >= one.start.timestamp()
    if one.end is not None:
        is_silent &= starts_s < one.end.timestamp()
    return bool(is_used[~is_silent].mean() >= _STEADY)


def leads_ms(seen: Seen, node_of: Mapping[int, str], shards: Sequence[int]) -> Floats | None:
    """Return how far each shard's ticks are ahead of this machine's clock; ``None`` if no node was read.

    The ticks of an idle shard lag behind its server's clock and follow it with the next draw, so it counts
    with that clock. An unknown shard counts as most do.
    """
    leads: dict[int, float] = {}
    for shard in shards:
        node = seen.nodes[node_of[shard]]
        if not node.up or node.answer is None or node.answer.clock is None or seen.known is None:
            continue
        lead = node.shards[shard].lead_ms(seen.known.layout)
        leads[shard] = max(0, lead or 0) + node.answer.clock.offset_s * 1000
    if not leads:
        return None
    usual = median(leads.values())
    return np.array([leads.get(shard, usual) for shard in shards])


def sentences(found: Iterable[Anomaly], node_of: Mapping[int, str]) -> list[Values]:
    """Return a sentence for each; only one, of the farthest, if many shards of a node have the same."""
    groups: dict[tuple[Kind, str | None], list[Anomaly]] = {}
    for one in found:
        node = None if one.shard is None else node_of.get(one.shard)
        groups.setdefault((one.kind, node), []).append(one)
    told: list[Values] = []
    for (kind, node), same in groups.items():
        shards = {one.shard for one in same}
        worst = max(same, key=lambda one: abs(one.value - one.expected))
        many = len(shards) if node is not None and len(shards) >= _TOGETHER else None
        told += [_told(one, kind, node, many) for one in ([worst] if many else same)]
    return told[:_MOST_TOLD]


def _told(one: Anomaly, kind: Kind, node: str | None, shards: int | None) -> Values:
    return {
        "kind": kind.value,
        "shard": one.shard,
        "node": node,
        "shards": shards,
        "start": one.start and one.start.timestamp(),
        "end": one.end and one.end.timestamp(),
        "says": one.message,
        "to_do": _TO_DO.get(kind),
    }
