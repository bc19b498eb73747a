"""What a plan for several masters is made of, on PostgreSQL and on MariaDB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["fence", "switch", "stop", "catch-up", "end-sessions", "resume"]
"""What a step is for. A phase is over on all masters before the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One statement on one master; ``column`` is ``*`` where it concerns the whole server."""

    phase: Phase
    master: str
    column: str
    statement: str
    locks: str
