"""Sessions over shards: which rows lie where, which shards a statement concerns, and one answer out of many.

``models`` reads from mapped classes what tells a row's shard; ``criteria`` and ``placing`` use it for
statements and objects. ``shapes`` says which statements each shard answers for itself, ``fanout`` asks shards
and merges their rows, ``statements`` executes, and ``sessions`` is what :class:`shardids.Cluster` hands out.
"""

from shardids.client.routing.models import Key
from shardids.client.routing.nodes import FanOut
from shardids.client.routing.one_shard import After, ShardSession
from shardids.client.routing.sessions import RoutedSession, session_class

__all__ = ["After", "FanOut", "Key", "RoutedSession", "ShardSession", "session_class"]
