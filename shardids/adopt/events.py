"""The events that an adoption reports while it runs, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """A step is about to be taken."""

    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step was taken."""

    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Progress of the copy: tables that are not copied yet, counted once a node, and rows that arrived."""

    tables_left: int
    rows_done: int
    rows_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagging:
    """The number of bytes of the source's log that the node farthest behind has not confirmed yet."""

    lag_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An attempt was put off and will be repeated; ``reason`` says what was in its way."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The rows of a table are the same at the source and in the shards."""

    table: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something that may go wrong later."""

    note: str


Event = StepBegun | StepDone | Copying | Lagging | Waiting | Compared | Noted
OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Reports nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far a command has brought an adoption.

    ``step`` is the step that it is at; ``outcome`` is ``None`` while it is not over. ``pause_ms`` is how long
    no writes were taken, neither by the source nor by the shards, if this call has switched over, or back.
    """

    step: str
    outcome: str | None
    seconds: float
    pause_ms: float | None = None
