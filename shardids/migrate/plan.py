"""Who is at which revision, and what is to be run where. No database, no Alembic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Heads = tuple[str, ...]
"""The revisions in a version table, sorted; empty at base."""
Start = Heads | None
"""What a shard is migrated from; ``None`` where it has no version table yet."""


def shown_heads(heads: Start) -> str:
    """``heads`` in words."""
    return ", ".join(heads) if heads else "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A shard and what its version table says.

    ``unfinished`` is the mark of a revision that was begun outside a transaction and not ended.
    """

    shard: int
    node: str
    heads: Start
    unfinished: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from a starting point to ``target``: the ``revisions`` that run, in their order, and its end.

    ``target`` is a whole revision or ``base``, never relative, so that a shard that is asked again has the
    same. ``held_back`` is the contract revision that the route stops before, if it does.
    """

    start: Start
    end: Heads
    target: str
    revisions: tuple[str, ...]
    held_back: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does: ``canaries`` first and alone, then each node's ``queues`` in their order.

    ``routes`` has the route of every starting point that occurs, ``settled`` the shards that are
    where they are to be.
    """

    canaries: tuple[Position, ...]
    queues: Mapping[str, tuple[Position, ...]]
    settled: tuple[Position, ...]
    routes: Mapping[Start, Route]

    @property
    def pending(self) -> tuple[Position, ...]:
        """All shards that something is to be run on, the canaries first."""
        return self.canaries + tuple(position for queue in self.queues.values() for position in queue)


def make_plan(positions: Iterable[Position], route_from: Callable[[Start], Route], canaries: int) -> Plan:
    """Plans a run: asks ``route_from`` once for each starting point, and takes canaries of each node in turn.

    A shard with an unfinished revision comes first on its node: the mark is the likeliest trouble.
    """
    ordered = sorted(positions, key=lambda p: (p.unfinished is None, p.shard))
    routes = {start: route_from(start) for start in dict.fromkeys(p.heads for p in ordered)}
    pending = [p for p in ordered if not routes[p.heads].is_empty]
    chosen = _one_of_each_in_turn(pending)[:canaries]
    rest = [p for p in pending if p not in set(chosen)]
    return Plan(
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
