"""The time of day at which moves may begin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final, Self
from zoneinfo import ZoneInfo

from shardids.errors import BadArgument

_WINDOW: Final = re.compile(r"(\d\d:\d\d)-(\d\d:\d\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of each day, by the clock of a time zone; it may go past midnight.

    Attributes:
        start: its first minute.
        end: the minute after its last.
        zone: the time zone.
    """

    start: time
    end: time
    zone: ZoneInfo

    @classmethod
    def parse(cls, window: str, zone: str = "UTC") -> Self:
        """Return the window of ``22:00-06:00``.

        Raises:
            BadArgument: it is not one, or the time zone is not known on this machine.
        """
        match = _WINDOW.fullmatch(window.strip())
        try:
            start, end = (time.fromisoformat(part) for part in match.groups()) if match else (None, None)
        except ValueError:
            start = end = None
        if start is None or end is None or start == end:
            raise BadArgument(f"{window!r} is not a window of time", hint="Write it as 22:00-06:00.")
        try:
            found = ZoneInfo(zone)
        except (KeyError, ValueError, OSError):
            raise BadArgument(
                f"time zone {zone!r} is not known here", hint="Write UTC or a name as Europe/Berlin."
            ) from None
        return cls(start=start, end=end, zone=found)

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M} {self.zone.key}"

    def left_s(self, now: datetime) -> float | None:
        """Return how long the window stays open, in s; ``None`` if it is closed at that time."""
        here = now.astimezone(self.zone)
        for days in (0, 1):
            day = here.date() - timedelta(days=days)
            start = datetime.combine(day, self.start, self.zone)
            end = datetime.combine(day + timedelta(days=self.end < self.start), self.end, self.zone)
            # In UTC: clocks of a zone are put forward and back.
            if start.astimezone(UTC) <= now.astimezone(UTC) < end.astimezone(UTC):
                return (end.astimezone(UTC) - now.astimezone(UTC)).total_seconds()
        return None
