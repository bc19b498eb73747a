"""What the tests of the baselines share."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that only moves when it is told to, or when somebody sleeps."""

    def __init__(self, ms: int) -> None:
        self.ms = ms
        self.elapsed_s = 0.0
        self.slept_s = 0.0
        self._lock = threading.Lock()

    def unix_ms(self) -> int:
        return int(self.ms)

    def monotonic_s(self) -> float:
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept_s += seconds
            self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        """Both of its hands go on; a time of day is in whole milliseconds."""
        self.elapsed_s += seconds
        self.ms += max(1, round(seconds * 1000))
