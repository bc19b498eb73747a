"""Sessions over shards: the shards of rows, the shards that a statement concerns, one answer out of many.

``models`` finds the attributes of mapped classes that determine a row's shard; ``criteria`` and ``placing``
use them for statements and objects. ``shapes`` decides which statements each shard answers for itself,
``fanout`` asks shards and merges their rows, ``statements`` executes, and ``sessions`` has the sessions of
:class:`shardids.Cluster`.
"""
