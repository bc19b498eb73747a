"""Changes of the placement: a shard's move, a node's replacement, and a new home for a lost shard."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, text

from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import ClusterConflict


def lock_placement(connection: Connection) -> None:
    """Waits for whoever changes nodes, regions or placement, and keeps others from it until the end of the
    transaction. To be taken before any other lock in the catalog."""
    connection.execute(text("select from shardids_catalog.cluster for update"))


def place_shard(connection: Connection, shard: int, *, source: str, target: str) -> None:
    """Places a shard on another node, in the connection's transaction: its commit is the switch.

    Raises:
        ClusterConflict: the shard is not placed on ``source``.
    """
    placed = connection.execute(
        text("""
            update shardids_catalog.placement set node = :target
            where shard = :shard and node = :source and state = 'active'"""),
        {"shard": shard, "source": source, "target": target},
    )
    if placed.rowcount != 1:
        raise ClusterConflict(f'shard {shard} is not placed on node "{source}" any more')


def place_lost_shard(connection: Connection, shard: int, *, lost_with: str, target: str) -> None:
    """Gives a shard that was lost with a node a home, in the connection's transaction.

    Raises:
        ClusterConflict: the shard does not count as lost with that node.
    """
    placed = connection.execute(
        text("""
            update shardids_catalog.placement set node = :target, state = 'active'
            where shard = :shard and node = :source and state = 'lost'"""),
        {"shard": shard, "source": lost_with, "target": target},
    )
    if placed.rowcount != 1:
        raise ClusterConflict(f'shard {shard} does not count as lost with node "{lost_with}" any more')


def point_node(
    connection: Connection, old: Node, url: str, *, lost: Collection[int], found: Collection[int]
) -> None:
    """Changes a node's URL, and which of its shards count as lost, in the connection's transaction.

    Raises:
        ClusterConflict: the node has another URL than ``old`` by now.
    """
    lock_placement(connection)
    changed = connection.execute(
        text("update shardids_catalog.node set url = :url where name = :name and url = :was"),
        {"name": old.name, "url": shown_url(parse_url(url)), "was": old.url},
    )
    if changed.rowcount != 1:
        raise ClusterConflict(
            f'node "{old.name}" was replaced by another process meanwhile', hint="See: shardids node list"
        )
    connection.execute(
        text("""
            update shardids_catalog.placement
            set state = case when shard = any (:lost) then 'lost' else 'active' end
            where node = :name and (shard = any (:lost) and state = 'active'
                                    or shard = any (:found) and state = 'lost')"""),
        {"name": old.name, "lost": sorted(lost), "found": sorted(found)},
    )
