"""64-bit IDs born inside PostgreSQL shards, and the cluster around them.

:class:`Cluster`, for asyncio :class:`AsyncCluster`, is the front door of applications, :func:`primary_key`
the column of their models and :data:`ShardId` its type, :class:`PageQuery` reads lists by ID,
:class:`Layout` says what an ID tells. Errors are in :mod:`shardids.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardids.cluster import Cluster
from shardids.errors import ShardidsError
from shardids.generator import IdBlock
from shardids.idtype import ShardId
from shardids.layout import DecodedId, IdRange, Layout
from shardids.orm import next_id, primary_key, primary_key_column, sharding_key
from shardids.pages import Page, PageQuery

if TYPE_CHECKING:
    from shardids.asyncio import AsyncCluster

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


def __getattr__(name: str) -> object:
    # It needs the extra asyncio.
    if name == "AsyncCluster":
        return import_module("shardids.asyncio").AsyncCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
