"""Counts keys that are issued twice: at full speed, and while clocks step back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shardids.compare.measures.clocks import CLIENTS as _CLIENTS
from shardids.compare.measures.measuring import NODES, Measuring
from shardids.compare.measures.sizes import CLIENTS
from shardids.compare.results import Duplicates
from shardids.compare.schemes import Servers, Source, scheme_of
from shardids.compare.schemes.clock import SYSTEM
from shardids.compare.schemes.scheme import Key
from shardids.compare.testbed.faketime import FakedClock
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
    """The keys that a scheme has issued, by their places, and the cases under which they are counted."""

    place: Callable[[Key], int] = int
    seen: set[int] = field(default_factory=set)
    aside: list[range] = field(default_factory=list)
    cases: dict[str, Duplicates] = field(default_factory=dict)

    def add(self, case: str, keys: Iterable[Key], refusal: str = "", refused: int = 0) -> None:
        """Counts keys under a case; a key that was issued before, in any case, counts as issued twice."""
        places = [self.place(key) for key in keys]
        new = set(places) - self.seen
        if self.aside:
            new = {place for place in new if not any(place in before for before in self.aside)}
        self.seen |= new
        self._count(case, len(places), len(places) - len(new), refusal, refused)

    def set_aside(self, case: str, places: range) -> None:
        """Counts keys that were set aside, as :meth:`add` counts keys that were drawn."""
        # Without what earlier ranges cover, so that no place is counted for two of them.
        pieces = _without(places, self.aside)
        twice = len(places) - sum(map(len, pieces))
        twice += sum(place in piece for place in self.seen for piece in pieces)
        self.aside += pieces
        self._count(case, len(places), twice)

    def forget(self) -> None:
        """Starts again: keys issued so far no longer count."""
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
    """Returns the parts of a range that lie outside all the others."""
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
    """Counts the duplicates of sixteen clients, half of them on each node."""
    pace = Pace(run.sizes.rush_s, run.sizes.rush_keys)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(CLIENTS)]
    return counted("full speed", run.clients.run(rushing, jobs))


def counted(case: str, drawn: Iterable[Drawn]) -> Duplicates:
    """Returns what several clients drew at once."""
    tally = Tally()
    for keys, refused, refusal in drawn:
        tally.add(case, keys, refusal, refused)
    return tally.cases[case]


def draws_at_once(source: Source) -> bool:
    """Returns whether it makes many at once; else the keys before a refused one would go uncounted."""
    return type(source)._draw_many is not Source._draw_many


@contextlib.contextmanager
def rushing(name: str, servers: Servers, node: int, pace: Pace) -> Iterator[Callable[[], Drawn]]:
    """Returns the job of a client that draws at an even pace."""
    with scheme_of(name).open(servers, node) as source:
        yield lambda: _rush(source, pace)


def _rush(source: Source, pace: Pace) -> Drawn:
    """Draws many keys at once and a few one by one, in turn."""
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
_STEP_EVERY_S: Final = 0.05


def measure_clocks(run: Measuring, clocks: Sequence[FakedClock]) -> dict[str, Duplicates]:
    """Counts the duplicates of four clients, half of them on each node, while all clocks step back."""
    return run.each("clock back", lambda name: _while_they_step_back(name, clocks, run))


def _while_they_step_back(name: str, clocks: Sequence[FakedClock], run: Measuring) -> Duplicates:
    steps, most = run.sizes.steps, run.sizes.clock_keys
    seconds = (steps + 2) * _STEP_EVERY_S
    pace = Pace(seconds, most, batch_s=seconds * _BATCH / most)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(_CLIENTS)]
    wait = run.clients.begin(rushing, jobs)
    # Only back: after steps forward, every later time would exceed all earlier ones.
    for _ in range(steps):
        time.sleep(_STEP_EVERY_S)
        for clock in clocks:
            clock.step(-_STEP_BACK_S)
    return counted("clock back", wait())
