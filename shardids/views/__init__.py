"""A table of all shards as one view, by PostgreSQL's own means: ``postgres_fdw`` and a partitioned table.

Such a view is read-only, in schema ``shardids_views`` of a node or of a database of its own. This package's
functions create, refresh, list and drop views; the catalog records them.
"""

from shardids.views.lifecycle import create, drop, follow_placement, listed, refresh, refresh_all
from shardids.views.state import View, views_of

__all__ = ["View", "create", "drop", "follow_placement", "listed", "refresh", "refresh_all", "views_of"]
