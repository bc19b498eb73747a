"""Sessions over shards: which rows lie where, which shards a statement concerns, and one answer out of many.

``models`` reads from mapped classes what tells a row's shard; ``criteria`` and ``placing`` use it for
statements and objects. ``merging`` says how the answers of shards combine, ``fanout`` asks for them,
``statements`` executes, and ``sessions`` is what :class:`shardids.Cluster` hands out.
"""

from shardids.client.routing.after import After
from shardids.client.routing.classes import session_class
from shardids.client.routing.models import Key
from shardids.client.routing.one_shard import ShardSession
from shardids.client.routing.sessions import RoutedSession
from shardids.client.routing.statements import FanOut

__all__ = ["After", "FanOut", "Key", "RoutedSession", "ShardSession", "session_class"]
