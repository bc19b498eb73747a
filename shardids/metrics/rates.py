"""How many ticks shards use: the difference of two looks at their generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from shardids.ids.layout import Layout
from shardids.metrics.facts import Shard

INTERVAL_S: Final = 0.5
"""The shortest time between two looks whose difference is a rate."""
_STEP_MS: Final = 16
"""A shard that follows the clock is ahead of it by less: the increment of its ``id_offset``."""


def used(before: Shard, after: Shard, layout: Layout) -> int:
    """Returns how many ticks a shard has used between two looks; 0 if its sequences are others now.

    A draw uses one for its ID, and another before it if the shard lags. A block is seen only while the shard
    is ahead of the clock: then nothing but blocks raises its offset.
    """
    if before.counter != after.counter or after.drawn < before.drawn:
        return 0
    drawn = after.drawn - before.drawn
    leads = before.lead_ms(layout), after.lead_ms(layout)
    if all(lead is not None and lead > _STEP_MS for lead in leads):
        drawn += max(0, (after.offset_ms or 0) - (before.offset_ms or 0)) << layout.sequence_bits
    return drawn


class NodeRates:
    """The rates of a node's shards, from look to look.

    Attributes:
        total: how many ticks were used since the first look.
        per_second: what each shard uses a second, without those that use none; ``None`` before the
            second look.
    """

    def __init__(self) -> None:
        self.total = 0
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
                if count := used(before, shard, layout):
                    self.total += count
                    per_second[shard.shard] = count / (at - then)
            self._before[shard.shard] = at, shard
        if seconds is not None:
            self.per_second = per_second
        self._looked_at = at
