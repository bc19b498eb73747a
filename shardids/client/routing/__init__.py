"""Sessions over shards: which rows lie where, which shards a statement concerns, and one answer out of many.

``models`` reads from mapped classes what tells a row's shard; ``criteria`` and ``placing`` use it for
statements and objects. ``shapes`` says which statements each shard answers for itself, ``fanout`` asks shards
and merges their rows, ``statements`` executes, and ``sessions`` is what :class:`shardids.Cluster` hands out.
"""
