"""Plans and results of a run: each shard's revision, what runs where, and how it ended. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shardids.pg.notation import shown_shards

Heads = tuple[str, ...]
"""The revisions in a version table, sorted; empty at base."""
Start = Heads | None
"""The revisions that a shard is migrated from; ``None`` if it has no version table yet."""
Status = Literal["done", "failed", "not started"]


def shown_heads(heads: Start) -> str:
    """Write ``heads`` as messages show them."""
    return ", ".join(heads) if heads else "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A shard and what its version table says.

    ``unfinished`` marks a revision that was begun outside a transaction and has not ended.
    """

    shard: int
    node: str
    heads: Start
    unfinished: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from a starting point to ``target``: the ``revisions`` to run, in order, and where it ends.

    ``target`` is a whole revision or ``base``, never relative, so that a retry computes the same route.
    ``held_back`` is the contract revision that the route stops before, if any.
    """

    start: Start
    end: Heads
    target: str
    revisions: tuple[str, ...]
    held_back: str | None = None

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to do."""
        return not self.revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """The order of a run: ``canaries`` first, one at a time, then each node's queue in order.

    ``routes`` holds the route from each starting point that occurs, ``settled`` the shards that have
    reached the target already.
    """

    canaries: tuple[Position, ...]
    queues: Mapping[str, tuple[Position, ...]]
    settled: tuple[Position, ...]
    routes: Mapping[Start, Route]

    @property
    def pending(self) -> tuple[Position, ...]:
        """Returns all shards that the run changes, the canaries first."""
        return self.canaries + tuple(position for queue in self.queues.values() for position in queue)


def shards_by_start(positions: Iterable[Position]) -> dict[Start, list[int]]:
    """Group shards by their starting points."""
    grouped: dict[Start, list[int]] = {}
    for position in sorted(positions, key=lambda p: p.shard):
        grouped.setdefault(position.heads, []).append(position.shard)
    return grouped


def make_plan(
    positions: Iterable[Position], route_from: Callable[[Start], Route], canaries: int
) -> MigrationPlan:
    """Plan a run: calls ``route_from`` once for each starting point, and picks canaries node by node.

    A shard with an unfinished revision comes first on its node: it is the likeliest to fail.
    """
    ordered = sorted(positions, key=lambda p: (p.unfinished is None, p.shard))
    routes = {start: route_from(start) for start in dict.fromkeys(p.heads for p in ordered)}
    pending = [p for p in ordered if not routes[p.heads].is_empty]
    chosen = _one_of_each_in_turn(pending)[:canaries]
    rest = [p for p in pending if p not in set(chosen)]
    return MigrationPlan(
        canaries=tuple(chosen),
        queues=MappingProxyType(
            {node: tuple(p for p in rest if p.node == node) for node in sorted({p.node for p in rest})}
        ),
        settled=tuple(p for p in ordered if routes[p.heads].is_empty),
        routes=MappingProxyType(routes),
    )


def _one_of_each_in_turn(positions: list[Position]) -> list[Position]:
    turns: dict[str, int] = {}
    ranked = []
    for position in positions:
        turns[position.node] = turns.get(position.node, 0) + 1
        ranked.append((turns[position.node], position.node, position.shard, position))
    return [position for *_, position in sorted(ranked, key=lambda entry: entry[:3])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run for one shard.

    ``start`` and ``end`` are its revisions before the run and now, ``seconds`` the time over all
    ``attempts``, ``way`` how it was run, ``error`` the failure that stopped it, and ``cause`` the
    part of it that may be logged. ``is_busy``: another command, which lives, has the shard's lease.
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
    cause: str = ""
    is_busy: bool = False

    def row(self) -> dict[str, object]:
        """Return the outcome as commands show it."""
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
class NodeOutcome:
    """The outcome of a run for a node: its node revisions before and now, and the failure that stopped it."""

    node: str
    start: Heads
    end: Heads
    status: Status
    error: str = ""

    def row(self) -> dict[str, object]:
        """Return the outcome as commands show it."""
        return {
            "node": self.node,
            "from": shown_heads(self.start),
            "to": shown_heads(self.end),
            "status": self.status,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The result of a run: an outcome for each shard and node that it was to change, and the time it took."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    interrupted: bool = False
    nodes: tuple[NodeOutcome, ...] = ()

    def of(self, status: Status) -> list[Outcome]:
        """Return the outcomes with that status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def succeeded(self) -> bool:
        """Returns whether every shard and node reached the target."""
        statuses = {*(one.status for one in self.outcomes), *(one.status for one in self.nodes)}
        return statuses <= {"done"}

    def retry_command(self, words: Sequence[str]) -> str:
        """Return the command that runs what failed or was not started; ``words`` names no shards."""
        left = [outcome.shard for outcome in self.outcomes if outcome.status != "done"]
        return shlex.join([*words, *(["--shards", shown_shards(left)] if left else [])])
