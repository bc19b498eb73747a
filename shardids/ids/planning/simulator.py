"""A simulation of the generators of many shards at once: ticks, leads, order, and refused draws.

The arithmetic is that of ``sql/engine/engine.v1.sql``: a tick is offset + counter; a draw that is 2 ms or
more behind its node's clock raises the offset in steps of 16 ms, or at once after 256 ms; the first of a new
incarnation goes past the clock by ``safety_margin``; one that would be ``max_ahead`` ahead is refused.
Sessions, locks and their orders are not played. Needs numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardids.errors import BadArgument
from shardids.ids.arrays import encode_array
from shardids.ids.layout import DEFAULT, Layout
from shardids.ids.order import pairs_out_of_order
from shardids.ids.text import checked_integer

_LATE_MS, _STEP_MS, _NEAR_MS, _USUAL_MS = 2, 16, 256, 60_000
_SAMPLED: Final = 64
_MOST_A_SECOND: Final = 1e15
"""More than any layout has."""
_LONGEST_AHEAD_MS: Final = 315_576_000_000
"""The most that ``shardids.node`` takes for ``max_ahead``: 10 years."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Shards:
    """The sequences of many shards: ``offset_ms`` and ``counter``, which start at the clock.

    ``node_of`` has each shard's node, and ``skew_ms`` how far each node's clock is ahead of the true time.
    """

    def __init__(
        self,
        *,
        node_of: npt.ArrayLike,
        skew_ms: npt.ArrayLike,
        start_ms: float,
        layout: Layout = DEFAULT,
        max_ahead_ms: int = 3_600_000,
        margin_ms: int = 10_000,
    ) -> None:
        self.layout = layout
        self.node_of = np.asarray(node_of, np.int64)
        self.skew_ms = np.asarray(skew_ms, np.float64)
        self.max_ahead_ms, self.margin_ms = max_ahead_ms, margin_ms
        self.counter = np.zeros(self.node_of.shape, np.int64)
        self._is_new = np.zeros(self.node_of.shape, np.bool_)
        self._mark = np.zeros(self.node_of.shape, np.float64)
        self.offset_ms = np.floor(self.clock(start_ms)).astype(np.int64)

    def clock(self, true_ms: float) -> Floats:
        """Return the time by each shard's server, in ms since the epoch."""
        return true_ms + self.skew_ms[self.node_of]

    def lead_ms(self, true_ms: float) -> Floats:
        """Return how far each shard's last tick is ahead of its server's clock; below zero it lags."""
        return self._ms(self.counter) - self.clock(true_ms)

    def draw(self, true_ms: float, wanted: npt.ArrayLike) -> tuple[Integers, Integers]:
        """Draw so many IDs of each shard at one moment, and return how many each gave, and the last tick.

        The ticks of a shard are consecutive but past a lead of a minute, where each second one is lost.
        """
        wanted = np.asarray(wanted, np.int64)
        draws = wanted > 0
        now = self.clock(true_ms)
        begins = draws & self._is_new & ~self._waits(now)
        draws &= ~(self._is_new & ~begins)
        is_late = draws & ~begins & (now - self._ms(self.counter + 1) >= _LATE_MS)
        # The value that was late is lost; of a new incarnation, two are.
        self.counter += is_late + 2 * begins
        self._catch_up(now, is_late)
        self._begin(now, begins)
        room = self._ticks_until(now + self.max_ahead_ms)
        # The first of an incarnation takes one tick at any lead.
        first = np.minimum(wanted, np.maximum(self._ticks_until(now + _USUAL_MS), np.minimum(begins, room)))
        left = room - first
        second = np.clip(left // 2, 0, wanted - first)
        self.counter += np.where(draws, first + 2 * second, 0)
        return np.where(draws, first + second, 0), (
            self.offset_ms << self.layout.sequence_bits
        ) + self.counter

    def restart(self, node: int, *, mark: float = 0.5) -> None:
        """Begin a new incarnation of a node, whose shards see it when they are next drawn from.

        They then go past the clock and the stored ticks, by the margin. ``mark`` from 0 to 1 is the
        incarnation's: a shard that leads goes so much of a margin further, and refuses draws until that is
        three margins ahead of the clock, unless restarts did not make its lead. The simulation leaves out the
        values that a crash skips: up to 32 of the counter and 32 steps of the offset.
        """
        here = self.node_of == node
        self._is_new |= here
        self._mark[here] = mark

    def _began(self, now: Floats) -> Integers:
        """Return the first offsets of a new incarnation."""
        at_clock = np.floor(now).astype(np.int64) - (self.counter >> self.layout.sequence_bits)
        further = np.floor(self.margin_ms * self._mark).astype(np.int64)
        past = np.maximum(self.offset_ms, at_clock)
        target: Integers = past + self.margin_ms + np.where(past > at_clock, further, 0)
        return target

    def _waits(self, now: Floats) -> npt.NDArray[np.bool_]:
        lead_ms = self._began(now) + (self.counter >> self.layout.sequence_bits) - np.floor(now)
        margins = lead_ms / self.margin_ms
        return np.asarray((margins > 3) & (margins <= 6))

    def _begin(self, now: Floats, begins: npt.NDArray[np.bool_]) -> None:
        self.offset_ms = np.where(begins, self._began(now), self.offset_ms)
        self._is_new &= ~begins

    def _ms(self, counter: Integers) -> Integers:
        return self.offset_ms + (counter >> self.layout.sequence_bits)

    def _catch_up(self, now: Floats, is_late: npt.NDArray[np.bool_]) -> None:
        target = np.floor(now).astype(np.int64) - (self.counter >> self.layout.sequence_bits)
        behind = target - self.offset_ms
        steps = -(-(behind - (_LATE_MS - 1)) // _STEP_MS)
        raised = np.where(behind <= _NEAR_MS, self.offset_ms + _STEP_MS * steps, target)
        self.offset_ms = np.where(is_late & (behind >= _LATE_MS), raised, self.offset_ms)

    def _ticks_until(self, until_ms: Floats) -> Integers:
        """Return how many values of the counter have a time before this."""
        ms = np.ceil(until_ms).astype(np.int64) - self.offset_ms
        ticks: Integers = np.maximum((ms << self.layout.sequence_bits) - 1 - self.counter, 0)
        return ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of a run.

    Attributes:
        issued: the number of IDs, and ``refused`` of draws that failed.
        lead_ms: the greatest lead after a draw, minus infinity without any; ``last_lead_ms`` is the greatest
            at the end.
        out_of_order: the share of a sample's pairs that do not sort in the order of their draws.
        disorder_ms: the longest time that an ID was drawn after one of a greater time.
        increasing: whether the ticks of each shard increased.
    """

    issued: int
    refused: int
    lead_ms: float
    last_lead_ms: float
    out_of_order: float
    disorder_ms: float
    increasing: bool


def play(
    *,
    shards: int,
    nodes: int,
    ids_per_second: float,
    seconds: float,
    seed: int,
    layout: Layout = DEFAULT,
    skew_ms: float = 5.0,
    burst: tuple[float, float, float] | None = None,
    restart: tuple[int, float] | None = None,
    max_ahead_ms: int = 3_600_000,
) -> Played:
    """Play shards, spread evenly over nodes, millisecond by millisecond; draw come by chance (Poisson).

    ``skew_ms`` is the standard deviation of the nodes' clocks. ``burst`` is from when until when, in seconds,
    the load is how many times itself; ``restart`` is a node and when it does. A seed gives one run.

    Raises:
        BadArgument: no shard or node, a shard that the layout has not, a number out of range, or a restart of
            a node that is not there or at a time that is not played.
    """
    checked_integer("shards", shards, 1, layout.shard_limit)
    checked_integer("nodes", nodes, 1, shards)
    checked_integer("seed", seed, 0, (1 << 64) - 1)
    checked_integer("max_ahead_ms", max_ahead_ms, _USUAL_MS, _LONGEST_AHEAD_MS)
    _require_playable(ids_per_second, seconds, skew_ms, burst)
    if restart is not None:
        checked_integer("the node of restart", restart[0], 0, nodes - 1)
        if not 0 <= restart[1] * 1000 < round(seconds * 1000):
            raise BadArgument(f"a restart after {restart[1]:g} s is not within the {seconds:g} s of the run")
    chance = np.random.default_rng(seed)
    start_ms = float(1 << (layout.time_bits - 2))
    state = Shards(
        node_of=np.arange(shards) % nodes,
        skew_ms=chance.normal(0, skew_ms, nodes),
        start_ms=start_ms,
        layout=layout,
        max_ahead_ms=max_ahead_ms,
    )
    issued = wanted_in_all = 0
    lead, increasing = -np.inf, True
    before = np.full(shards, -1, np.int64)
    sample: list[Integers] = []
    now_ms = start_ms
    for ms in range(round(seconds * 1000)):
        now_ms = start_ms + ms
        if restart is not None and ms == round(restart[1] * 1000):
            state.restart(restart[0])
        times = burst[2] if burst and burst[0] * 1000 <= ms < burst[1] * 1000 else 1.0
        wanted = chance.poisson(ids_per_second * times / 1000 / shards, shards)
        given, tick = state.draw(now_ms, wanted)
        drawn = np.flatnonzero(given)
        increasing &= bool((tick[drawn] - given[drawn] >= before[drawn]).all())
        before[drawn] = tick[drawn]
        issued += int(given.sum())
        wanted_in_all += int(wanted.sum())
        if drawn.size:
            lead = max(lead, float(state.lead_ms(now_ms)[drawn].max()))
            some = chance.choice(drawn, min(_SAMPLED, drawn.size), replace=False)
            at, number = tick[some] >> layout.sequence_bits, tick[some] & (layout.sequence_limit - 1)
            sample.append(encode_array(layout, ms=at, shard=some, sequence=number))
    ids = np.concatenate(sample) if sample else np.empty(0, np.int64)
    times_ms = ids >> (layout.shard_bits + layout.sequence_bits)
    return Played(
        issued=issued,
        refused=wanted_in_all - issued,
        lead_ms=lead,
        last_lead_ms=float(state.lead_ms(now_ms).max()),
        out_of_order=pairs_out_of_order(ids.view(np.uint64)),
        disorder_ms=float((np.maximum.accumulate(times_ms) - times_ms).max(initial=0)),
        increasing=increasing,
    )


def _require_playable(
    ids_per_second: float, seconds: float, skew_ms: float, burst: tuple[float, float, float] | None
) -> None:
    times = burst[2] if burst else 1.0
    if not 0.001 <= seconds < math.inf or not 0 <= ids_per_second <= _MOST_A_SECOND:
        raise BadArgument(
            f"seconds must be 0.001 or more, and ids_per_second from 0 to {_MOST_A_SECOND:g}, both finite"
        )
    if not 0 <= skew_ms <= _LONGEST_AHEAD_MS or not 0 <= times * ids_per_second <= _MOST_A_SECOND:
        raise BadArgument(
            f"skew_ms must be from 0 to {_LONGEST_AHEAD_MS}, and a burst to {_MOST_A_SECOND:g} IDs per second"
        )
