"""Measures draws without a table, one by one and many at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from shardids.compare.measures.measuring import Measuring
from shardids.compare.results import Draws
from shardids.compare.schemes import Scheme

_WARM_UP = 20


def measure_draws(run: Measuring) -> dict[str, Draws]:
    """Measures one client of the first node."""
    found = run.rounds("draws", run.sizes.rounds, lambda name: _round(run.schemes[name], run))
    return {
        name: Draws(
            draws=sum(len(single) for single, _ in rounds),
            quantiles_us=_quantiles_us([time_ns for single, _ in rounds for time_ns in single]),
            many_us=statistics.median(many_us for _, many_us in rounds),
            many=run.sizes.many,
        )
        for name, rounds in found.items()
    }


def _round(scheme: Scheme, run: Measuring) -> tuple[list[int], float]:
    """Returns the times of single draws in ns, and the time per key in µs when many are drawn at once."""
    with scheme.open(run.servers) as source:
        for _ in range(_WARM_UP):
            source.draw()
        single = [_timed(source.draw) for _ in range(run.sizes.draws)]
        return single, _timed(lambda: source.draw_many(run.sizes.many)) / run.sizes.many / 1000


def _timed(draw: Callable[[], object]) -> int:
    before = time.perf_counter_ns()
    draw()
    return time.perf_counter_ns() - before


def _quantiles_us(times_ns: list[int]) -> list[float]:
    inner = statistics.quantiles(times_ns, n=100, method="inclusive")
    return [ns / 1000 for ns in (min(times_ns), *inner, max(times_ns))]
