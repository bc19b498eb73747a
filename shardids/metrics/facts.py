"""What the catalog and the nodes answer, as plain records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from uuid import UUID

from shardids.catalog.clock import ClockSample
from shardids.errors import ShardidsError
from shardids.ids.layout import Layout

ShardState = Literal["active", "fenced", "arriving", "copy", "moved", "broken", "unreadable"]
"""``arriving``: it is being moved here; ``copy``: it was not activated on this server; ``moved``: what a move
left; ``broken``: its sequences are gone; ``unreadable``: the role may not read them."""


class Shard(NamedTuple):
    """A shard on a node, and how far its generator has come: a row of ``metrics/shards.v1.sql``.

    A tuple, for thousands are made in each reading.

    Attributes:
        shard: its number.
        state: see :data:`ShardState`.
        counter: OID of its sequence ``id_counter``, by which another one in its place is noticed.
        drawn: the last value of that sequence; 0 before the first draw, and where it was not read.
        offset_ms: its offset, in ms of the layout; ``None`` if there is no sequence to read.
        clock_ms: the server's clock, in ms of the layout.
    """

    shard: int
    state: ShardState
    counter: int | None
    drawn: int
    offset_ms: int | None
    clock_ms: int

    def lead_ms(self, layout: Layout) -> int | None:
        """Returns how far its ticks are ahead of the clock; ``None`` if it issues no IDs."""
        if self.state != "active" or self.offset_ms is None:
            return None
        return self.offset_ms + (self.drawn >> layout.sequence_bits) - self.clock_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What a node says of itself: the row of ``metrics/node.v1.sql``.

    Attributes:
        name: the node that it says it is.
        cluster: the cluster that it says it is of.
        max_ahead_s: the lead from which on draws are refused.
        safety_margin_s: how far a new incarnation jumps ahead.
        is_standby: whether it is in recovery; then its sequences can't be read.
        is_writable: whether it takes writes of roles that have no settings of their own.
        connections: sessions in all databases of its server.
        most_connections: ``max_connections`` of its server.
        prepared: by kind, how many transactions are prepared, and for how long the oldest has been, in s.
        slots: by kind, how many replication slots there are, how many bytes of the log the one farthest
            behind has not confirmed, how many are kept for one, and how many slots are not sure of their log.
        subscriptions: by kind, how many there are, how many of them no worker serves, and how long ago one
            last heard of its publisher, in s.
    """

    name: str
    cluster: UUID
    max_ahead_s: float
    safety_margin_s: float
    is_standby: bool
    is_writable: bool
    connections: int
    most_connections: int
    prepared: Mapping[str, tuple[int, float]]
    slots: Mapping[str, tuple[int, int | None, int | None, int]]
    subscriptions: Mapping[str, tuple[int, int, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node answered, as far as it did.

    Attributes:
        seconds: how long it took.
        read_at: when its shards were read, by this machine's monotonic clock, in s.
        error: why not all of it could be read.
        clock: how far its clock is ahead of this machine's.
        state: what it says of itself.
        shards: its shards, old copies among them, as far as they could be read; ``None`` if none could.
        has_all_shards: whether these are all of them.
    """

    seconds: float
    read_at: float = 0.0
    error: ShardidsError | None = None
    clock: ClockSample | None = None
    state: NodeState | None = None
    shards: Sequence[Shard] | None = None
    has_all_shards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMove:
    """A move that is not over; ``age_s``: since it was begun; ``is_running``: a process works at it."""

    shard: int
    age_s: float
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogState:
    """What the catalog says: the row of ``metrics/catalog.v1.sql``.

    Attributes:
        nodes: the nodes' URLs, by name.
        schema_prefix: what the names of shards' schemas begin with.
        placed: the shards of a node, by node and by the state of their placement.
        adoption: what becomes of the adoption that is not over: ``running``, ``paused`` or ``waiting``.
        node_regions: the regions of the nodes that have one.
        regions: the shards of each region, also those that are not placed.
    """

    cluster: UUID
    version: int
    layout: Layout
    shard_count: int
    schema_prefix: str
    nodes: Mapping[str, str]
    placed: Mapping[tuple[str, str], frozenset[int]]
    moves: Sequence[OpenMove]
    adoption: str | None
    node_regions: Mapping[str, str]
    regions: Mapping[str, frozenset[int]]

    @classmethod
    def from_row(cls, **row: Any) -> CatalogState:
        """Makes it of the row's columns."""
        bits = {name: row[name] for name in ("epoch_ms", "time_bits", "shard_bits", "sequence_bits")}
        return cls(
            cluster=row["cluster"],
            version=row["version"],
            layout=Layout(name=row["layout_name"], **bits),
            shard_count=row["shard_count"],
            schema_prefix=row["schema_prefix"],
            nodes=row["nodes"],
            placed={(node, state): frozenset(shards) for node, state, shards in row["placements"]},
            moves=[OpenMove(**move) for move in row["moves"]],
            adoption=row["adoption"],
            node_regions=row["node_regions"],
            regions={name: frozenset(range(first, last + 1)) for name, first, last in row["regions"]},
        )

    def outside(self, node: str) -> frozenset[int]:
        """Returns the shards that are placed on a node and not of its region."""
        placed = self.placed.get((node, "active"), frozenset())
        region = self.node_regions.get(node)
        if region is not None:
            return placed - self.regions[region]
        return placed & frozenset().union(*self.regions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all of a cluster answered at one time.

    Attributes:
        known: what the catalog said last; ``None`` if it has never answered.
        catalog_error: why it did not answer this time.
        nodes: the answers of the nodes that it named last.
        seconds: how long all of it took.
    """

    known: CatalogState | None
    catalog_error: ShardidsError | None
    nodes: Mapping[str, NodeAnswer] = field(default_factory=dict)
    seconds: float
