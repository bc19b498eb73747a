"""What many IDs tell together: load by shard and time, clocks, order, and what is unusual in it.

``shardids.stats.of(ids)`` measures an array of IDs; ``find`` is the detector, for IDs and for live rates
alike. Needs numpy: ``pip install shardids[numpy]``.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.stats.anomalies import Anomaly, Kind, Thresholds
    from shardids.stats.detector import find
    from shardids.stats.measured import IdStats, of
    from shardids.stats.series import Series

__all__ = ["Anomaly", "IdStats", "Kind", "Series", "Thresholds", "find", "of"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Anomaly": "shardids.stats.anomalies",
        "IdStats": "shardids.stats.measured",
        "Kind": "shardids.stats.anomalies",
        "Series": "shardids.stats.series",
        "Thresholds": "shardids.stats.anomalies",
        "find": "shardids.stats.detector",
        "of": "shardids.stats.measured",
    },
)
