"""A table of all shards as one view, by PostgreSQL's own means: ``postgres_fdw`` and a partitioned table.

Such a view is read-only, in schema ``shardids_views`` of a node or of a database of its own. This package's
functions create, refresh, list and drop views; the catalog records them.
"""

from shardids.views.lifecycle import (
    create,
    drop,
    follow_placement,
    follow_tables,
    listed,
    refresh,
    refresh_all,
)
from shardids.views.query_node import create_query_node, drop_query_node, refresh_query_node
from shardids.views.query_refresh import Refreshed
from shardids.views.state import View, views_of

__all__ = [
    "Refreshed",
    "View",
    "create",
    "create_query_node",
    "drop",
    "drop_query_node",
    "follow_placement",
    "follow_tables",
    "listed",
    "refresh",
    "refresh_all",
    "refresh_query_node",
    "views_of",
]
