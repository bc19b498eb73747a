"""Administration of counters of numbers for people: define kinds, look at them, set them by hand.

The counters themselves are in SQL (``sql/counters/counters.v1.sql``), models use
:mod:`shardids.models.counters`.
"""

from shardids.tables.counters.admin import define, set_next, set_zone, skip
from shardids.tables.counters.listing import Change, Counter, changes, listed

__all__ = ["Change", "Counter", "changes", "define", "listed", "set_next", "set_zone", "skip"]
