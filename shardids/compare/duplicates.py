"""Keys that come twice: at full speed, and while the clocks step back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shardids.baselines import Servers, Source, scheme_of
from shardids.baselines.clock import SYSTEM
from shardids.baselines.scheme import Key
from shardids.compare.clients import Clients
from shardids.compare.faketime import FakedClock
from shardids.compare.inserts import NODES
from shardids.compare.results import Duplicates
from shardids.compare.sizes import CLIENTS, Sizes
from shardids.errors import ShardidsError

CLOCK_CLIENTS: Final = 4
STEP_BACK_S: Final = 0.1
_STEP_EVERY_S: Final = 0.05
_MANY: Final = 1000
_SINGLE: Final = 20
_BATCH: Final = _MANY + _SINGLE
_REFUSED_PAUSE_S: Final = 0.002

Drawn: TypeAlias = "tuple[list[int], int, str]"
"""Keys as integers; how many draws were refused; what the first refusal said."""


@dataclass(frozen=True, slots=True)
class _Pace:
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
            refused=old.refused + (refused or bool(refusal)),
            refusal=old.refusal or refusal,
        )


def at_full_speed(name: str, servers: Servers, clients: Clients, sizes: Sizes) -> Duplicates:
    """Sixteen clients, half of them on each node."""
    pace = _Pace(sizes.rush_s, sizes.rush_keys)
    return _counted(
        clients.run(_rushing, [(name, servers, number % NODES, pace) for number in range(CLIENTS)])
    )


def while_the_clock_steps_back(
    name: str, servers: Servers, clients: Clients, clock: FakedClock, sizes: Sizes
) -> Duplicates:
    """Four clients, half of them on each node. Servers and clients are under the clock."""
    seconds = (sizes.steps + 2) * _STEP_EVERY_S
    pace = _Pace(seconds, sizes.clock_keys, batch_s=seconds * _BATCH / sizes.clock_keys)
    wait = clients.begin(_rushing, [(name, servers, number % NODES, pace) for number in range(CLOCK_CLIENTS)])
    # Only back: what follows the steps would otherwise be later than all that was before.
    for _ in range(sizes.steps):
        time.sleep(_STEP_EVERY_S)
        clock.step(-STEP_BACK_S)
    return _counted(wait())


def _counted(drawn: Iterable[Drawn]) -> Duplicates:
    tally = Tally()
    for keys, refused, refusal in drawn:
        tally.add("", keys, refusal, refused)
    return tally.cases[""]


@contextlib.contextmanager
def _rushing(name: str, servers: Servers, node: int, pace: _Pace) -> Iterator[Callable[[], Drawn]]:
    with scheme_of(name).open(servers, node) as source:
        yield lambda: _rush(source, pace)


def _rush(source: Source, pace: _Pace) -> Drawn:
    """Draws many at once, and a few one by one, in turn."""
    keys: list[int] = []
    refused, refusal = 0, ""
    now = time.monotonic()
    end = now + pace.seconds
    while len(keys) < pace.most and now < end:
        try:
            keys += map(int, source.draw_many(_MANY))
            keys += (int(source.draw()) for _ in range(_SINGLE))
        except ShardidsError as error:
            refused, refusal = refused + 1, refusal or error.message
            SYSTEM.sleep(_REFUSED_PAUSE_S)
        else:
            SYSTEM.sleep(max(0.0, now + pace.batch_s - time.monotonic()))
        now = time.monotonic()
    return keys, refused, refusal
