"""What can be read from an ID, and the bounds of a range of IDs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardids.ids.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecodedId:
    """What an ID, here in its signed reading, tells in its layout. :meth:`Layout.decode` makes it.

    The parts are computed when they are asked for.
    """

    id: int
    layout: Layout

    def __repr__(self) -> str:
        return (
            f"DecodedId(id={self.id}, time={self.time.isoformat(timespec='milliseconds')},"
            f" ms={self.ms}, shard={self.shard}, sequence={self.sequence})"
        )

    @property
    def ms(self) -> int:
        """The time of birth in milliseconds since the layout's epoch."""
        layout = self.layout
        ms = self.id >> (layout.shard_bits + layout.sequence_bits)
        return ms & ((1 << layout.time_bits) - 1)

    @property
    def shard(self) -> int:
        """The origin: where the row was born, not necessarily where it is stored today."""
        return self.id >> self.layout.sequence_bits & (self.layout.shard_limit - 1)

    @property
    def sequence(self) -> int:
        """Which of the shard's IDs of that millisecond it is, from 0."""
        return self.id & (self.layout.sequence_limit - 1)

    @property
    def time(self) -> datetime:
        """The time of birth in UTC, exact to the millisecond."""
        return self.layout.time_at(self.ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRange:
    """Bounds, both included, for SQL: ``WHERE id BETWEEN first AND last``."""

    first: int
    last: int
