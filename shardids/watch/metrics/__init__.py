"""What Prometheus is told of a cluster: facts that the catalog and the nodes give when they are asked.

:class:`ClusterCollector` is for a registry of prometheus_client, and needs the
extra ``ops``. ``asking`` asks, ``samples`` lists every metric
and makes samples of the answers. Nothing is written on a node, and nothing is added
to a draw.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.watch.metrics.collector import ClusterCollector

__all__ = ["ClusterCollector"]

__getattr__, __dir__ = lazy_names(__name__, {"ClusterCollector": "shardids.watch.metrics.collector"})
