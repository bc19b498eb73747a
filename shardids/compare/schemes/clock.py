"""The clock of the generators that run in the client's process; tests pass their own."""

from __future__ import annotations

import select
import time
from typing import Protocol


class Clock(Protocol):
    """What a generator needs of a clock."""

    def unix_ms(self) -> int:
        """Returns milliseconds since 1970 by the machine's clock, which may step back."""

    def sleep(self, seconds: float) -> None:
        """Waits for that long."""


class SystemClock:
    """The clock of the machine."""

    def unix_ms(self) -> int:
        """Returns the system's time of day."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Sleeps in select(): time.sleep() sleeps until a point in time, which libfaketime gets wrong."""
        select.select((), (), (), seconds)


SYSTEM = SystemClock()
"""The machine's clock."""
