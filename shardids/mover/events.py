"""What a move tells while it runs, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardids.mover.journal import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """The step is in the journal, and is taken next."""

    shard: int
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The step was taken."""

    shard: int
    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """How far the copy of the rows is. ``bytes_done`` is the size of the tables on the target;
    ``seconds_left`` is ``None`` while nothing can be said."""

    shard: int
    bytes_done: int
    bytes_total: int
    rows_done: int
    rows_total: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagging:
    """How many bytes of the source's log the target has not confirmed yet."""

    shard: int
    lag_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An attempt was put off and will be made again; ``reason`` says what was in its way."""

    shard: int
    attempt: int
    reason: str


Event = StepBegun | StepDone | Copying | Lagging | Waiting
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a move ended with.

    ``pause_ms`` is how long the shard took no writes, from the first lock to the new placement; ``None``
    where this process did not see both. ``rows_verified`` is ``None`` if they were not asked for.
    ``left_behind`` names a target that did not answer when the move was aborted: what the move had made
    there stays. ``stale_views`` says, a line each, which views over shards could not be refreshed, and what
    to do.
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
