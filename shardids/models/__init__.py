"""The parts of an application's models: columns, the type of an ID, pages of rows.

``columns`` has the primary key, the sharding key and reference tables, ``lookups`` columns that are unique
over all shards, ``counters`` numbers for people, ``types`` the type of IDs in SQLAlchemy and pydantic,
``pages`` reads lists by ID.
"""

from shardids.models.columns import (
    next_id,
    primary_key,
    reference_table,
    sharding_key,
)
from shardids.models.counters import RowNumber, counter
from shardids.models.lookups import lookup_key
from shardids.models.pages import Page, PageQuery
from shardids.models.types import ShardId

__all__ = [
    "Page",
    "PageQuery",
    "RowNumber",
    "ShardId",
    "counter",
    "lookup_key",
    "next_id",
    "primary_key",
    "reference_table",
    "sharding_key",
]
