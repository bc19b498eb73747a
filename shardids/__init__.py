"""64-bit IDs born inside PostgreSQL shards, and the cluster around them.

:class:`Cluster` is the front door of applications, :func:`primary_key` the column of their models,
:class:`Layout` what an ID says. Errors are in :mod:`shardids.errors`.
"""

from shardids.cluster import Cluster
from shardids.errors import ShardidsError
from shardids.generator import IdBlock
from shardids.layout import DecodedId, IdRange, Layout
from shardids.orm import next_id, primary_key, sharding_key

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "DecodedId",
    "IdBlock",
    "IdRange",
    "Layout",
    "ShardidsError",
    "next_id",
    "primary_key",
    "sharding_key",
]
