"""The rates of the last hour, in memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HISTORY_S: Final = 3600.0
"""How far back the rates are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The rates at one time, in ticks a second.

    Attributes:
        time: in seconds since 1970.
        nodes: of each node; ``None`` where it did not answer, or was read for the first time.
        shards: numbers of the shards that used any, in order, and ``rates`` theirs.
        incomplete: nodes that did not tell of all their shards.
        unread: numbers of the shards whose rate is not known, in order.
    """

    time: float
    nodes: Mapping[str, float | None]
    shards: array[int]
    rates: array[float]
    incomplete: frozenset[str] = frozenset()
    unread: array[int]


class History:
    """The points of the last hour, oldest first; one thread adds, others read."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()

    def add(
        self,
        time: float,
        nodes: Mapping[str, float | None],
        shards: Mapping[int, float],
        incomplete: frozenset[str] = frozenset(),
        unread: Iterable[int] = (),
    ) -> None:
        """Adds what was read at a time."""
        numbers = sorted(shards)
        # This machine's clock was set back: times after now were wrong, and would be out of order.
        while self._points and self._points[-1].time >= time:
            self._points.pop()
        self._points.append(
            Point(
                time=time,
                nodes=dict(nodes),
                shards=array("H", numbers),
                rates=array("f", [shards[shard] for shard in numbers]),
                incomplete=incomplete,
                unread=array("H", sorted(unread)),
            )
        )
        while self._points[0].time < time - HISTORY_S:
            self._points.popleft()

    def points(self) -> Sequence[Point]:
        """Returns all points as they are now."""
        return list(self._points)


def rate_of(point: Point, shard: int) -> float | None:
    """Returns the rate of a shard at a point; 0 where it used no ticks, ``None`` where it was not read."""
    if (place := _place(point.shards, shard)) is not None:
        return point.rates[place]
    return 0.0 if _place(point.unread, shard) is None else None


def _place(numbers: array[int], number: int) -> int | None:
    place = bisect_left(numbers, number)
    return place if place < len(numbers) and numbers[place] == number else None
