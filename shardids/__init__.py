"""64-bit IDs born inside PostgreSQL shards, and the cluster around them.

:class:`Cluster`, or :class:`AsyncCluster` for asyncio, is what applications connect with.
:func:`primary_key` is the column of their models and :data:`ShardId` its type, :class:`PageQuery` reads lists
by ID, and :class:`Layout` decodes IDs. Errors are in :mod:`shardids.errors`.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.client.async_cluster import AsyncCluster, AsyncShard
    from shardids.client.blocks import IdBlock
    from shardids.client.cluster import Cluster
    from shardids.client.shard import Shard
    from shardids.errors import ShardidsError
    from shardids.ids.layout import DecodedId, IdRange, Layout
    from shardids.models.columns import (
        next_id,
        primary_key,
        reference_table,
        sharding_key,
    )
    from shardids.models.counters import counter
    from shardids.models.lookups import lookup_key
    from shardids.models.pages import Page, PageQuery
    from shardids.models.types import ShardId

__version__ = "0.1.0"

__all__ = [
    "AsyncCluster",
    "AsyncShard",
    "Cluster",
    "DecodedId",
    "IdBlock",
    "IdRange",
    "Layout",
    "Page",
    "PageQuery",
    "Shard",
    "ShardId",
    "ShardidsError",
    "counter",
    "lookup_key",
    "next_id",
    "primary_key",
    "reference_table",
    "sharding_key",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncCluster": "shardids.client.async_cluster",
        "AsyncShard": "shardids.client.async_cluster",
        "Cluster": "shardids.client.cluster",
        "DecodedId": "shardids.ids.layout",
        "IdBlock": "shardids.client.blocks",
        "IdRange": "shardids.ids.layout",
        "Layout": "shardids.ids.layout",
        "lookup_key": "shardids.models.lookups",
        "Page": "shardids.models.pages",
        "PageQuery": "shardids.models.pages",
        "Shard": "shardids.client.shard",
        "ShardId": "shardids.models.types",
        "ShardidsError": "shardids.errors",
        "counter": "shardids.models.counters",
        "next_id": "shardids.models.columns",
        "primary_key": "shardids.models.columns",
        "reference_table": "shardids.models.columns",
        "sharding_key": "shardids.models.columns",
    },
)
