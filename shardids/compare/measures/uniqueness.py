"""Keys issued twice, out of order, or before their cause: at full speed, and while clocks step back."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import socket
import tempfile
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from shardids.compare.measures.measuring import CLIENTS, CLOCK_CLIENTS, NODES, PACED_CLIENTS, Measuring
from shardids.compare.results import Answers, Duplicates, Order, Point
from shardids.compare.schemes import Servers, Source, scheme_of
from shardids.compare.schemes.logical import SYSTEM
from shardids.compare.schemes.scheme import Key
from shardids.compare.testbed.stage import FakedClock
from shardids.errors import ShardidsError

_MANY: Final = 1000
_SINGLE: Final = 20
_BATCH: Final = _MANY + _SINGLE
_REFUSED_PAUSE_S: Final = 0.002

Drawn: TypeAlias = "tuple[list[int], int, str]"
"""Keys as integers, how many draws were refused, and the first refusal's message."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a client draws, how many keys at most, and how long a batch takes at least."""

    seconds: float
    most: int
    batch_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """The keys that a scheme has issued, by their places, and the cases that they are counted under."""

    place: Callable[[Key], int] = int
    seen: set[int] = field(default_factory=set)
    aside: list[range] = field(default_factory=list)
    cases: dict[str, Duplicates] = field(default_factory=dict)

    def add(self, case: str, keys: Iterable[Key], refusal: str = "", refused: int = 0) -> None:
        """Count keys under a case; a key that was issued before, in any case, counts as issued twice."""
        places = [self.place(key) for key in keys]
        new = set(places) - self.seen
        if self.aside:
            new = {place for place in new if not any(place in before for before in self.aside)}
        self.seen |= new
        self._count(case, len(places), len(places) - len(new), refusal, refused)

    def set_aside(self, case: str, places: range) -> None:
        """Count keys that were set aside, as :meth:`add` counts keys that were drawn."""
        # Without what earlier ranges cover, so that no place is counted for two of them.
        pieces = _without(places, self.aside)
        twice = len(places) - sum(map(len, pieces))
        twice += sum(place in piece for place in self.seen for piece in pieces)
        self.aside += pieces
        self._count(case, len(places), twice)

    def forget(self) -> None:
        """Start again: keys issued so far no longer count."""
        self.seen.clear()
        self.aside.clear()

    def _count(self, case: str, keys: int, twice: int, refusal: str = "", refused: int = 0) -> None:
        old = self.cases.get(case, Duplicates(keys=0, twice=0))
        self.cases[case] = Duplicates(
            keys=old.keys + keys,
            twice=old.twice + twice,
            refused=old.refused + refused,
            refusal=old.refusal or refusal,
        )


def _without(places: range, others: Iterable[range]) -> list[range]:
    """Return the parts of a range that lie outside all the others."""
    pieces = [places]
    for other in others:
        pieces = [
            part
            for piece in pieces
            for part in (
                range(piece.start, min(piece.stop, other.start)),
                range(max(piece.start, other.stop), piece.stop),
            )
            if part
        ]
    return pieces


def at_full_speed(name: str, run: Measuring) -> Duplicates:
    """Count the duplicates of sixteen clients, half of them on each node."""
    pace = Pace(run.sizes.rush_s, run.sizes.rush_keys)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(CLIENTS)]
    return counted("full speed", run.clients.run(rushing, jobs))


def counted(case: str, drawn: Iterable[Drawn]) -> Duplicates:
    """Return what several clients drew at once."""
    tally = Tally()
    for keys, refused, refusal in drawn:
        tally.add(case, keys, refusal, refused)
    return tally.cases[case]


def draws_at_once(source: Source) -> bool:
    """Return whether it makes many at once; else the keys before a refused one would go uncounted."""
    return type(source)._draw_many is not Source._draw_many


@contextlib.contextmanager
def rushing(name: str, servers: Servers, node: int, pace: Pace) -> Iterator[Callable[[], Drawn]]:
    """Return the job of a client that draws at an even pace."""
    with scheme_of(name).open(servers, node) as source:
        yield lambda: _rush(source, pace)


def _rush(source: Source, pace: Pace) -> Drawn:
    """Draw many keys at once and a few one by one, in turn."""
    keys: list[int] = []
    refused, refusal = 0, ""
    now = time.monotonic()
    end = now + pace.seconds
    while len(keys) < pace.most and now < end:
        try:
            for _ in range(_SINGLE if draws_at_once(source) else _BATCH):
                keys.append(int(source.draw()))
            if draws_at_once(source):
                keys += map(int, source.draw_many(_MANY))
        except ShardidsError as error:
            refused, refusal = refused + 1, refusal or error.message
            SYSTEM.sleep(_REFUSED_PAUSE_S)
        else:
            SYSTEM.sleep(max(0.0, now + pace.batch_s - time.monotonic()))
        now = time.monotonic()
    return keys, refused, refusal


