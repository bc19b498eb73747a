"""Nodes, the placement of shards on them, and the hashing of keys to shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from uuid import UUID

from shardids.errors import (
    BadArgument,
    RowsUnsettled,
    ShardidsError,
    ShardLost,
    ShardMoved,
    UnknownShard,
    UnsupportedKey,
)
from shardids.ids.text import as_integer, checked_integer, shown

if TYPE_CHECKING:
    from shardids.catalog.regions import Region

_NODE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
_SCHEMA_PREFIX: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_LAST_SHARD: Final = (1 << 16) - 1

REFERENCE_SCHEMA: Final = "shardids_ref"
"""The schema of reference tables on every node."""

BY_KEY: Final = "key"
BY_DIRECTORY: Final = "directory"
BY_FAN_OUT: Final = "fan-out"
"""The rules of :class:`OldIdRule`."""


def validate_node_name(name: str) -> str:
    """Return ``name`` if a node may have it: 1 to 40 of A-Z, a-z, 0-9, ``_ - .``, a letter first.

    Raises:
        BadArgument: a node may not have it; the message states the rule.
    """
    if not _NODE_NAME.fullmatch(name):
        raise BadArgument(
            f"{name!r} can't be a node's name: it takes 1 to 40 characters, first a letter (A-Z,"
            " a-z), then letters, digits, '_', '-' and '.'"
        )
    return name


def validate_schema_prefix(prefix: str) -> str:
    """Return ``prefix`` if schema names of shards may start with it.

    It takes 1 to 40 of a-z, 0-9 and ``_``, no digit first. ``pg_`` belongs to PostgreSQL and
    ``shardids`` to shardids.

    Raises:
        BadArgument: it is not allowed; the message states the rule.
    """
    if not _SCHEMA_PREFIX.fullmatch(prefix):
        raise BadArgument(
            f"{prefix!r} can't be a schema prefix: it takes 1 to 40 characters, first a lower-case"
            " letter (a-z) or '_', then lower-case letters, digits and '_'"
        )
    for reserved in ("pg_", "shardids"):
        if prefix.startswith(reserved):
            raise BadArgument(
                f"{prefix!r} can't be a schema prefix: names that start with {reserved!r} are reserved"
            )
    return prefix


@lru_cache(maxsize=_LAST_SHARD + 1, typed=True)
def schema_name(prefix: str, shard: int) -> str:
    """Return the schema of a shard: the prefix, then the number in at least four digits.

    ``schema_name("shard_", 5)`` is ``shard_0005``.

    Raises:
        BadArgument: a prefix that is not allowed, or a shard not in 0 … 65535.
    """
    number = checked_integer("shard", shard, 0, _LAST_SHARD)
    return f"{validate_schema_prefix(prefix)}{number:04d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One PostgreSQL database that hosts shards. The URL may hold a password: repr omits it.

    ``region`` is the region whose shards it takes; without one it takes the shards of no region. Nodes are
    equal if name and URL are: connections and transactions belong to a node whatever its region is.

    Raises:
        BadArgument: a name that :func:`validate_node_name` refuses.
    """

    name: str
    url: str = field(repr=False)
    region: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        validate_node_name(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldIdRule:
    """How an ID that was issued before a table was adopted finds the shard of its row.

    Attributes:
        table: the table's name, as it is in every shard.
        column: the column with the IDs: the primary key.
        rule: ``key``: by the hash of the ID (:func:`shard_for_key`); ``directory``: by a list in the
            catalog; ``fan-out``: by asking every shard.

    Raises:
        BadArgument: another rule than these.
    """

    table: str
    column: str
    rule: str

    def __post_init__(self) -> None:
        if self.rule not in (BY_KEY, BY_DIRECTORY, BY_FAN_OUT):
            raise BadArgument(
                f"{self.rule!r} is not a rule for old IDs",
                hint=f"It is {BY_KEY}, {BY_DIRECTORY} or {BY_FAN_OUT}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OldIdRules:
    """Which IDs of a cluster are old, and how those of each adopted table find their shards.

    Attributes:
        below: IDs below it were issued before the cluster.
        negative: whether negative IDs are also old; not in a layout that uses the sign bit.
        of_table: the rules, by table.
    """

    below: int
    negative: bool
    of_table: Mapping[str, OldIdRule]

    def has(self, id_: int) -> bool:
        """Return whether an ID is old. Raises BadArgument if it is not an integer."""
        number = id_ if type(id_) is int else as_integer("an ID", id_)
        return number < self.below and (number >= 0 or self.negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredLookup:
    """A look-up that was created: a column that is unique over all shards.

    Attributes:
        table: the table's name, as it is in every shard.
        column: the column.
        claims: the table in every shard that holds the claims of some values.
        is_ready: whether every row has a claim, so that a value without one has no row.
    """

    table: str
    column: str
    claims: str
    is_ready: bool

    def __str__(self) -> str:
        return f"{self.table}.{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every shard lives, as the catalog had it at ``version``.

    ``nodes`` holds nodes by name, ``node_of`` the name of the node of each shard. ``lost`` has the shards
    that live nowhere, with the name of the node that was replaced by a server without them. All are copied
    and can't be changed. ``old_ids`` has the rules for IDs that were issued before, if tables were adopted.
    ``lookups`` has the columns that are unique over all shards, by table and column. ``regions`` has the
    regions by name. ``homes_version`` is the version of the directory of keys, 0 if it never had an entry.
    ``unsettled`` has the shards that rows of a key are just being moved from or to, ``unsettled_version`` the
    version at which such a move last began or ended.

    Raises:
        BadArgument: a node under another name than its own, or a shard on a node not in ``nodes``.
    """

    version: int
    nodes: Mapping[str, Node]
    node_of: Mapping[int, str]
    lost: Mapping[int, str] = field(default_factory=dict)
    old_ids: OldIdRules | None = None
    lookups: Mapping[tuple[str, str], RegisteredLookup] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    homes_version: int = 0
    unsettled: frozenset[int] = frozenset()
    unsettled_version: int = 0

    def __post_init__(self) -> None:
        for name, node in self.nodes.items():
            if node.name != name:
                raise BadArgument(f"node {node.name!r} is placed under another name, {name!r}")
        for shard, name in self.node_of.items():
            if name not in self.nodes:
                raise BadArgument(f"shard {shard} is on node {name!r}, which is not in the map")
        object.__setattr__(self, "nodes", MappingProxyType(dict(self.nodes)))
        object.__setattr__(self, "node_of", MappingProxyType(dict(self.node_of)))
        object.__setattr__(self, "lost", MappingProxyType(dict(self.lost)))
        object.__setattr__(self, "lookups", MappingProxyType(dict(self.lookups)))
        object.__setattr__(self, "regions", MappingProxyType(dict(self.regions)))

    def owners(self) -> dict[int, str]:
        """Return the owner of each shard, and for a lost one the node that it was lost with."""
        return {**self.node_of, **self.lost}

    def region_of(self, shard: int) -> str | None:
        """Return the name of the region that a shard belongs to, or ``None``."""
        return next((region.name for region in self.regions.values() if shard in region.shards), None)

    def nodes_of_region(self, region: str | None) -> list[str]:
        """Return the names of the nodes that take a region's shards; of ``None``, those of no region."""
        return sorted(node.name for node in self.nodes.values() if node.region == region)

    def outside(self) -> dict[int, str]:
        """Return the shards that live on a node of another region than theirs, each with that node."""
        return {
            shard: name
            for shard, name in sorted(self.node_of.items())
            if self.region_of(shard) != self.nodes[name].region
        }

    def total(self, shard_count: int) -> int:
        """Return the number of shards: those that keys are hashed over, and those after them.

        These were made for a key each, and have a place: :func:`shardids.tenants.new_shard`.
        """
        return max(shard_count, 1 + max(self.owners(), default=0))

    def has(self, shard: int, shard_count: int) -> bool:
        """Return whether the cluster has a shard: one that keys are hashed over, or one after these."""
        return 0 <= shard < shard_count or shard in self.node_of or shard in self.lost

    def all_shards(self) -> list[int]:
        """Return every placed shard, sorted, for what must ask all of them.

        Raises:
            ShardLost: one of them lives nowhere, so that an answer would lack its rows.
        """
        for shard in self.lost:
            self.locate(shard)
        return sorted(self.node_of)

    def require_settled(
        self, shards: Collection[int] | None = None, *, since: Placement | None = None
    ) -> None:
        """Require that a statement over these shards, by default all, sees each row once.

        ``since`` is the placement that led to the first of them.

        Raises:
            RowsUnsettled: the rows of a key are just being moved from or to one of them; or such a move has
                come to its switch, or has ended, since.
        """
        if shards is not None and len(shards) < 2:
            return
        moving = self.unsettled and (
            self.unsettled if shards is None else self.unsettled.intersection(shards)
        )
        if moving:
            raise RowsUnsettled(
                f"the rows of a key are being moved, and statements over several shards with shard"
                f" {min(moving)} would not see each row once",
                hint="Again in a moment. How far the move is: shardids tenant move --list",
            )
        if since is not None and self.unsettled_version != since.unsettled_version:
            raise RowsUnsettled(
                "rows of a key were moved to another shard while a statement was sent to several: it would"
                " have missed them or seen them twice",
                hint="Again in a moment. How far the move is: shardids tenant move --list",
            )

    def has_rows_as(self, began: Placement) -> bool:
        """Return whether no row that shards had by ``began`` may be elsewhere by this placement."""
        return (
            self.unsettled_version == began.unsettled_version
            and self.homes_version == began.homes_version
            and self.node_of == began.node_of
            and self.nodes == began.nodes
        )

    def require_kept(self, began: Placement, shards: Collection[int] | None = None) -> None:
        """Require that snapshots which were taken by ``began`` have the rows of these shards, by default all.

        One shard is routed to by the directory of keys: a key's rows arrive in it before the directory says
        so, and after the move was announced.

        Raises:
            ShardMoved: one of the shards has moved to another node since.
            RowsUnsettled: the rows of a key have, or may have, moved to another shard since.
        """
        hint = "Roll back, and repeat the transaction."
        for shard in self.node_of if shards is None else shards:
            before, now = began.node_of.get(shard), self.node_of.get(shard)
            if before and now and began.nodes[before] != self.nodes[now]:
                raise ShardMoved(
                    f'shard {shard} moved from node "{before}" to node "{now}" after this transaction began,'
                    " which is REPEATABLE READ or SERIALIZABLE: it would miss rows, or see them as of another"
                    " moment",
                    hint=hint,
                )
        have_moved = self.unsettled_version != began.unsettled_version
        if shards is not None and len(shards) < 2:
            have_moved = self.homes_version != began.homes_version and (have_moved or bool(began.unsettled))
        if have_moved:
            raise RowsUnsettled(
                "rows of a key were moved to another shard after this transaction began, which is REPEATABLE"
                " READ or SERIALIZABLE: it would miss them or see them twice",
                hint=hint,
            )

    def by_node(self, shards: Iterable[int] | None = None) -> dict[str, list[int]]:
        """Group shards by the name of their node, both sorted; default: every placed shard.

        Raises:
            UnknownShard: a shard is on none of the nodes.
        """
        found: dict[str, list[int]] = {}
        for shard in sorted(set(self.node_of if shards is None else shards)):
            found.setdefault(self.locate(shard).name, []).append(shard)
        return dict(sorted(found.items()))

    def digest(self) -> str:
        """Return a hash of the shards with their nodes and addresses, to compare two placements."""
        lines = [f"{shard} {name} {self.nodes[name].url}" for shard, name in sorted(self.node_of.items())]
        return sha256("\n".join(lines).encode()).hexdigest()[:32]

    def locate(self, shard: int) -> Node:
        """Return the node that the shard lives on.

        Raises:
            UnknownShard: the shard is on none of the nodes.
            ShardLost: the shard was lost with its node.
        """
        try:
            return self.nodes[self.node_of[shard]]
        except KeyError:
            if shard in self.lost:
                raise lost_shard(shard, self.lost[shard]) from None
            raise unplaced_shard(shard) from None


def no_shard(shard: int, count: int, error: type[ShardidsError] = BadArgument) -> ShardidsError:
    """Return the error for a shard that a cluster of ``count`` shards does not have."""
    return error(
        f"shard {shown(shard)} does not exist in this cluster",
        hint=f"Shards are numbered 0 to {count - 1}.",
    )


def unplaced_shard(shard: int) -> UnknownShard:
    """Return the error for a shard that a cluster has, and no node."""
    return UnknownShard(
        f"no node holds shard {shard}",
        hint="shardids shard list shows those that are held; shardids shard create makes missing ones.",
    )


def lost_shard(shard: int, node: str) -> ShardLost:
    """Return the error for a shard that was lost with a node."""
    return ShardLost(
        f'shard {shard} was lost: the server that took over node "{node}" does not have it',
        hint=f"To see what is left of it: shardids node replace {node} --url URL --dry-run",
    )


def key_hash(key: object) -> int:
    """Return the 64-bit number, 0 … 2^64 - 1, that a key hashes to, on every machine and in every version.

    It is the first 8 bytes, big-endian, of the SHA-256 of the key's type and value:

    ======== =============================================================================
    type     bytes that are hashed
    ======== =============================================================================
    int      ``i:`` and the decimal digits, after a ``-`` if negative
    str      ``s:`` and the UTF-8 bytes; not normalised: equal text in two Unicode forms is
             two keys
    bytes    ``b:`` and the bytes
    UUID     ``u:`` and the 16 bytes, big-endian
    ======== =============================================================================

    Keys of different types differ: ``5`` and ``"5"`` are two keys. In SQL, where ``b`` stands for
    the bytes that are hashed, this is the same number in its signed reading::

        ('x' || encode(substr(sha256(b), 1, 8), 'hex'))::bit(64)::bigint

    and these are the bytes, by the type of ``key``::

        bigint   convert_to('i:' || key, 'UTF8')
        text     convert_to('s:' || key, 'UTF8')
        bytea    '\\x623a'::bytea || key
        uuid     '\\x753a'::bytea || uuid_send(key)

    Raises:
        UnsupportedKey: a key of another type, bool included.
        BadArgument: a str that has no UTF-8 form (lone surrogates), or an int too long to print.
    """
    return int.from_bytes(sha256(key_bytes(key)).digest()[:8], "big")


def shard_for_key(key: int | str | bytes | UUID, shard_count: int) -> int:
    """Return the shard, 0 … ``shard_count`` - 1, that a key belongs to: :func:`key_hash` modulo the count.

    Keys move to other shards when the count changes: fix it when the cluster is made. In SQL,
    where ``h`` stands for the signed reading of the hash::

        mod(h + CASE WHEN h < 0 THEN 18446744073709551616 ELSE 0 END, shard_count)

    Raises:
        UnsupportedKey: a key of another type, bool included.
        BadArgument: a key that :func:`key_hash` refuses for its value, or a count below 1.
    """
    return key_hash(key) % checked_integer("shard_count", shard_count, 1, _LAST_SHARD + 1)


def shards_for_keys(keys: Iterable[int] | Iterable[str], shard_count: int) -> list[int]:
    """Return the shards of many keys of one type, ``int`` or ``str``: :func:`shard_for_key` of each, quicker.

    Raises:
        ValueError: a key that :func:`shard_for_key` refuses for its value.
    """
    return [int.from_bytes(digest[:8], "big") % shard_count for digest in digests_of_keys(keys)]


def shard_of_digest(digest: bytes, shard_count: int) -> int:
    """Return the shard of a key by its SHA-256: the first 8 bytes, modulo the number of shards."""
    return int.from_bytes(digest[:8], "big") % shard_count


def digests_of_keys(keys: Iterable[int] | Iterable[str]) -> Iterator[bytes]:
    """Yield the SHA-256 of keys of one type, ``int`` or ``str``, as :func:`key_hash` has it."""
    tagged = ((b"i:%d" % key) if type(key) is int else f"s:{key}".encode() for key in keys)
    return (sha256(each).digest() for each in tagged)


def key_bytes(key: object) -> bytes:
    """Return the bytes of a key's type and value that are hashed; raise as :func:`key_hash` does."""
    match key:
        case bool():
            pass
        case int():
            try:
                return b"i:%d" % int(key)
            except ValueError as error:
                raise BadArgument(f"an integer key is too long: {error}") from None
        case str():
            try:
                return b"s:" + str.encode(key, "utf-8")
            except UnicodeEncodeError as error:
                raise BadArgument(f"a key has no UTF-8 form: {error}") from None
        case bytes():
            return b"".join((b"b:", key))
        case UUID():
            return b"u:" + key.bytes
    raise UnsupportedKey(
        f"a key of type {type(key).__name__} has no stable hash:"
        " a key must be an int, str, bytes or uuid.UUID"
    )
