"""What IDs cost in Python, without a server: taking one from a block, decoding one, NumPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from benchmarks.report import Section, Timed, figure, interleaved, ratio, seconds
from shardids.client.blocks import IdBlock
from shardids.ids.arrays import decode_array
from shardids.ids.layout import DEFAULT

IDS = 1_000_000
ARRAY = 10_000_000


def run(rounds: int) -> Section:
    """Measure each on one core."""
    block, large = (
        IdBlock(layout=DEFAULT, shard=5, first_tick=90_000_000_000 << 10, size=size) for size in (IDS, ARRAY)
    )
    some = list(block[: IDS // 10])
    array = np.fromiter(large, np.int64, ARRAY)
    m = interleaved(
        {
            "an ID from a block": _each(IDS, lambda: deque(block, maxlen=0)),
            "decode": _each(len(some), lambda: deque(map(DEFAULT.decode, some), maxlen=0)),
            f"decode_array, {ARRAY:,} IDs": _each(ARRAY, lambda: decode_array(DEFAULT, array)),
            "memory for its results, filled": _each(ARRAY, _fill),
        },
        rounds=rounds,
        unit="µs an ID",
    )
    taken, _, decoded, filled = m.values()
    return Section(
        title="IDs in Python",
        conditions=f"One core, {rounds} rounds. The block holds {IDS:,} IDs, iterated over. What"
        " decode_array returns has 24 bytes for the 8 of each ID.",
        measures=tuple(m.values()),
        ratios=(
            figure("an ID from a block, µs", taken.median, at_most=0.3),
            figure("decode_array, s for 50 million", decoded.median * 50, at_most=1),
            ratio(decoded, filled, at_most=3),
        ),
    )


def _fill() -> None:
    for kind in (np.int64, np.int64, np.int32, np.int32):
        np.empty(ARRAY, kind).fill(1)


def _each(ids: int, work: Callable[[], object]) -> Timed:
    return lambda: seconds(work) / ids * 1e6
