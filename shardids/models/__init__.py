"""What goes into an application's models: columns, the type of an ID, pages of rows.

``columns`` has the primary key and the sharding key, ``types`` the type of IDs in SQLAlchemy and pydantic,
``pages`` reads lists by ID.
"""

from shardids.models.columns import (
    next_id,
    primary_key,
    primary_key_column,
    sharding_key,
    sharding_key_column,
)
from shardids.models.pages import Page, PageQuery
from shardids.models.types import ShardId

__all__ = [
    "Page",
    "PageQuery",
    "ShardId",
    "next_id",
    "primary_key",
    "primary_key_column",
    "sharding_key",
    "sharding_key_column",
]
