"""The size of a cluster for a future load: arithmetic, without a server."""

from shardids.ids.planning.load import Load, Node
from shardids.ids.planning.plan import Limit, Plan, Year, collisions, key_bytes, limits, plan, validate

__all__ = ["Limit", "Load", "Node", "Plan", "Year", "collisions", "key_bytes", "limits", "plan", "validate"]
