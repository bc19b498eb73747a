"""Metrics of a cluster for Prometheus, from answers of the catalog and the nodes at each scrape.

:class:`ClusterCollector` is for a registry of prometheus_client, and needs the extra ``ops``. ``asking``
asks, ``samples`` lists every metric and makes samples of the answers. They write nothing on a node, and add
nothing to the cost of ``next_id()``.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.watch.metrics.collector import ClusterCollector

__all__ = ["ClusterCollector"]

__getattr__, __dir__ = lazy_names(__name__, {"ClusterCollector": "shardids.watch.metrics.collector"})
