"""What finds shards by the placement and is not told by the catalog: views, and triggers of look-ups."""

from __future__ import annotations

from shardids import lookups, views
from shardids.catalog.rows import Catalog


def follow_placement(catalog: Catalog) -> tuple[str, ...]:
    """Brings all of it up to date after a change of the placement; returns a line about each that failed."""
    return (*views.follow_placement(catalog), *lookups.follow_placement(catalog))
