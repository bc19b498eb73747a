"""Citus: a cluster whose only node is a coordinator, and whose shards are distributed schemas on its workers.

The coordinator issues the IDs of all shards, so a move takes no generator along. ``setup`` makes such a
cluster, ``workers`` reads where Citus has placed the shards and moves them by Citus's functions,
``refusals`` lists the commands that do not apply, and ``facts`` reads all that the doctor judges.
"""
