"""Waiting for a condition, instead of for a time that a slow machine may exceed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a test waits for what must happen. Only a test that fails waits so long."""


def wait_for(condition: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Asks until the condition holds, and returns it; fails and names ``what`` if it does not in time."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.005)
    return found
