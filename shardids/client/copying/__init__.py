"""Rows into shards by COPY.

``sources`` reads the caller's rows as tuples. ``target`` knows the table: its columns, their defaults and
types, and the columns that determine a row's shard. ``lanes`` brings blocks of rows to their shards over all
nodes at once, each in its own transaction, and :meth:`shardids.Cluster.copy` calls ``copy``.
"""

from shardids.client.copying.copy import CopyReport
from shardids.client.copying.lanes import Copied

__all__ = ["Copied", "CopyReport"]
