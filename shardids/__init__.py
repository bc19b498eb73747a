"""64-bit IDs born inside PostgreSQL shards, and the cluster around them.

:class:`Cluster`, for asyncio :class:`AsyncCluster`, is the front door of applications, :func:`primary_key`
the column of their models and :data:`ShardId` its type, :class:`PageQuery` reads lists by ID,
:class:`Layout` says what an ID tells. Errors are in :mod:`shardids.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardids.client.async_cluster import AsyncCluster
    from shardids.client.blocks import IdBlock
    from shardids.client.cluster import Cluster
    from shardids.errors import ShardidsError
    from shardids.ids.layout import DecodedId, IdRange, Layout
    from shardids.models.columns import next_id, primary_key, primary_key_column, sharding_key
    from shardids.models.pages import Page, PageQuery
    from shardids.models.types import ShardId

__version__ = "0.1.0"

__all__ = [
    "AsyncCluster",
    "Cluster",
    "DecodedId",
    "IdBlock",
    "IdRange",
    "Layout",
    "Page",
    "PageQuery",
    "ShardId",
    "ShardidsError",
    "next_id",
    "primary_key",
    "primary_key_column",
    "sharding_key",
]

# A module is imported when one of its names is first used: decoding an ID needs no SQLAlchemy, and
# Cluster needs no asyncio.
_MODULES = {
    "AsyncCluster": "shardids.client.async_cluster",
    "Cluster": "shardids.client.cluster",
    "DecodedId": "shardids.ids.layout",
    "IdBlock": "shardids.client.blocks",
    "IdRange": "shardids.ids.layout",
    "Layout": "shardids.ids.layout",
    "Page": "shardids.models.pages",
    "PageQuery": "shardids.models.pages",
    "ShardId": "shardids.models.types",
    "ShardidsError": "shardids.errors",
    "next_id": "shardids.models.columns",
    "primary_key": "shardids.models.columns",
    "primary_key_column": "shardids.models.columns",
    "sharding_key": "shardids.models.columns",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardids' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
