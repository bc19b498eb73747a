"""How large a cluster has to be for a load that is still to come: arithmetic, without a server."""

from shardids.ids.planning.load import Load, Node
from shardids.ids.planning.plan import Limit, Plan, Year, collisions, key_bytes, limits, plan, validate

__all__ = ["Limit", "Load", "Node", "Plan", "Year", "collisions", "key_bytes", "limits", "plan", "validate"]
