"""What applications import: a cluster's sessions and IDs.

``cluster`` has :class:`Cluster`, ``async_cluster`` its asyncio form, ``routing`` the session over all
shards. ``listener`` keeps the placement current, ``retries`` decides what :meth:`Cluster.run` does when a
shard has moved, and ``blocks`` draws and reserves IDs.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.client.async_cluster import AsyncCluster
    from shardids.client.blocks import IdBlock, next_ids, reserve
    from shardids.client.cluster import Cluster

__all__ = ["AsyncCluster", "Cluster", "IdBlock", "next_ids", "reserve"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncCluster": "shardids.client.async_cluster",
        "Cluster": "shardids.client.cluster",
        "IdBlock": "shardids.client.blocks",
        "next_ids": "shardids.client.blocks",
        "reserve": "shardids.client.blocks",
    },
)
