"""What was done and what came of it, line by line, while it happens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path


class Log:
    """Lines with the seconds since the beginning and the lane; counts of what happened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def write(self, lane: str, what: str) -> None:
        with self._lock:
            self._file.write(f"{self.seconds:8.1f} {lane:9} {what}\n")

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def reason(self, why: str) -> None:
        with self._lock:
            self.reasons[why] += 1

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.path.read_text(encoding="utf-8").splitlines()[-lines:])

    def close(self) -> None:
        self._file.close()
