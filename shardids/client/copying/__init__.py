"""Rows into shards by COPY.

``sources`` reads what is given as tuples, ``target`` knows the table: its columns, their defaults and types,
and what in a row tells its shard. ``lanes`` brings blocks of rows to their shards over all nodes at once,
each in a transaction of its own, and ``copy`` is what :meth:`shardids.Cluster.copy` calls.
"""

from shardids.client.copying.copy import CopyReport
from shardids.client.copying.lanes import Copied

__all__ = ["Copied", "CopyReport"]
