"""The clock of the generators that run in the process; tests bring their own."""

from __future__ import annotations

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
        """Sleeps."""
        time.sleep(seconds)


SYSTEM = SystemClock()
"""The machine's clock."""
