"""What became of a run: typed results, as rows to be shown and as the command that tries again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardids.catalog.notation import shown_shards
from shardids.migrate.plan import Start, shown_heads

Status = Literal["done", "failed", "not started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One shard's part in a run.

    ``start`` and ``end`` are the revisions that it was at before and is at now, ``seconds`` the time it took
    with all ``attempts``, ``way`` how it was run, and ``error`` what stopped it.
    """

    shard: int
    node: str
    start: Start
    end: Start
    status: Status
    seconds: float = 0.0
    way: str = ""
    attempts: int = 0
    error: str = ""

    def row(self) -> dict[str, object]:
        """The outcome as it is shown."""
        return {
            "shard": self.shard,
            "node": self.node,
            "from": shown_heads(self.start),
            "to": shown_heads(self.end),
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "way": self.way,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run did: an outcome for every shard that it was to change, and how long it took in all."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    interrupted: bool = False

    def of(self, status: Status) -> list[Outcome]:
        """The outcomes with that status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def succeeded(self) -> bool:
        """Whether every shard is where it was to be."""
        return all(outcome.status == "done" for outcome in self.outcomes)

    def retry_command(self, words: Sequence[str]) -> str:
        """The command that runs again what failed or was not started; ``words`` are those without shards."""
        left = [outcome.shard for outcome in self.outcomes if outcome.status != "done"]
        return shlex.join([*words, "--shards", shown_shards(left)])
