"""Transactions on several nodes whose clients did not end them, and moments between all such transactions.

``resolver`` lists prepared transactions and ends them, ``restore_points`` marks such a moment. The sessions
that prepare them are in :mod:`shardids.client.routing.twophase`.
"""

from shardids.tables.transactions.resolver import (
    OLDER_THAN_S,
    Doubt,
    Listing,
    Outcome,
    Resolution,
    listed,
    resolve,
)
from shardids.tables.transactions.restore_points import WITHIN_S, RestorePoint, create_restore_point

__all__ = [
    "OLDER_THAN_S",
    "WITHIN_S",
    "Doubt",
    "Listing",
    "Outcome",
    "Resolution",
    "RestorePoint",
    "create_restore_point",
    "listed",
    "resolve",
]
