"""What the tests of the baselines share."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that only moves when it is told to, or when somebody sleeps."""

    def __init__(self, ms: int) -> None:
        self.ms = ms
        self.slept_s = 0.0
        self._lock = threading.Lock()

    def unix_ms(self) -> int:
        return int(self.ms)

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept_s += seconds
            self.ms += max(1, round(seconds * 1000))
