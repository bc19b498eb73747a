"""Transactions on several nodes whose clients did not end them, and moments between all such transactions.

``doubts`` lists what is prepared, ``resolver`` ends it, ``restore_points`` marks such a moment. The sessions
that prepare are in :mod:`shardids.client.routing.twophase`.
"""

from shardids.transactions.doubts import Doubt, Listing, listed
from shardids.transactions.resolver import OLDER_THAN_S, Outcome, Resolution, resolve
from shardids.transactions.restore_points import WITHIN_S, RestorePoint, create_restore_point

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
