"""Drawing keys without a table, one by one and many at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from shardids.baselines import Scheme, Servers
from shardids.compare.results import Draws
from shardids.compare.sizes import Sizes

_WARM_UP = 20


def measure_draws(
    schemes: Mapping[str, Scheme], servers: Servers, sizes: Sizes, say: Callable[[str], None]
) -> dict[str, Draws]:
    """One client of the first node; rounds are interleaved, so that a slow moment hits all alike."""
    single: dict[str, list[int]] = {name: [] for name in schemes}
    many: dict[str, list[float]] = {name: [] for name in schemes}
    for round_ in range(1, sizes.rounds + 1):
        for name, scheme in schemes.items():
            say(f"draws, round {round_} of {sizes.rounds}: {scheme.about.title}")
            with scheme.open(servers) as source:
                for _ in range(_WARM_UP):
                    source.draw()
                times = [_timed(source.draw) for _ in range(sizes.draws)]
                at_once = _timed(lambda: source.draw_many(sizes.many))
            single[name] += times
            many[name].append(at_once / sizes.many / 1000)
    return {
        name: Draws(
            draws=len(single[name]),
            mean_us=statistics.fmean(single[name]) / 1000,
            quantiles_us=_quantiles_us(single[name]),
            many_us=statistics.median(many[name]),
            many=sizes.many,
        )
        for name in schemes
    }


def _timed(draw: Callable[[], object]) -> int:
    before = time.perf_counter_ns()
    draw()
    return time.perf_counter_ns() - before


def _quantiles_us(times_ns: list[int]) -> list[float]:
    inner = statistics.quantiles(times_ns, n=100, method="inclusive")
    return [ns / 1000 for ns in (min(times_ns), *inner, max(times_ns))]
