"""Files into shards: ``shardids load``.

``files`` reads CSV and Parquet, ``sending`` copies a block of rows into a shard in one transaction, together
with the shard's count of loaded rows, and keeps rejected records; ``run`` loads a whole file.
"""

from shardids.tables.load.run import Loaded, LoadSettings, load

__all__ = ["LoadSettings", "Loaded", "load"]
