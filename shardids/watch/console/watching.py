"""Readings of the cluster, once per interval for all viewers, and the rates of the last hour."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Final

import numpy as np
from sqlalchemy.engine import URL

from shardids.catalog.shards import Shard
from shardids.errors import ConnectionFailed, ShardidsError
from shardids.logs import logger
from shardids.watch.facts.reading import TIMEOUT_S, Asker, CatalogState, NodeAnswer, NodeRates, Reading
from shardids.watch.metrics.samples import skews

INTERVAL_S: Final = 5.0
"""The time between readings, unless there are many shards."""
SHARDS_A_SECOND: Final = 280
"""The most shards read per second: it bounds the nodes' work for any number of shards."""
_SECOND_LOOK_S: Final = 1.0
_MISSED: Final = 3
"""From so many intervals between readings on, and the time that one may take, the console had stopped."""

log = logger("console")


HISTORY_S: Final = 3600.0
"""How far back the rates are kept."""
_NUMBERS: Final = 1 << 16
"""More than any layout has shards."""
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The rates at one time, in IDs per second.

    Attributes:
        time: in seconds since 1970.
        nodes: of each node; ``None`` where it did not answer, or was read for the first time.
        shards: numbers of the shards that drew any, in order, and ``rates`` theirs.
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
    """The points of the last hour, oldest first, with every shard; one thread adds, others read."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()
        self._sums = np.zeros(_NUMBERS)
        self._unread = np.zeros(_NUMBERS, np.int64)

    def add(
        self,
        time: float,
        nodes: Mapping[str, float | None],
        shards: Mapping[int, float],
        incomplete: frozenset[str] = frozenset(),
        unread: Iterable[int] = (),
    ) -> None:
        """Add the rates of a reading."""
        numbers = sorted(shards)
        # This machine's clock was set back: times after now were wrong, and would be out of order.
        while self._points and self._points[-1].time >= time:
            self._count(self._points.pop(), -1)
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
        self._count(self._points[-1], 1)
        while self._points[0].time < time - HISTORY_S:
            self._count(self._points.popleft(), -1)

    def points(self) -> Sequence[Point]:
        """Return all points as they are now."""
        return list(self._points)

    def busiest(self, count: int) -> list[int]:
        """Return the numbers of the shards with the highest means over the times at which they were read."""
        means = self._sums / np.maximum(len(self._points) - self._unread, 1)
        # What points that are gone leave of rounding is no rate.
        first = np.argsort(-means, kind="stable")[:count]
        return [int(shard) for shard in first if means[shard] > _ROUNDING]

    def _count(self, point: Point, sign: int) -> None:
        self._sums[np.asarray(point.shards)] += sign * np.asarray(point.rates, np.float64)
        self._unread[np.asarray(point.unread)] += sign


def rate_of(point: Point, shard: int) -> float | None:
    """Return the rate of a shard at a point; 0 where it drew none, ``None`` where it was not read."""
    if (place := _place(point.shards, shard)) is not None:
        return point.rates[place]
    return 0.0 if _place(point.unread, shard) is None else None


def _place(numbers: array[int], number: int) -> int | None:
    place = bisect_left(numbers, number)
    return place if place < len(numbers) and numbers[place] == number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """The known state of a node.

    Attributes:
        url: as the catalog has it, without a password.
        up: whether it answered this time, and is that node.
        error: why it did not answer, or not completely.
        answer: the newest answer with its state; ``None`` if it never gave one.
        answered_at: the time of that answer, in seconds since 1970.
        read_at: the time of the last reading of its shards; of a standby, of its answer.
        shards: its shards by number, from their last reading; none while it answers without them.
        per_second: ticks that were drawn from shards per second between the last two readings; ``None`` if it
            did not answer both.
        skew_s: how far its clock is ahead of the others'.
    """

    name: str
    url: str
    up: bool
    error: ShardidsError | None = None
    answer: NodeAnswer | None = None
    answered_at: float | None = None
    read_at: float | None = None
    shards: Mapping[int, Shard] = field(default_factory=dict)
    per_second: Mapping[int, float] | None = None
    skew_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The cluster at one time, with the last known state of parts that did not answer.

    Attributes:
        at: in seconds since 1970.
        known: the catalog's last answer; ``None`` if it has never answered.
        catalog_error: why it did not answer this time.
        known_at: the time of its last answer.
        nodes: by name.
    """

    at: float
    known: CatalogState | None
    catalog_error: ShardidsError | None
    known_at: float | None
    nodes: Mapping[str, SeenNode]


