"""The facts of a cluster at one moment: plain records, which the checks judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from shardids.beside.capture import Capture
from shardids.beside.citus.facts import CitusFacts
from shardids.catalog.keys.copies import CopyState
from shardids.catalog.keys.homes import Home, Refused
from shardids.catalog.objects import SchemaObject
from shardids.catalog.recorded import Contract, Key, RecordedSchema
from shardids.catalog.rows import Description
from shardids.catalog.shards import Shard
from shardids.catalog.skipped import Skipped
from shardids.catalog.topology import Node
from shardids.errors import ShardidsError
from shardids.migrate.environment import Recorded
from shardids.pg.clock import ClockSample
from shardids.pg.schemas import Stranger
from shardids.tables.lookups.claiming import Compared
from shardids.tables.views.refresh import State
from shardids.watch.facts.reading import OpenKeyMove, OpenLoss, OpenMove
from shardids.watch.facts.references import ReferenceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A node's name and state, which an examination and each reading of the console know."""

    name: str
    cluster: UUID
    on_copy: str
    is_standby: bool
    is_read_only: bool
    read_only_source: str
    missing_standbys: int
    database: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation(ServerFacts):
    """The rest that an examination knows of a node: the row of ``doctor/node.v1.sql``."""

    epoch_ms: int
    time_bits: int
    shard_bits: int
    sequence_bits: int
    schema_prefix: str
    max_ahead_ms: int
    safety_margin_ms: int
    max_step_ms: int
    clock_confirmed_ms: int | None
    revisions: list[str]
    server_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """The state of a shard on a node, which an examination and each reading of the console know.

    ``state`` is ``None`` for a schema that holds a generator and is not in the node's table of shards.
    """

    shard: int
    schema: str
    state: str | None
    moved_to: str | None
    is_activated_here: bool
    has_schema: bool
    has_sequences: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard(ShardState):
    """The row of a shard on its node and the objects of its schema: one row of ``doctor/shards.v1.sql``.

    How far its generator has come is a :class:`~shardids.catalog.shards.Shard`. ``is_slow``: its next_id()
    looks at ticks of a wrong clock that have passed.
    """

    next_id_is_ours: bool
    is_slow: bool
    next_ids_body: str | None
    own_tables: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFunction:
    """A function of the engine that is not what shardids installs: one row of ``doctor/engine.v1.sql``."""

    function: str
    is_installed: bool
    is_wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """A key of a table, the same in several shards: one row of ``doctor/keys.v1.sql``.

    ``filled_by``: ``own`` (the shard's ``next_id()``), ``foreign`` (that of schema ``filled_from``),
    ``sequence``, ``other`` or ``none``. ``pages`` is the size of the table in each of the shards.
    """

    table_name: str
    column_name: str
    type: str
    filled_by: str
    filled_from: str | None
    is_primary_key: bool
    is_foreign_key: bool
    shards: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """A foreign key that is wrong, the same in several shards: a row of ``doctor/foreign_keys.v1.sql``.

    ``target_schema`` is ``None`` where that is the shard's own.
    """

    table_name: str
    column_name: str
    type: str
    target_table: str
    target_column: str
    target_type: str
    target_schema: str | None
    shards: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serial:
    """A column of a shard that a sequence fills: a row of ``doctor/serials.v1.sql``, and its highest value.

    ``last_value`` was read after ``highest``, so that a sequence that is in order is not below it.
    """

    shard: int
    table_name: str
    column_name: str
    sequence_name: str
    last_value: int
    highest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidIndex:
    """An index that was not finished, the same in several shards: one row of ``doctor/indexes.v1.sql``."""

    index_name: str
    table_name: str
    shards: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something that a move creates and drops: one row of ``doctor/leftovers.v1.sql``.

    ``kind``: ``slot``, ``publication``, ``subscription``, ``barrier`` of a table, or ``closed barrier``.
    ``kept_bytes`` is the WAL that a slot keeps.
    """

    kind: str
    name: str
    shard: int | None
    kept_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """An object in the wrong place: one row of ``doctor/strays.v1.sql``.

    ``kind``: ``schema``, ``extension``, ``prepared transaction``, ``slot`` or ``revision``; ``detail`` is
    for the text of the finding.
    """

    kind: str
    name: str
    shard: int | None
    detail: str | None
    age_s: float | None
    kept_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A session that holds an advisory lock of a shard: one row of ``doctor/locks.v1.sql``.

    ``age_s``: how long an idle session has held it at least; how long the transaction of an ``active`` one
    has been open, or ``None`` if it has none.
    """

    lock: int
    shard: int
    pid: int
    role: str
    application_name: str
    state: str
    age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """All that other roles own, or could create, in the schemas of shardids in a database.

    ``owner`` is the role that all of it should have; ``shards`` has the numbers of the schemas of shards.
    """

    owner: str
    found: Sequence[Stranger]
    shards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSequence:
    """A generator's sequence that is not as shardids creates it: one row of ``doctor/sequences.v1.sql``.

    ``owner`` is the role that it should have.
    """

    shard: int
    name: str
    differences: list[str]
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTrap:
    """Something that makes an unqualified name mean the wrong object: one row of ``doctor/paths.v1.sql``.

    ``kind``: ``setting`` of a role (or of the database, without a name), ``table`` or ``function``. A setting
    holds in ``database``, or in all.
    """

    kind: str
    name: str
    path: str | None
    database: str
    shards: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows of a table that were sampled in one shard, and how many of them belong to another.

    ``said_by``: ``id``, the shard in the ID, or ``key``, the hash of the sharding key. ``example`` is a wrong
    one, which belongs to shard ``belongs_to``. ``newest`` is the highest ID of the shard's own.
    """

    table_name: str
    column_name: str
    said_by: str
    shard: int
    rows: int
    wrong: int
    example: str | None
    belongs_to: int | None
    newest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfShard:
    """A shard's definition of a kind of numbers: a row of its ``shardids_counter_kind``."""

    shard: int
    kind: str
    per: str
    zone: str
    prefix: str
    padding: int
    lanes: int
    keep_days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneOfTenant:
    """The time zone of a tenant in a shard."""

    shard: int
    tenant: str
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterFacts:
    """The kinds of numbers in the shards of a node, and the zones of tenants."""

    kinds: tuple[KindOfShard, ...] = ()
    zones: tuple[ZoneOfTenant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The part of a node's facts that each reading of the console has; ``has_all``: of all its shards."""

    server: ServerFacts
    shards: Mapping[int, ShardState]
    has_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node. With an ``error``, which says why not all could be read, any of the rest may be missing.

    ``objects`` are those of the shards' schemas, ``recorded`` the hashes of revisions that ran. The shards
    ``in_flux`` were migrated while they were read. ``unread`` are tables that were left out, by name and
    shard, with the reason. ``skips``: why rows were not read at all. ``issuers`` are functions that issue IDs
    of shards, by shard. ``glance`` is all that a reading of the console knows, in place of an examination's
    facts.
    """

    node: Node
    error: ShardidsError | None = None
    clock: ClockSample | None = None
    glance: Glance | None = None
    engine: Installation | None = None
    shards: Mapping[int, LocalShard] = field(default_factory=dict)
    draws: Mapping[int, tuple[Shard, Shard]] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    homes: CopyState | None = None
    revisions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    application_revisions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    recorded: Sequence[Recorded] = ()
    changed_functions: Sequence[ChangedFunction] = ()
    keys: Sequence[KeyColumn] = ()
    foreign_keys: Sequence[ForeignKey] = ()
    invalid_indexes: Sequence[InvalidIndex] = ()
    leftovers: Sequence[Leftover] = ()
    capture: Capture | None = None
    citus: CitusFacts | None = None
    strays: Sequence[Stray] = ()
    sequences: Sequence[GeneratorSequence] = ()
    lock_holders: Sequence[LockHolder] = ()
    strangers: Strangers | None = None
    objects: Sequence[SchemaObject] = ()
    in_flux: frozenset[int] = frozenset()
    path_traps: Sequence[PathTrap] = ()
    samples: Sequence[Sample] = ()
    serials: Sequence[Serial] = ()
    contract: Contract | None = None
    issuers: Mapping[int, Sequence[str]] = field(default_factory=dict)
    refused_keys: Sequence[Refused] = ()
    counters: CounterFacts = field(default_factory=CounterFacts)
    unread: Mapping[tuple[str, int], str] = field(default_factory=dict)
    skips: str | None = None

    @property
    def server(self) -> ServerFacts | None:
        """Returns the node's name and state; ``None`` if it did not tell them."""
        return self.glance.server if self.glance else self.engine

    @property
    def states(self) -> Mapping[int, ShardState]:
        """Returns the states of its shards, by number."""
        return self.glance.shards if self.glance else self.shards

    @property
    def has_all_states(self) -> bool:
        """Returns whether a shard that is not among ``states`` is not there."""
        return self.glance is None or self.glance.has_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the catalog says a shard is; ``state`` is ``creating`` until its node has it, or ``lost``."""

    node: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The catalog and all its nodes.

    ``is_migrating``: the application's migrations were running. ``region_of`` has the shards that belong to a
    region. ``skipped``: the ticks that shards pass over, as the catalog has them. ``homes``: the directory of
    keys, ``homeless`` its entries whose shards can't have them, ``misled`` keys that it leads to shards that
    refuse them. ``recorded`` are the schemas that shards must have, except those ``rerecorded`` while the
    nodes were read; ``contracts`` are those of the nodes.
    """

    at: datetime
    description: Description
    catalog_revisions: tuple[str, ...]
    placed: Mapping[int, Placed]
    moves: Sequence[OpenMove]
    key_moves: Sequence[OpenKeyMove] = ()
    losses: Sequence[OpenLoss] = ()
    nodes: Mapping[str, NodeFacts]
    query_node: State | None = None
    lookups: Sequence[Compared] = ()
    is_migrating: bool = False
    references: ReferenceFacts = field(default_factory=ReferenceFacts)
    region_of: Mapping[int, str] = field(default_factory=dict)
    catalog_strangers: Strangers | None = None
    skipped: Sequence[Skipped] = ()
    homes: CopyState | None = None
    homeless: Sequence[Home] = ()
    misled: Sequence[Refused] = ()
    recorded: Mapping[Key, RecordedSchema] = field(default_factory=dict)
    rerecorded: frozenset[Key] = frozenset()
    contracts: Mapping[str, Contract] = field(default_factory=dict)

    @property
    def moving(self) -> frozenset[int]:
        """Returns the shards on their way to a node: the catalog and the nodes need not agree on them."""
        return frozenset(move.shard for move in self.moves) | {loss.shard for loss in self.losses}

    def owns(self, node: str, shard: int) -> bool:
        """Return whether the catalog places the shard on the node."""
        placed = self.placed.get(shard)
        return placed is not None and placed.node == node

    def settled_on(self, node: str) -> frozenset[int]:
        """Return the shards that a node owns, except those with an open move."""
        return frozenset(shard for shard, placed in self.placed.items() if placed.node == node) - self.moving

    def is_settled(self, shard: int, node: str) -> bool:
        """Return whether the node owns the shard and no move of it is open."""
        return self.owns(node, shard) and shard not in self.moving
