"""The disorder of a sequence, and the shards whose IDs stand at the wrong time in it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_WINDOW: Final = 33
_STRIDE: Final = 8

Integers = npt.NDArray[np.int64]


def pairs_out_of_order(values: npt.NDArray[np.uint64]) -> float:
    """Return the share of all pairs whose first is greater than its second, from 0 (sorted) to 1 (reversed).

    Equal ones are in order.
    """
    count = values.size
    if count < 2 or bool((values[1:] >= values[:-1]).all()):
        return 0.0
    bits = (count - 1).bit_length()
    # Filled up to a power of two with what is in order.
    rank: npt.NDArray[np.signedinteger] = np.arange(1 << bits, dtype=np.int32 if bits < 31 else np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(count, dtype=rank.dtype)
    wrong = 0
    # From the highest bit down. In front of each step, the ranks are grouped by the bits above, in the order
    # of the sequence within a group; a pair is counted at the highest bit in which its ranks differ.
    for bit in range(bits - 1, -1, -1):
        half, groups = 1 << bit, 1 << (bits - bit - 1)
        is_upper = (rank & half) != 0
        uppers = np.flatnonzero(is_upper)
        in_order = (
            groups * (half * half + half * (half - 1) // 2) + groups * (groups - 1) // 2 * 2 * half * half
        )
        wrong += in_order - int(uppers.sum())
        halves = rank[~is_upper].reshape(groups, half), rank[uppers].reshape(groups, half)
        rank = np.concatenate(halves, axis=1).reshape(-1)
    return wrong / (count * (count - 1) // 2)


def against_neighbours(ms: Integers) -> Integers:
    """Return how far each time in a sequence is from those around it, in ms.

    It is 0 from the lowest to the highest of three medians, of the nearest windows of 33: so everywhere if
    the sequence is sorted, however unevenly.
    """
    if ms.size < 2 * _WINDOW:
        return np.zeros_like(ms)
    windows = np.lib.stride_tricks.sliding_window_view(ms, _WINDOW)[::_STRIDE]
    middle = _WINDOW // 2
    centre = np.partition(windows, middle, axis=1)[:, middle]
    near = np.clip((np.arange(ms.size) - middle + _STRIDE // 2) // _STRIDE, 0, centre.size - 1)
    low = np.r_[ms[:middle].min(), centre, ms[-middle:].max()]
    three = np.stack([low[:-2], centre, low[2:]])
    lowest, highest = three.min(axis=0)[near], three.max(axis=0)[near]
    return np.where(ms > highest, ms - highest, np.where(ms < lowest, ms - lowest, 0))