class Watcher:
    """A thread that reads a cluster repeatedly, and passes each reading to listeners.

    Args:
        catalog_url: the catalog; its user also logs in to the nodes.
        interval_s: the least time between readings. Large clusters are read less often: see
            :data:`SHARDS_A_SECOND`.
    """

    def __init__(self, catalog_url: str | URL, *, interval_s: float = INTERVAL_S) -> None:
        self._asker = Asker(catalog_url, timeout_s=TIMEOUT_S)
        self.interval_s = interval_s
        self.history = History()
        self._shortest_s = interval_s
        self._rates: dict[str, NodeRates] = {}
        self._seen: Seen | None = None
        self._has_seen = Event()
        self._stop = Event()
        self._lock = Lock()
        self._listeners: list[Callable[[Seen], object]] = []
        self._thread = Thread(target=self._run, name="shardids console", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End reading, and close the connections that are not in use."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)
        self._asker.close()

    def listen(self, listener: Callable[[Seen], object]) -> None:
        """Call ``listener`` with each reading, in the thread that reads."""
        self._listeners.append(listener)

    def seen(self) -> Seen:
        """Return the newest reading; wait for the first."""
        self._has_seen.wait(TIMEOUT_S + 1)
        if self._seen is None:
            raise ConnectionFailed("the cluster was not read yet", hint="Ask again in some seconds.")
        return self._seen

    def look(self) -> Seen:
        """Read the cluster now."""
        with self._lock:
            seen = self._merged(self._asker.read(), time.time())
            self._seen = seen
        self._has_seen.set()
        return seen

    def _run(self) -> None:
        # The second look follows soon: with it there are rates.
        waits = iter([_SECOND_LOOK_S])
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                seen = self.look()
            except Exception:
                log.exception("the cluster could not be read")
            else:
                for listener in self._listeners:
                    self._pass_on(seen, listener)
            pause_s = next(waits, self.interval_s)
            self._stop.wait(max(0.1, begun + pause_s - time.monotonic()))

    def _pass_on(self, seen: Seen, listener: Callable[[Seen], object]) -> None:
        try:
            listener(seen)
        except Exception:
            # The others, such as the one that writes to the page, still get the reading.
            log.exception("a reading could not be used")

    def _merged(self, reading: Reading, now: float) -> Seen:
        before = self._seen
        known = reading.known
        if known is not None:
            self._follow_size(known.shard_total)
        answered = known is not None and reading.catalog_error is None
        known_at = now if answered else (before.known_at if before else None)
        skew_of = skews(reading.nodes)
        nodes = {
            name: self._node(name, answer, reading, skew_of.get(name), now)
            for name, answer in reading.nodes.items()
        }
        self._rates = {name: rates for name, rates in self._rates.items() if name in nodes}
        seen = Seen(at=now, known=known, catalog_error=reading.catalog_error, known_at=known_at, nodes=nodes)
        self._remember(seen)
        return seen

    def _follow_size(self, shard_count: int) -> None:
        interval_s = max(self._shortest_s, shard_count / SHARDS_A_SECOND)
        if interval_s != self.interval_s:
            self.interval_s = interval_s
            self.history = History()

    def _node(
        self, name: str, answer: NodeAnswer, reading: Reading, skew_s: float | None, now: float
    ) -> SeenNode:
        before = self._seen.nodes.get(name) if self._seen else None
        url = reading.known.nodes[name] if reading.known else ""
        if before is not None and before.url != url:
            before = None
            self._rates.pop(name, None)
        up = answer.is_up
        rates = self._rates.setdefault(name, NodeRates())
        per_second = None
        shards = before.shards if before else {}
        if answer.shards is not None and reading.known is not None:
            rates.look(answer.shards, answer.read_at, reading.known.layout)
            per_second = rates.per_second
            shards = {shard.shard: shard for shard in answer.shards}
        elif up:
            # What was known of them would look like what they are.
            shards = {}
        kept, read_at = (before.answer, before.read_at) if before else (None, None)
        answered_at = before.answered_at if before else None
        if answer.state is not None:
            kept, answered_at = answer, now
            if answer.shards is not None or answer.state.is_standby:
                read_at = now
        return SeenNode(
            name=name,
            url=url,
            up=up,
            error=answer.error,
            answer=kept,
            answered_at=answered_at,
            read_at=read_at,
            shards=shards,
            per_second=per_second,
            skew_s=skew_s,
        )

    def _remember(self, seen: Seen) -> None:
        shards: dict[int, float] = {}
        nodes: dict[str, float | None] = {}
        for name, node in seen.nodes.items():
            nodes[name] = None if node.per_second is None else sum(node.per_second.values())
            for shard, rate in (node.per_second or {}).items():
                shards[shard] = shards.get(shard, 0.0) + rate
        incomplete = frozenset(
            name for name, node in seen.nodes.items() if node.answer is None or not node.answer.has_all_shards
        )
        if nodes and seen.known is not None:
            every = range(seen.known.shard_total)
            if self._seen and seen.at - self._seen.at > _MISSED * self.interval_s + TIMEOUT_S:
                # It slept, or its clock was set.
                self.history.add(seen.at - self.interval_s, {}, {}, unread=every)
            unread = set(every) - _with_rate(seen.known, seen.nodes)
            self.history.add(seen.at, nodes, shards, incomplete, unread)


def _with_rate(known: CatalogState, nodes: Mapping[str, SeenNode]) -> set[int]:
    """Return the shards whose rate is known, even if 0: their generator was read where they are placed."""
    return {
        shard
        for (name, state), placed in known.placed.items()
        if state == "active" and name in nodes and nodes[name].per_second is not None
        for shard in placed
        if (there := nodes[name].shards.get(shard)) is not None and there.offset_ms is not None
    }
