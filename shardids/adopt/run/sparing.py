"""Limits that spare the source while rows are brought and compared.

The log is looked at with each event of the work, and beside work that has none, at most every second.
Between two tables that are copied, and two portions of a comparison, the work waits for its rate, for the
source's answers and its standbys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

from sqlalchemy import text

from shardids.adopt.plan.facts import shown_size
from shardids.adopt.run.sides import Follower, Sides
from shardids.adopt.run.slots import slots
from shardids.errors import AdoptionFailed, ShardidsError, StatementFailed
from shardids.replication.pressure import answer_s
from shardids.replication.sides import Side
from shardids.replication.steps import Event, OnEvent, Waiting

_LOOK_S: Final = 1.0
"""How often the log is looked at."""
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
        rate_bytes_s: how much of the source's tables is read in a second.
        max_latency_s: how long the source may take for a statement that reads no table, and its standbys to
            replay its log, before the next read waits.
    """

    max_wal_bytes: int | None = None
    rate_bytes_s: int | None = None
    max_latency_s: float | None = None

    @property
    def paces(self) -> bool:
        """Returns whether a limit asks for pauses between reads."""
        return self.rate_bytes_s is not None or self.max_latency_s is not None

    @property
    def portion_bytes(self) -> int | None:
        """Returns how much of a table is read at once; ``None``: all of it."""
        if self.rate_bytes_s is not None:
            return max(1 << 20, min(WHOLE_PORTION, int(self.rate_bytes_s * _PORTION_S)))
        return WHOLE_PORTION if self.paces else None


NO_LIMITS: Final = Limits()

_CANCEL = text("""
    select pg_cancel_backend(pid) from pg_stat_activity
    where application_name = :name and backend_type = 'client backend' and pid <> pg_backend_pid()""")
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
        # After the switch nothing brings rows any more.
        if most is None or self._sides.via is None or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        relay = self._sides.relay
        publishers: list[tuple[Side, Sequence[Follower]]] = [
            (self._sides.source, [relay]),
            (relay.side, self._sides.takers),
        ]
        for side, followers in publishers:
            for slot in slots(side, followers).values():
                if (slot.kept_bytes or 0) > most:
                    raise TooMuchLog(
                        f"the {side.name} keeps {shown_size(slot.kept_bytes or 0)} of its log for slot"
                        f' "{slot.kept_by}": --max-wal allows {shown_size(most)}'
                    )

    @contextmanager
    def beside(self, working: Sequence[Side]) -> Iterator[None]:
        """Look at the log beside work that reports no events, and end its statements if too much is kept.

        ``working``: the databases of these statements. Raises as a call does.
        """
        if self.limits.max_wal_bytes is None:
            yield
            return
        done, found = threading.Event(), list[TooMuchLog]()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                # A server that does not answer fails the work, if that needs it.
                with suppress(ShardidsError):
                    try:
                        self.look()
                    except TooMuchLog as error:
                        found.append(error)
                    for side in working if found else ():
                        with side.autocommit() as connection:
                            connection.execute(_CANCEL, {"name": self._sides.name})

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        except StatementFailed as error:
            done.set()
            thread.join()
            if found:
                raise found[0] from error
            raise
        finally:
            done.set()
            thread.join()

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
            if (answer := answer_s(connection)) > most_s:
                return f"the source takes {answer * 1000:,.0f} ms for a statement"
            behind = connection.scalar(_STANDBYS) or 0.0
        return f"a standby of the source is {behind:,.1f} s behind" if behind > most_s else None
