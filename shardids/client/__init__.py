"""The part that applications import: a cluster's sessions and IDs.

``cluster`` has :class:`Cluster`, ``shard`` one of its shards, ``async_cluster`` the asyncio form of both,
``routing`` the session over all shards. ``placement`` keeps the placement current, and decides what
:meth:`Shard.run` does when a shard has moved. ``engines`` has the pools of nodes. ``lookups`` claims the
values of look-up keys, ``old_ids`` finds IDs from before the cluster, ``references`` writes reference tables,
``copying`` copies rows, ``metering`` counts, and ``blocks`` draws and reserves IDs.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.client.async_cluster import AsyncCluster, AsyncShard
    from shardids.client.blocks import IdBlock, next_ids, reserve
    from shardids.client.cluster import Cluster
    from shardids.client.shard import Shard

__all__ = ["AsyncCluster", "AsyncShard", "Cluster", "IdBlock", "Shard", "next_ids", "reserve"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncCluster": "shardids.client.async_cluster",
        "AsyncShard": "shardids.client.async_cluster",
        "Cluster": "shardids.client.cluster",
        "IdBlock": "shardids.client.blocks",
        "Shard": "shardids.client.shard",
        "next_ids": "shardids.client.blocks",
        "reserve": "shardids.client.blocks",
    },
)
