"""The facts of a whole cluster: what the catalog says, and those of each node and of the query node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shardids.catalog.rows import Description
from shardids.catalog.skipped import Skipped
from shardids.doctor.facts import NodeFacts, Strangers
from shardids.doctor.reference_facts import ReferenceFacts
from shardids.lookups.comparing import Compared
from shardids.views.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the catalog says a shard is; ``state`` is ``creating`` until its node has it, or ``lost``."""

    node: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An open move. ``is_running``: a process is working on it."""

    shard: int
    source: str
    target: str
    step: str
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The catalog and all its nodes.

    ``is_migrating``: the application's migrations were running. ``region_of`` has the shards that belong to a
    region. ``skipped``: the ticks that shards pass over, as the catalog has them.
    """

    at: datetime
    description: Description
    catalog_revisions: tuple[str, ...]
    placed: Mapping[int, Placed]
    moves: Sequence[Move]
    nodes: Mapping[str, NodeFacts]
    query_node: State | None = None
    lookups: Sequence[Compared] = ()
    is_migrating: bool = False
    references: ReferenceFacts = field(default_factory=ReferenceFacts)
    region_of: Mapping[int, str] = field(default_factory=dict)
    catalog_strangers: Strangers | None = None
    skipped: Sequence[Skipped] = ()

    @property
    def moving(self) -> frozenset[int]:
        """Returns the shards with an open move: the catalog and the nodes need not agree on them."""
        return frozenset(move.shard for move in self.moves)

    def owns(self, node: str, shard: int) -> bool:
        """Returns whether the catalog places the shard on the node."""
        placed = self.placed.get(shard)
        return placed is not None and placed.node == node

    def is_settled(self, shard: int, node: str) -> bool:
        """Returns whether the node owns the shard and no move of it is open."""
        return self.owns(node, shard) and shard not in self.moving