_STEP_BACK_S: Final = 0.1
_STEP_EVERY_S: Final = 0.08
"""Less than a step, and more than half of one: each moment comes several times."""


def measure_clocks(run: Measuring, clocks: Sequence[FakedClock]) -> dict[str, Duplicates]:
    """Count the duplicates of four clients, half of them on each node, while all clocks step back."""
    return run.each("clock back", lambda name: _while_they_step_back(name, clocks, run))


def _while_they_step_back(name: str, clocks: Sequence[FakedClock], run: Measuring) -> Duplicates:
    steps, most = run.sizes.steps, run.sizes.clock_keys
    seconds = (steps + 2) * _STEP_EVERY_S
    pace = Pace(seconds, most, batch_s=seconds * _BATCH / most)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(CLOCK_CLIENTS)]
    wait = run.clients.begin(rushing, jobs)
    # Only back: after steps forward, every later time would exceed all earlier ones.
    for _ in range(steps):
        time.sleep(_STEP_EVERY_S)
        for clock in clocks:
            clock.step(-_STEP_BACK_S)
    return counted("clock back", wait())


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
    """Measure clients of two nodes that draw at an even pace."""
    jobs = [(name, run.servers, node, run.sizes.paced_s) for node in PACED_CLIENTS]
    return order_of([draw for draws in run.clients.run(_paced, jobs) for draw in draws])


def order_of(draws: Sequence[Draw]) -> Order:
    """Return how the order of keys agrees with that of time; of two simultaneous draws neither is first."""
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
    """Return for each draw how long before its start a greater key had existed; 0 if none had."""
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


_PATIENCE_S: Final = 20.0

Counted: TypeAlias = "tuple[int, int]"
"""The number of answers, and of those that sort before the answered key, or with it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the clients meet, how long the first asks, and whether generators receive the answered key."""

    address: str
    seconds: float
    told: bool


def measure_causality(run: Measuring, clocks: Sequence[FakedClock]) -> dict[str, list[Answers]]:
    """Let clients of two nodes answer each other; the first node's clock is ahead by one skew after another.

    Then once more: generators that can use the answered key receive it.
    """
    found: dict[str, list[Answers]] = {}
    skewed_ms = 0.0
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "answers"
        for skew_ms in run.sizes.skews_ms:
            # Only forward: generators in the process refuse a clock that steps back.
            clocks[0].step((skew_ms - skewed_ms) / 1000)
            skewed_ms = skew_ms
            untold = run.each("causality", lambda name: _answers(name, run, address, told=False))
            hearing = replace(run, schemes={n: scheme for n, scheme in run.schemes.items() if scheme.hears})
            told = hearing.each("causality", lambda name: _answers(name, run, address, told=True))
            for name, (answers, first) in untold.items():
                heard = told.get(name)
                found.setdefault(name, []).append(
                    Answers(
                        skew_ms=skew_ms,
                        answers=answers,
                        first=first,
                        told=None if heard is None else heard[0],
                        told_first=None if heard is None else heard[1],
                    )
                )
    return {name: all_ for name, all_ in found.items() if len(all_) == len(run.sizes.skews_ms)}


def _answers(name: str, run: Measuring, address: Path, *, told: bool) -> Counted:
    turn = Turn(str(address), run.sizes.answers_s, told)
    jobs = [(name, run.servers, node, turn) for node in range(NODES)]
    counted = run.clients.run(_answering, jobs)
    return sum(answers for answers, _ in counted), sum(first for _, first in counted)


@contextlib.contextmanager
def _answering(name: str, servers: Servers, node: int, turn: Turn) -> Iterator[Callable[[], Counted]]:
    """Return the job of a client: the first node's asks and ends, the second's answers."""
    with scheme_of(name).open(servers, node) as source, socket.socket(socket.AF_UNIX) as own:
        own.settimeout(_PATIENCE_S)
        source.draw()
        if node == 0:
            Path(turn.address).unlink(missing_ok=True)
            own.bind(turn.address)
            own.listen()

        def go() -> Counted:
            if node == 0:
                other, _ = own.accept()
                with other:
                    other.settimeout(_PATIENCE_S)
                    return _converse(source, other, asks_for_s=turn.seconds, told=turn.told)
            own.connect(turn.address)
            return _converse(source, own, asks_for_s=0, told=turn.told)

        yield go


def _converse(source: Source, other: socket.socket, *, asks_for_s: float, told: bool) -> Counted:
    """Answer each key that comes with another, until the other end, or the time, is over."""
    answers = first = 0
    with other.makefile("rwb") as lines:

        def say(key: int) -> None:
            lines.write(b"%d\n" % key)
            lines.flush()

        end = time.monotonic() + asks_for_s
        if asks_for_s:
            say(int(source.draw()))
        while line := lines.readline():
            asked = int(line)
            answer = int(source.draw_after(asked) if told else source.draw())
            answers, first = answers + 1, first + (answer <= asked)
            if asks_for_s and time.monotonic() > end:
                break
            say(answer)
    return answers, first
