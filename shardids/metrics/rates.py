"""What is drawn from shards, and how far they are taken ahead: the difference of two looks at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from shardids.ids.layout import Layout
from shardids.metrics.facts import Shard

INTERVAL_S: Final = 0.5
"""The shortest time between two looks whose difference is a rate."""
_STEP_MS: Final = 16
"""A shard that follows the clock is ahead of it by less: the increment of its ``id_offset``."""


def drawn(before: Shard, after: Shard) -> int:
    """Returns how many ticks were drawn one by one between two looks; 0 if the sequences are others now.

    A draw takes one for its ID, and another before it if the shard lags. Blocks raise the offset, and so do
    ``after=`` and a new incarnation: the sequences can't tell them apart, so none of them counts here.
    """
    return after.drawn - before.drawn if _is_later(before, after) else 0


def advanced_ms(before: Shard, after: Shard, layout: Layout) -> int:
    """Returns how far all but single draws took a shard ahead of the clock between two looks, in ms.

    Of a shard that leads at both looks, it is what its offset rose by. Of one that leads at the second alone,
    part of that may have followed the clock: it is what the shard leads by then and did not draw. What the
    clock has caught up with before the second look is not seen.
    """
    rise_ms = (after.offset_ms or 0) - (before.offset_ms or 0)
    if rise_ms <= 0 or not _is_later(before, after):
        return 0
    leads = before.lead_ms(layout), after.lead_ms(layout)
    if leads[0] is None or leads[1] is None or leads[1] <= _STEP_MS:
        return 0
    if leads[0] <= _STEP_MS:
        own_ms = leads[1] - (drawn(before, after) >> layout.sequence_bits)
        rise_ms = min(rise_ms, own_ms) if own_ms > _STEP_MS else 0
    return max(0, rise_ms)


def _is_later(before: Shard, after: Shard) -> bool:
    return before.counter == after.counter and after.drawn >= before.drawn


class NodeRates:
    """The rates of a node's shards, from look to look.

    Attributes:
        drawn: how many ticks were drawn since the first look.
        advanced_ms: how far the shards were taken ahead since then, all together, in ms.
        per_second: what was drawn from each shard a second, without those from which nothing was; ``None``
            before the second look.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.advanced_ms = 0
        self.per_second: Mapping[int, float] | None = None
        self._looked_at: float | None = None
        self._before: dict[int, tuple[float, Shard]] = {}

    def look(self, shards: Sequence[Shard], at: float, layout: Layout) -> None:
        """Takes a look at ``at``, in seconds of a clock that never steps. One too soon changes nothing.

        A shard that is not seen this time counts from its last look on when it is seen again.
        """
        seconds = None if self._looked_at is None else at - self._looked_at
        if seconds is not None and seconds < INTERVAL_S:
            return
        per_second: dict[int, float] = {}
        for shard in shards:
            if shard.offset_ms is None:
                continue
            if shard.shard in self._before:
                then, before = self._before[shard.shard]
                self.advanced_ms += advanced_ms(before, shard, layout)
                if count := drawn(before, shard):
                    self.drawn += count
                    per_second[shard.shard] = count / (at - then)
            self._before[shard.shard] = at, shard
        if seconds is not None:
            self.per_second = per_second
        self._looked_at = at
