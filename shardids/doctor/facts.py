"""The facts of a cluster at one moment: plain records, which the checks judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from shardids.catalog.clock import ClockSample
from shardids.catalog.objects import SchemaObject
from shardids.catalog.schemas import Stranger
from shardids.catalog.skipped import Skipped
from shardids.catalog.topology import Node
from shardids.doctor.counter_facts import CounterFacts
from shardids.errors import ShardidsError
from shardids.migrate.hashes import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What a node says of itself: the row of ``doctor/node.v1.sql``."""

    name: str
    cluster: UUID
    epoch_ms: int
    time_bits: int
    shard_bits: int
    sequence_bits: int
    schema_prefix: str
    on_copy: str
    max_ahead_ms: int
    safety_margin_ms: int
    max_step_ms: int
    clock_confirmed_ms: int | None
    revisions: list[str]
    server_version: int
    is_standby: bool
    is_read_only: bool
    read_only_source: str
    database: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A shard as its node has it: one row of ``doctor/shards.v1.sql``.

    ``state`` is ``None`` for a schema that holds a generator and is not in the node's table of shards.
    ``is_slow``: its next_id() looks at ticks of a wrong clock that have passed.
    """

    shard: int
    schema: str
    state: str | None
    moved_to: str | None
    is_activated_here: bool
    has_schema: bool
    has_sequences: bool
    next_id_is_ours: bool
    is_slow: bool
    next_ids_body: str | None
    own_tables: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How far a shard's generator has come: one row of ``doctor/draws.v1.sql``.

    ``drawn`` is the value of its counter, ``clock_ms`` its server's clock in milliseconds since the epoch.
    ``has_drawn``: at least once since it was activated. No tick up to ``high_water_tick`` is issued again.
    ``is_fenced``: its sequences say so, whatever its row says.
    """

    shard: int
    drawn: int
    offset_ms: int
    clock_ms: int
    high_water_tick: int = -1
    has_drawn: bool = True
    is_fenced: bool = False


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
    """Something that is not where it belongs: one row of ``doctor/strays.v1.sql``.

    ``kind``: ``schema``, ``extension``, ``prepared transaction``, ``slot`` or ``revision``; ``detail`` is
    what the finding says of it.
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
class Grant:
    """What a role may do with an object, the same in several shards: one row of ``doctor/grants.v1.sql``.

    Without a role: the shards in which the object is. ``OWNER`` stands for all privileges.
    """

    kind: str
    name: str
    role: str | None
    privileges: list[str]
    shards: list[int]


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
class NodeFacts:
    """One node. With an ``error``, which says why not all could be read, any of the rest may be missing.

    ``objects`` are those of the shards' schemas, ``recorded`` the hashes of revisions that ran. The shards
    ``in_flux`` were migrated while they were read. ``unread`` are tables that were left out, by name and
    shard, with the reason. ``skips``: why rows were not read at all.
    """

    node: Node
    error: ShardidsError | None = None
    clock: ClockSample | None = None
    engine: Installation | None = None
    shards: Mapping[int, LocalShard] = field(default_factory=dict)
    draws: Mapping[int, tuple[Draws, Draws]] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    revisions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    application_revisions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    recorded: Sequence[Recorded] = ()
    changed_functions: Sequence[ChangedFunction] = ()
    keys: Sequence[KeyColumn] = ()
    foreign_keys: Sequence[ForeignKey] = ()
    invalid_indexes: Sequence[InvalidIndex] = ()
    leftovers: Sequence[Leftover] = ()
    strays: Sequence[Stray] = ()
    sequences: Sequence[GeneratorSequence] = ()
    lock_holders: Sequence[LockHolder] = ()
    strangers: Strangers | None = None
    objects: Sequence[SchemaObject] = ()
    in_flux: frozenset[int] = frozenset()
    grants: Sequence[Grant] = ()
    path_traps: Sequence[PathTrap] = ()
    samples: Sequence[Sample] = ()
    counters: CounterFacts = field(default_factory=CounterFacts)
    unread: Mapping[tuple[str, int], str] = field(default_factory=dict)
    skips: str | None = None
