"""Which shard an ID or a key is in, for asyncio: what asks no server is the wrapped cluster's."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from shardids.catalog.topology import Node, Placement
from shardids.client.cluster import Cluster
from shardids.client.old_ids import KnownOldIds
from shardids.client.routing import Key
from shardids.ids import DecodedId, Layout


class AsyncShardsOfCluster:
    """The part of :class:`shardids.AsyncCluster` that finds shards."""

    def __init__(self, sync_cluster: Cluster) -> None:
        self.sync_cluster = sync_cluster

    @property
    def layout(self) -> Layout:
        """See :attr:`shardids.Cluster.layout`."""
        return self.sync_cluster.layout

    @property
    def shard_count(self) -> int:
        """See :attr:`shardids.Cluster.shard_count`."""
        return self.sync_cluster.shard_count

    @property
    def placement(self) -> Placement:
        """See :attr:`shardids.Cluster.placement`."""
        return self.sync_cluster.placement

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """See :meth:`shardids.Cluster.shard_for`."""
        return self.sync_cluster.shard_for(key, region=region)

    def decode(self, id_: int) -> DecodedId:
        """See :meth:`shardids.Cluster.decode`."""
        return self.sync_cluster.decode(id_)

    @property
    def old_ids(self) -> KnownOldIds | None:
        """See :attr:`shardids.Cluster.old_ids`."""
        return self.sync_cluster.old_ids

    def shard_of(self, id_: int | UUID, *, of: Any = None) -> int:
        """See :meth:`shardids.Cluster.shard_of`. In the event loop it asks nobody.

        Raises:
            BadArgument: also if somebody would have to be asked.
        """
        return self.sync_cluster.shard_of(id_, of=of)

    def node_of(self, shard: int) -> Node:
        """See :meth:`shardids.Cluster.node_of`."""
        return self.sync_cluster.node_of(shard)

    def schema_of(self, shard: int) -> str:
        """See :meth:`shardids.Cluster.schema_of`."""
        return self.sync_cluster.schema_of(shard)
