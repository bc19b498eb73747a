"""Work of DBAs on look-ups: columns that are unique over all shards.

``lifecycle`` creates, lists and drops them; ``claiming`` claims the values of rows that are there, gives up
claims of rows that are gone, and compares both; ``reading`` pages through rows and claims. Sessions claim the
values that they write: :mod:`shardids.client.lookups`.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.tables.lookups.claiming import Filled, Swept, backfill, backfill_if_empty, sweep
    from shardids.tables.lookups.lifecycle import create, drop, listed

__all__ = [
    "Filled",
    "Swept",
    "backfill",
    "backfill_if_empty",
    "create",
    "drop",
    "listed",
    "sweep",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Filled": "shardids.tables.lookups.claiming",
        "Swept": "shardids.tables.lookups.claiming",
        "backfill": "shardids.tables.lookups.claiming",
        "backfill_if_empty": "shardids.tables.lookups.claiming",
        "create": "shardids.tables.lookups.lifecycle",
        "drop": "shardids.tables.lookups.lifecycle",
        "listed": "shardids.tables.lookups.lifecycle",
        "sweep": "shardids.tables.lookups.claiming",
    },
)
