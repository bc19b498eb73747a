"""The query node: a database whose views show every table with the rows of all shards, by ``postgres_fdw``.

Its views are read-only. This package's functions make, refresh, show and drop them; the catalog records where
they are.
"""

from shardids.tables.views.query_node import (
    create_query_node,
    drop_query_node,
    follow,
    found_query_node,
    grant,
    refresh_query_node,
)
from shardids.tables.views.refresh import Refreshed, state_of

__all__ = [
    "Refreshed",
    "create_query_node",
    "drop_query_node",
    "follow",
    "found_query_node",
    "grant",
    "refresh_query_node",
    "state_of",
]
