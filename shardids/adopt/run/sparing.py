"""Limits that spare the source while rows are brought and compared.

The log is looked at with each event of the work, at most every second; between two portions of a comparison
the work waits for its rate, for the source's answers and for its standbys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

from sqlalchemy import text

from shardids.adopt.plan.facts import shown_size
from shardids.adopt.run.sides import Sides
from shardids.errors import AdoptionFailed
from shardids.replication.steps import Event, OnEvent, Waiting

_LOOK_S: Final = 1.0
"""How often the log is looked at."""
_PROBES: Final = 5
"""How many statements measure how fast the source answers: the median counts."""
_PORTION_S: Final = 0.5
"""How long reading a portion takes at its rate."""
WHOLE_PORTION: Final = 64 << 20
"""The size of a portion without a rate, in bytes."""


class TooMuchLog(AdoptionFailed):
    """A server keeps more of its log for the adoption than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run; ``None``: none.

    Attributes:
        max_wal_bytes: how much of its log the source, or the relay, may keep for the adoption.
        rate_bytes_s: how much of the source's tables a comparison reads in a second.
        max_latency_s: how long the source may take for a statement that reads no table, and its standbys to
            replay its log, before a comparison waits.
    """

    max_wal_bytes: int | None = None
    rate_bytes_s: int | None = None
    max_latency_s: float | None = None

    @property
    def portion_bytes(self) -> int | None:
        """Returns how much of a table is read at once; ``None``: all of it."""
        if self.rate_bytes_s is not None:
            return max(1 << 20, min(WHOLE_PORTION, int(self.rate_bytes_s * _PORTION_S)))
        return None if self == Limits() else WHOLE_PORTION


NO_LIMITS: Final = Limits()

_KEPT = text("""
    select slot_name::text as name, (pg_current_wal_lsn() - restart_lsn)::bigint as bytes
    from pg_replication_slots where starts_with(slot_name::text, :name) and restart_lsn is not null
    order by 2 desc limit 1""")
_STANDBYS = text("""
    select coalesce(max(extract(epoch from r.replay_lag)), 0)::float8
    from pg_stat_replication r left join pg_replication_slots s on s.active_pid = r.pid
    where s.slot_type is distinct from 'logical'""")


class Sparing:
    """Keeps a run within its limits. Passes events on to ``on_event``, and looks at the log with them."""

    def __init__(self, sides: Sides, limits: Limits, on_event: OnEvent) -> None:
        self._sides = sides
        self._on_event = on_event
        self._looked = 0.0
        self.limits = limits

    def __call__(self, event: Event) -> None:
        """Receive an event.

        Raises:
            TooMuchLog: a server keeps too much of its log for the adoption.
        """
        self._on_event(event)
        self.look()

    def look(self) -> None:
        """Require that the servers keep no more of their log than they may. Raises as a call does."""
        most = self.limits.max_wal_bytes
        if most is None or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        for side in dict.fromkeys((self._sides.source, self._sides.feed)):
            with side.autocommit() as connection:
                found = connection.execute(_KEPT, {"name": self._sides.name}).one_or_none()
            if found is not None and found.bytes > most:
                raise TooMuchLog(
                    f'the {side.name} keeps {shown_size(found.bytes)} of its log for slot "{found.name}":'
                    f" --max-wal allows {shown_size(most)}"
                )

    def rest(self, size_bytes: int, seconds: float) -> None:
        """Wait after a portion of ``size_bytes`` that took ``seconds`` to read. Raises as a call does."""
        self.look()
        if self.limits.rate_bytes_s is not None:
            time.sleep(max(size_bytes / self.limits.rate_bytes_s - seconds, 0.0))
        if (most := self.limits.max_latency_s) is None:
            return
        for attempt in count(1):
            slow = self._slow(most)
            if slow is None:
                return
            self(Waiting(attempt=attempt, reason=slow))
            time.sleep(_LOOK_S)

    def _slow(self, most_s: float) -> str | None:
        """Return in words if the source or a standby of it is slower than it may be."""
        with self._sides.source.autocommit() as connection:
            answers = sorted(_timed(lambda: connection.scalar(text("select 1"))) for _ in range(_PROBES))
            if (answer := answers[_PROBES // 2]) > most_s:
                return f"the source takes {answer * 1000:,.0f} ms for a statement"
            behind = connection.scalar(_STANDBYS) or 0.0
        return f"a standby of the source is {behind:,.1f} s behind" if behind > most_s else None


def _timed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started
