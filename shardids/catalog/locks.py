"""Every advisory lock that shardids takes: its number, where it is taken, and what holding it means.

The numbers are written out in ``sql/`` too, which psql must be able to run; a test holds the two together.
"""

from __future__ import annotations

from enum import IntEnum


class AdvisoryLock(IntEnum):
    """The class of a two-part lock whose second part is the shard, or the key of a single lock."""

    GENERATOR = 1936220516
    """(class, shard) on a node: raises or stops the shard's clock; held for microseconds."""
    SHARD_SCHEMA = 1936220517
    """(class, shard) on a node: changes the shard's schema; until the end of the transaction."""
    INSTALL = 1936220518
    """Key, on a node and in the catalog: installs shardids' own objects, or changes grants."""
    CATALOG_GRANTS = 1936220519
    """Key, in the catalog: changes the catalog's grants; until the end of the transaction."""
    MOVE = 1936220520
    """(class, shard) in the catalog: moves the shard; as long as the mover's session lives."""
    WRITE_BARRIER = 1936220521
    """(class, shard) on a node: shared by every writer of its tables; the mover waits for all."""
    VIEWS = 1936220522
    """(class, 0) in the database of views over all shards: changes views there."""
    ADOPT = 1936220523
    """(class, 0) in the catalog: works at the adoption; as long as the process lives."""
    ADOPT_BARRIER = 1936220524
    """(class, 0) in a database that is adopted: shared by every writer; the switch waits for all."""
    REFERENCES = 1936220527
    """(class, 0) in the catalog: changes which reference tables there are, or who follows the writer."""
    MIGRATE = 1936220530
    """(class, shard) on a node: migrates the shard."""
    MIGRATE_RUN = 1936220531
    """Key, in the catalog: the one run that changes many shards; as long as its connection lives."""
    COUNTER_LANE = 1936220540
    """(class, hash) on a node: begins a lane of a counter; nobody waits; until the transaction ends."""
