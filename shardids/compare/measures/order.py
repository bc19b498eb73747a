"""Compares the order of keys that several clients draw with the time at which they draw them."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shardids.compare.measures.measuring import Measuring
from shardids.compare.measures.sizes import PACED_CLIENTS
from shardids.compare.results import Order, Point
from shardids.compare.schemes import Servers, scheme_of

_EVERY_NS: Final = 1_000_000
_POINTS: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A key as an integer, and when its draw began and ended: ns of the system's monotonic clock."""

    key: int
    begun_ns: int
    ended_ns: int
    node: int


def measure_order(name: str, run: Measuring) -> Order:
    """Measures clients of two nodes that draw at an even pace."""
    jobs = [(name, run.servers, node, run.sizes.paced_s) for node in PACED_CLIENTS]
    return order_of([draw for draws in run.clients.run(_paced, jobs) for draw in draws])


def order_of(draws: Sequence[Draw]) -> Order:
    """Returns how the order of keys agrees with that of time; of two simultaneous draws neither is first."""
    by_begin = sorted(draws, key=lambda draw: draw.begun_ns)
    by_end = sorted(draws, key=lambda draw: draw.ended_ns)
    first_ns, last_ns = by_begin[0].begun_ns, by_end[-1].ended_ns
    pairs = wrong = ended = 0
    there: list[int] = []
    for draw in by_begin:
        while by_end[ended].ended_ns < draw.begun_ns:
            insort(there, by_end[ended].key)
            ended += 1
        pairs += ended
        wrong += ended - bisect_right(there, draw.key)
    late_ms = sorted(_late_ms(draws))
    return Order(
        keys=len(draws),
        pairs=pairs,
        out_of_order_percent=100 * wrong / max(pairs, 1),
        late_p99_ms=late_ms[len(late_ms) * 99 // 100],
        late_most_ms=late_ms[-1],
        lasted_ms=(last_ns - first_ns) / 1e6,
        points=_points(by_end, first_ns),
    )


def _late_ms(draws: Sequence[Draw]) -> Iterator[float]:
    """Returns for each draw how long before its start a greater key had existed; 0 if none had."""
    earliest_ns: float = math.inf
    by_key = sorted(draws, key=lambda draw: draw.key, reverse=True)
    for _, alike in itertools.groupby(by_key, key=lambda draw: draw.key):
        group = list(alike)
        for draw in group:
            yield max(0.0, draw.begun_ns - earliest_ns) / 1e6
        earliest_ns = min(earliest_ns, *(draw.ended_ns for draw in group))


def _points(draws: Sequence[Draw], first_ns: int) -> list[Point]:
    lowest = min(draw.key for draw in draws)
    span = max(draw.key for draw in draws) - lowest or 1
    shown = sorted(random.Random(1).sample(range(len(draws)), min(_POINTS, len(draws))))  # noqa: S311  -- a picture
    return [
        Point(
            ms=round((draws[number].ended_ns - first_ns) / 1e6, 3),
            key=round((draws[number].key - lowest) / span, 5),
            node=draws[number].node,
        )
        for number in shown
    ]


@contextlib.contextmanager
def _paced(name: str, servers: Servers, node: int, seconds: float) -> Iterator[Callable[[], list[Draw]]]:
    with scheme_of(name).open(servers, node) as source:
        source.draw()

        def go() -> list[Draw]:
            draws = []
            first_ns = time.monotonic_ns()
            for due_ns in range(first_ns, first_ns + round(seconds * 1e9), _EVERY_NS):
                time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
                begun_ns = time.monotonic_ns()
                key = source.draw()
                ended_ns = time.monotonic_ns()
                draws.append(Draw(key=int(key), begun_ns=begun_ns, ended_ns=ended_ns, node=node))
            return draws

        yield go
