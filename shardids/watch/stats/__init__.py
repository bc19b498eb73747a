"""The evidence of many IDs together: load by shard and time, clocks, order, and anomalies.

``stats.of(ids)`` measures an array of IDs; ``find`` is the detector, for IDs and for live rates
alike. Needs numpy: ``pip install numpy``.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.watch.stats.detector import Anomaly, Kind, Thresholds, find
    from shardids.watch.stats.measured import IdStats, of
    from shardids.watch.stats.series import Series

__all__ = ["Anomaly", "IdStats", "Kind", "Series", "Thresholds", "find", "of"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Anomaly": "shardids.watch.stats.detector",
        "IdStats": "shardids.watch.stats.measured",
        "Kind": "shardids.watch.stats.detector",
        "Series": "shardids.watch.stats.series",
        "Thresholds": "shardids.watch.stats.detector",
        "find": "shardids.watch.stats.detector",
        "of": "shardids.watch.stats.measured",
    },
)
