"""Django on shards: primary keys, a database alias for each shard, the router that chooses it.

``shardids.django`` goes into ``INSTALLED_APPS``, ``shardids.django.ShardRouter`` into ``DATABASE_ROUTERS``,
and ``SHARDIDS = {"CATALOG": "postgresql://…"}`` into the settings. Its reach and its limits:
``docs/how-to/django.md``.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.django.aliases import alias_for, get_cluster
    from shardids.django.choice import in_shard, run_in_shard
    from shardids.django.fields import NextId, ShardIdField, ShardIdJSONEncoder
    from shardids.django.router import ShardRouter

__all__ = [
    "NextId",
    "ShardIdField",
    "ShardIdJSONEncoder",
    "ShardRouter",
    "alias_for",
    "get_cluster",
    "in_shard",
    "run_in_shard",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "NextId": "shardids.django.fields",
        "ShardIdField": "shardids.django.fields",
        "ShardIdJSONEncoder": "shardids.django.fields",
        "ShardRouter": "shardids.django.router",
        "alias_for": "shardids.django.aliases",
        "get_cluster": "shardids.django.aliases",
        "in_shard": "shardids.django.choice",
        "run_in_shard": "shardids.django.choice",
    },
)
