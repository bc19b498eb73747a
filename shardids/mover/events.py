"""The events that a move reports while it runs, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardids.mover.history import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """A step is about to be taken."""

    shard: int
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step was taken."""

    shard: int
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Progress of the copy of the rows.

    ``bytes_done`` is the size of the tables on the target; ``seconds_left`` is ``None`` while it is unknown.
    """

    shard: int
    bytes_done: int
    bytes_total: int
    rows_done: int
    rows_total: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagging:
    """The number of bytes of the source's log that the target has not confirmed yet."""

    shard: int
    lag_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An attempt was put off and will be repeated; ``reason`` says what was in its way."""

    shard: int
    attempt: int
    reason: str


Event = StepBegun | StepDone | Copying | Lagging | Waiting
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a move ended.

    ``pause_ms`` is how long the shard took no writes, from the first lock to the new placement; ``None``
    where this process did not see both. ``rows_verified`` is ``None`` if nobody asked to compare them.
    ``left_behind`` names a target that did not answer when the move was aborted: what the move had created
    there stays. ``stale_views`` says which views over shards could not be refreshed and what to do, one line
    for each.
    """

    shard: int
    source: str
    target: str
    outcome: Outcome
    seconds: float
    pause_ms: float | None = None
    rows_verified: int | None = None
    left_behind: str | None = None
    stale_views: tuple[str, ...] = ()
