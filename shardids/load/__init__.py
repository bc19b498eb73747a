"""Files into shards: ``shardids load``.

``csvs`` and ``parquet`` read files, ``marks`` records in each shard how many of its rows are there,
``rejects`` keeps what is refused, and ``sending`` copies a block of rows with all of that in one transaction.
"""

from shardids.load.run import Loaded, LoadSettings, load

__all__ = ["LoadSettings", "Loaded", "load"]
