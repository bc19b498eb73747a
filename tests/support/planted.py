"""IDs of an ordinary week, and what is planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from shardids.ids.arrays import encode_array
from shardids.ids.layout import DEFAULT

MONDAY = datetime(2026, 3, 16, tzinfo=UTC)
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class Week:
    """Days of inserts into shards: when each was drawn, in ms from Monday, and where.

    A shard's share is log-normal. By night there is a fifth of the load of the day, at the weekend a half of
    weekdays'; draws come by chance (Poisson). A clock differs by 20 ms, a shard is up to 16 ms ahead; one row
    in a hundred becomes visible up to 2 s later.
    """

    seed: int
    shards: int = 32
    rows: int = 150_000
    days: int = 7
    differ: float = 0.3
    ms: Integers = field(init=False)
    shard: Integers = field(init=False)
    clock_ms: Integers = field(init=False)
    chance: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.chance = np.random.default_rng(self.seed)
        minutes = np.arange(self.days * 1440)
        day = 0.6 + 0.4 * np.sin((minutes / 1440 - 0.375) * 2 * np.pi)
        load = day * np.where(minutes // 1440 % 7 >= 5, 0.5, 1.0)
        counts = self.chance.poisson(load * self.rows / load.sum())
        self.ms = np.sort(
            np.repeat(minutes, counts) * MINUTE_MS + self.chance.integers(0, MINUTE_MS, counts.sum())
        )
        share = self.chance.lognormal(0, self.differ, self.shards)
        self.shard = self.chance.choice(self.shards, self.ms.size, p=share / share.sum()).astype(np.int64)
        skew = self.chance.normal(0, 20, self.shards).astype(np.int64)
        self.clock_ms = skew[self.shard] + self.chance.integers(-2, 17, self.ms.size)

    @property
    def end(self) -> datetime:
        return MONDAY + timedelta(days=self.days)

    def add(self, shard: int | None, first_ms: int, last_ms: int, count: int) -> None:
        """More rows in a time, of one shard or by chance of all."""
        ms = self.chance.integers(first_ms, last_ms, count)
        shards = self.chance.integers(0, self.shards, count) if shard is None else np.full(count, shard)
        self.ms = np.r_[self.ms, ms]
        self.shard = np.r_[self.shard, shards]
        self.clock_ms = np.r_[self.clock_ms, self.chance.integers(-2, 17, count)]

    def drop(self, of: Callable[[Integers, Integers], npt.NDArray[np.bool_]]) -> None:
        kept = ~of(self.ms, self.shard)
        self.ms, self.shard, self.clock_ms = self.ms[kept], self.shard[kept], self.clock_ms[kept]

    def ids(self) -> Integers:
        late = np.where(
            self.chance.random(self.ms.size) < 0.01, self.chance.integers(0, 2000, self.ms.size), 0
        )
        order = np.argsort(self.ms + late, kind="stable")
        epoch = int((MONDAY - DEFAULT.first_time) / timedelta(milliseconds=1))
        ms = epoch + np.maximum(self.ms + self.clock_ms, 0)
        number = np.arange(ms.size) % DEFAULT.sequence_limit
        return encode_array(DEFAULT, ms=ms, shard=self.shard, sequence=number)[order]
