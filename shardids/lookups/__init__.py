"""What DBAs do with look-ups: columns that are unique over all shards.

``lifecycle`` creates, lists and drops them; ``filling`` claims the values of rows that are there,
``sweeping`` gives up claims of rows that are gone, ``comparing`` looks for both. Sessions claim what they
write: :mod:`shardids.client.lookups`.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.lookups.filling import Filled, backfill
    from shardids.lookups.lifecycle import create, drop, listed
    from shardids.lookups.sweeping import Swept, sweep

__all__ = [
    "Filled",
    "Swept",
    "backfill",
    "create",
    "drop",
    "listed",
    "sweep",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Filled": "shardids.lookups.filling",
        "Swept": "shardids.lookups.sweeping",
        "backfill": "shardids.lookups.filling",
        "create": "shardids.lookups.lifecycle",
        "drop": "shardids.lookups.lifecycle",
        "listed": "shardids.lookups.lifecycle",
        "sweep": "shardids.lookups.sweeping",
    },
)
