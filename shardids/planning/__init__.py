"""How large a cluster has to be for a load that is still to come: arithmetic, without a server."""

from shardids.planning.fitness import Limit, limits, validate
from shardids.planning.load import Load, Node
from shardids.planning.plan import Plan, Year, key_bytes, plan

__all__ = ["Limit", "Load", "Node", "Plan", "Year", "key_bytes", "limits", "plan", "validate"]
