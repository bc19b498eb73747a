"""The distance of a server's clock from this machine's, as NTP measures it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from sqlalchemy import Connection, text

from shardids.pg.queries import prepare

MOST_APART_S = 1.0
"""Clocks that are apart by more do not agree."""
_ROUND_TRIPS = 8
_READ = "select date_part('epoch', pg_catalog.clock_timestamp())"
_LONGEST_S = 0.25
"""From then on no further one is begun: of a server far away eight would take longer than all the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """The lead of a server's clock over this machine's, measured over one round trip.

    The server read its clock somewhere within the round trip, so the true offset is within
    ``offset_s`` ± ``error_s``, half of the round trip.
    """

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The lead of one clock over another: within ``ahead_s`` ± ``error_s``."""

    ahead_s: float
    error_s: float

    @classmethod
    def between(cls, one: ClockSample, other: ClockSample) -> Self:
        """Return how far ``one`` is ahead of ``other``."""
        return cls(ahead_s=one.offset_s - other.offset_s, error_s=one.error_s + other.error_s)

    @property
    def is_too_large(self) -> bool:
        """Returns whether the clocks are apart by more than :data:`MOST_APART_S` for sure."""
        return abs(self.ahead_s) - self.error_s > MOST_APART_S

    def __str__(self) -> str:
        return f"{abs(self.ahead_s):.3f} s ± {self.error_s * 1000:.1f} ms"


class LocalClock:
    """This machine's clock, read once and counted on from there, so that it never steps.

    The clocks of several servers are compared with one such clock, so its own error cancels out.
    """

    def __init__(self) -> None:
        self._wall_s = time.time()
        self._begun = time.monotonic()

    def compare(self, connection: Connection) -> ClockSample:
        """Return the best of some measurements, fewer if they take long: that of the shortest round trip."""
        with connection.begin():
            prepare(connection)
            begun = time.monotonic()
            samples = [self.measure(connection)]
            while len(samples) < _ROUND_TRIPS and time.monotonic() - begun < _LONGEST_S:
                samples.append(self.measure(connection))
        return min(samples, key=lambda sample: sample.error_s)

    def measure(self, connection: Connection, statement: str = _READ) -> ClockSample:
        """Return one measurement, by a statement that returns the server's clock in seconds."""
        sent = time.monotonic()
        server_s = connection.execute(text(statement)).scalar_one()
        received = time.monotonic()
        middle_s = self._wall_s + (sent + received) / 2 - self._begun
        return ClockSample(offset_s=server_s - middle_s, error_s=(received - sent) / 2)
