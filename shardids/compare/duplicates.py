"""Keys that come twice: how they are counted, and clients that draw as fast as they can."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shardids.baselines import Servers, Source, scheme_of
from shardids.baselines.clock import SYSTEM
from shardids.baselines.scheme import Key
from shardids.compare.inserts import NODES
from shardids.compare.measuring import Measuring
from shardids.compare.results import Duplicates
from shardids.compare.sizes import CLIENTS
from shardids.errors import ShardidsError

_MANY: Final = 1000
_SINGLE: Final = 20
BATCH: Final = _MANY + _SINGLE
_REFUSED_PAUSE_S: Final = 0.002

Drawn: TypeAlias = "tuple[list[int], int, str]"
"""Keys as integers; how many draws were refused; what the first refusal said."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a client draws, how many keys at most, and what a batch takes at least."""

    seconds: float
    most: int
    batch_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """The keys that a scheme has issued, and the cases that they are counted under."""

    seen: set[int] = field(default_factory=set)
    cases: dict[str, Duplicates] = field(default_factory=dict)

    def add(self, case: str, keys: Iterable[Key], refusal: str = "", refused: int = 0) -> None:
        """Counts keys under a case; those that were there before, in any case, are twice."""
        before, count = len(self.seen), 0
        for key in keys:
            self.seen.add(int(key))
            count += 1
        old = self.cases.get(case, Duplicates(keys=0, twice=0))
        self.cases[case] = Duplicates(
            keys=old.keys + count,
            twice=old.twice + count - (len(self.seen) - before),
            refused=old.refused + refused,
            refusal=old.refusal or refusal,
        )


def at_full_speed(name: str, run: Measuring) -> Duplicates:
    """Sixteen clients, half of them on each node."""
    pace = Pace(run.sizes.rush_s, run.sizes.rush_keys)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(CLIENTS)]
    return counted("full speed", run.clients.run(rushing, jobs))


def counted(case: str, drawn: Iterable[Drawn]) -> Duplicates:
    """What several clients drew at once."""
    tally = Tally()
    for keys, refused, refusal in drawn:
        tally.add(case, keys, refusal, refused)
    return tally.cases[case]


def draws_at_once(source: Source) -> bool:
    """Whether it makes many at once; where it doesn't, keys before a refused one would go uncounted."""
    return type(source)._draw_many is not Source._draw_many


@contextlib.contextmanager
def rushing(name: str, servers: Servers, node: int, pace: Pace) -> Iterator[Callable[[], Drawn]]:
    """The job of a client that draws at a pace."""
    with scheme_of(name).open(servers, node) as source:
        yield lambda: _rush(source, pace)


def _rush(source: Source, pace: Pace) -> Drawn:
    """Draws many at once, and a few one by one, in turn."""
    keys: list[int] = []
    refused, refusal = 0, ""
    now = time.monotonic()
    end = now + pace.seconds
    while len(keys) < pace.most and now < end:
        try:
            for _ in range(_SINGLE if draws_at_once(source) else BATCH):
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
