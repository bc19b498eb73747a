"""The clock of the generators that run in the process; tests bring their own."""

from __future__ import annotations

import select
import time
from typing import Protocol


class Clock(Protocol):
    """What a generator knows of time."""

    def unix_ms(self) -> int:
        """Milliseconds since 1970, as the machine believes; may step back."""

    def sleep(self, seconds: float) -> None:
        """Waits."""


class SystemClock:
    """The machine's."""

    def unix_ms(self) -> int:
        """The system's time of day."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Sleeps; by select, as time.sleep sleeps until a time, which libfaketime gets wrong."""
        select.select((), (), (), seconds)


SYSTEM = SystemClock()
"""The machine's clock."""
