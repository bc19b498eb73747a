"""How far a server's clock is from this machine's, as NTP measures it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardids.catalog.queries import prepare

_ROUND_TRIPS = 8
_LONGEST_S = 0.25
"""From then on no further one is begun: of a server far away eight would take longer than all the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """How far a server's clock is ahead of this machine's, measured over one round trip.

    The server read its clock somewhere within the round trip, so the true offset is within
    ``offset_s`` ± ``error_s``, half of the round trip.
    """

    offset_s: float
    error_s: float


class LocalClock:
    """This machine's clock, read once and counted on from there, so that it never steps.

    The clocks of several servers are compared with one such clock, so its own error cancels out.
    """

    def __init__(self) -> None:
        self._wall_s = time.time()
        self._begun = time.monotonic()

    def compare(self, connection: Connection) -> ClockSample:
        """Returns the best of some measurements, fewer if they take long: that of the shortest round trip."""
        with connection.begin():
            prepare(connection)
            begun = time.monotonic()
            samples = [self._compare_once(connection)]
            while len(samples) < _ROUND_TRIPS and time.monotonic() - begun < _LONGEST_S:
                samples.append(self._compare_once(connection))
        return min(samples, key=lambda sample: sample.error_s)

    def _compare_once(self, connection: Connection) -> ClockSample:
        sent = time.monotonic()
        server_s = connection.execute(
            text("select date_part('epoch', pg_catalog.clock_timestamp())")
        ).scalar_one()
        received = time.monotonic()
        middle_s = self._wall_s + (sent + received) / 2 - self._begun
        return ClockSample(offset_s=server_s - middle_s, error_s=(received - sent) / 2)
