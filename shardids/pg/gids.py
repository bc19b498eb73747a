"""Names of prepared transactions that belong to a cluster's transactions over several nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Self
from uuid import UUID

_UUID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GID: Final = re.compile(
    rf"shardids:({_UUID}):({_UUID}):([1-9][0-9]{{0,3}})/([1-9][0-9]{{0,3}}):([A-Za-z][A-Za-z0-9_.-]{{0,39}})"
)


def transaction_of(secret: bytes) -> UUID:
    """Return the name of the transaction with a secret, as ``shardids.transaction_of`` does."""
    return UUID(bytes=sha256(secret).digest()[:16])


def lock_of(transaction: UUID) -> int:
    """Return the advisory lock of a transaction on its decider, which shows the process of its session."""
    return int.from_bytes(transaction.bytes[:8], "big", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """The name of a transaction's part that one node has prepared; 131 characters at most of 199.

    Attributes:
        cluster: the cluster.
        transaction: the transaction over several nodes.
        number: which of its parts this is; part 1 is the decider's, which is never prepared.
        count: how many parts it has.
        decider: the node whose part is committed together with the decision.
    """

    cluster: UUID
    transaction: UUID
    number: int
    count: int
    decider: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parts of a name; ``None`` if it is not of this form, so not given by shardids."""
        found = _GID.fullmatch(text)
        if found is None:
            return None
        cluster, transaction, number, count, decider = found.groups()
        return cls(
            cluster=UUID(cluster),
            transaction=UUID(transaction),
            number=int(number),
            count=int(count),
            decider=decider,
        )

    def __str__(self) -> str:
        return f"shardids:{self.cluster}:{self.transaction}:{self.number}/{self.count}:{self.decider}"
