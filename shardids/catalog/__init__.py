"""The catalog of a cluster, as its tables record it, and the application's objects in the schemas of shards.

``topology`` has nodes, the placement and the hashing of keys, ``regions`` the names for ranges of shards;
neither knows a database. ``rows`` reads and writes the catalog's tables, ``region_changes`` changes regions,
and ``nodes`` queries all nodes at once. ``lookups``, ``references``, ``counters``, ``old_ids``,
``query_node``, ``moves`` and ``skipped`` hold the records of each; ``objects`` and ``revisions`` read the
shards.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.catalog.nodes import Answers, Nodes
    from shardids.catalog.regions import Region
    from shardids.catalog.rows import Catalog, Description
    from shardids.catalog.topology import (
        Node,
        Placement,
        key_hash,
        schema_name,
        shard_for_key,
        validate_node_name,
        validate_schema_prefix,
    )

__all__ = [
    "Answers",
    "Catalog",
    "Description",
    "Node",
    "Nodes",
    "Placement",
    "Region",
    "key_hash",
    "schema_name",
    "shard_for_key",
    "validate_node_name",
    "validate_schema_prefix",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Answers": "shardids.catalog.nodes",
        "Catalog": "shardids.catalog.rows",
        "Description": "shardids.catalog.rows",
        "Node": "shardids.catalog.topology",
        "Nodes": "shardids.catalog.nodes",
        "Placement": "shardids.catalog.topology",
        "Region": "shardids.catalog.regions",
        "key_hash": "shardids.catalog.topology",
        "schema_name": "shardids.catalog.topology",
        "shard_for_key": "shardids.catalog.topology",
        "validate_node_name": "shardids.catalog.topology",
        "validate_schema_prefix": "shardids.catalog.topology",
    },
)
