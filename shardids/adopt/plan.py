"""What an adoption is to do: which tables are split by which key, which every node gets, which are left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How the rows of a table find their shards.

    Attributes:
        ROOT: by their own primary key, which is the sharding key of the others.
        DIRECT: by a column of theirs that holds the root's key.
        DERIVED: by foreign keys that lead to a table that holds the root's key.
        REFERENCE: not at all: every node gets all rows.
        LOOSE: not at all: nothing leads to the root, and the table stays at the source.
    """

    ROOT = "root"
    DIRECT = "direct"
    DERIVED = "derived"
    REFERENCE = "reference"
    LOOSE = "loose"


class OldIds(StrEnum):
    """How the shard of an ID that was issued before the adoption is found.

    Attributes:
        KEY: the ID is the sharding key itself.
        DIRECTORY: by a list of IDs and shards in the catalog.
        FAN_OUT: by asking every shard.
    """

    KEY = "key"
    DIRECTORY = "directory"
    FAN_OUT = "fan-out"


class Severity(StrEnum):
    """What a finding means for the adoption.

    Attributes:
        BLOCKS: it can't be run.
        NEEDS_RELAY: the source's own publication can't do it, a relay can: without one it blocks.
        NOT_KEPT: the cluster will not have something that the source has.
        NOTE: something is to be known.
    """

    BLOCKS = "blocks"
    NEEDS_RELAY = "needs a relay"
    NOT_KEPT = "not kept"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A foreign key on the way to the root's key: ``columns`` refer to ``referenced`` of ``table``."""

    columns: tuple[str, ...]
    table: str
    referenced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """What becomes of one table.

    Names of tables are quoted where SQL needs it; names of columns are bare, as in ``pg_attribute``.

    Attributes:
        name: the table with its schema, both quoted where SQL needs it: ``public.users``.
        kind: how its rows find their shards.
        key: the column that holds the sharding key; of a DERIVED table, that of the last hop's table.
        path: the foreign keys to follow to the table that holds the key (DERIVED).
        id: the primary key's column, if it is one of an integer type or uuid. In the shards an integer key is
            bigint, whatever it is at the source.
        old_ids: how an ID that was issued before finds its shard; None for tables that are not split.
        rows: estimated number of rows.
        size_bytes: size of the table with its indexes.
    """

    name: str
    kind: Kind
    key: str | None = None
    path: tuple[Hop, ...] = ()
    id: str | None = None
    old_ids: OldIds | None = None
    rows: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the plan's reader has to know, with what to do about it."""

    severity: Severity
    subject: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A reviewed plan: what ``shardids adopt plan`` writes and ``shardids adopt run`` reads.

    Attributes:
        source: the source's URL without its password.
        server_version: ``server_version_num`` of the source.
        root: the root table's name.
        shard_count: into how many shards the rows are split; the cluster has as many.
        tables: every table, parents before children.
        findings: what was found; a plan with one that blocks is not run.
        via: the URL of the relay, without its password; None if the nodes follow the source itself.
    """

    source: str
    server_version: int
    root: str
    shard_count: int
    tables: tuple[TablePlan, ...]
    findings: tuple[Finding, ...] = ()
    via: str | None = None

    def is_blocked_by(self, finding: Finding) -> bool:
        """Returns whether a finding keeps the plan from being run."""
        without_relay = self.via is None and finding.severity is Severity.NEEDS_RELAY
        return finding.severity is Severity.BLOCKS or without_relay
