"""IDs drawn over a connection, one by one or in blocks that need no further round trip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, overload

from sqlalchemy import Connection, text

from shardids.client.routing.one_shard import advance_past
from shardids.ids.layout import Layout
from shardids.ids.text import checked_integer

_MOST_RESERVED = 16_777_216
"""The highest ``max_reserve`` that a node can be set to."""


class Computed(Sequence[int], ABC):
    """A sequence of ``size`` ints that are made when they are asked for."""

    __slots__ = ()
    size: int

    @abstractmethod
    def _at(self, places: range) -> list[int]:
        """Return the items at some places."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(self.size)[index]
        return self._at(places) if isinstance(places, range) else self._at(range(places, places + 1))[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])


@dataclass(frozen=True, slots=True, kw_only=True)
class IdBlock(Computed):
    """IDs reserved for the caller: consecutive ticks of one shard, in order.

    A sequence of ints that makes each ID when it is asked for. Unused IDs are lost, which is harmless.

    Attributes:
        layout: the cluster's layout.
        shard: the shard that issued them.
        first_tick: the first tick, ``(ms since the epoch << sequence_bits) | sequence``.
        size: how many.
    """

    layout: Layout
    shard: int
    first_tick: int
    size: int

    def _at(self, places: range) -> list[int]:
        ticks = (divmod(self.first_tick + place, self.layout.sequence_limit) for place in places)
        return [self.layout.encode(ms=ms, shard=self.shard, sequence=sequence) for ms, sequence in ticks]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs(0, self.size))

    def runs(self, start: int, stop: int) -> Iterator[range]:
        """Yield the IDs from one place to another as ranges, one per ms: within it they are consecutive."""
        tick, end = self.first_tick + start, self.first_tick + stop
        while tick < end:
            ms, sequence = divmod(tick, self.layout.sequence_limit)
            length = min(end - tick, self.layout.sequence_limit - sequence)
            first = self.layout.encode(ms=ms, shard=self.shard, sequence=sequence)
            yield range(first, first + length)
            tick += length


DRAWS: Final = "shardids_draws"
"""The execution option of statements that draw IDs and are not INSERTs."""
_RESERVE: Final = text("select first_tick from shardids.reserve(:shard, :count)").execution_options(
    **{DRAWS: True}
)
_RESERVE_FOR: Final = text(
    "select (select first_tick from shardids.reserve(wanted.shard, wanted.size))"
    " from unnest(cast(:shards as integer[]), cast(:sizes as integer[])) with ordinality"
    " wanted (shard, size, place) order by place"
).execution_options(**{DRAWS: True})


def next_ids(connection: Connection, shard: int, count: int = 1) -> list[int]:
    """Draw IDs of a shard that lives on the connection's node, in order.

    Raises:
        UnknownShard, ShardFenced, ShardMoved, CopyNotActivated, TooFarAhead, TimeExhausted: see the classes.
        BadArgument: ``count`` is below 1 or above the node's ``max_reserve``.
    """
    return list(reserve(connection, shard, count, layout_of(connection)))


def reserve(
    connection: Connection, shard: int, count: int, layout: Layout, *, after: int | None = None
) -> IdBlock:
    """Reserve ``count`` IDs of a shard, which sort after one, in one round trip, or two with ``after``.

    Raises what :func:`next_ids` does.
    """
    size = checked_integer("the number of IDs", count, 1, _MOST_RESERVED)
    if after is not None:
        advance_past(connection, shard, after)
    first_tick: int = connection.execute(
        _RESERVE,
        {"shard": shard, "count": size},
    ).scalar_one()
    return IdBlock(layout=layout, shard=shard, first_tick=first_tick, size=size)


def reserve_for(connection: Connection, counts: Mapping[int, int], layout: Layout) -> list[IdBlock]:
    """Reserve so many IDs of each shard, in one round trip.

    Raises what :func:`next_ids` does.
    """
    ticks = connection.scalars(_RESERVE_FOR, {"shards": list(counts), "sizes": list(counts.values())}).all()
    return [
        IdBlock(layout=layout, shard=shard, first_tick=tick, size=size)
        for (shard, size), tick in zip(counts.items(), ticks, strict=True)
    ]


def layout_of(connection: Connection) -> Layout:
    """Return the layout of the connection's node."""
    epoch_ms, time_bits, shard_bits, sequence_bits = connection.execute(
        text("""select shardids.epoch_ms(), shardids.time_bits(), shardids.shard_bits(),
                       shardids.sequence_bits()""")
    ).one()
    return Layout(epoch_ms=epoch_ms, time_bits=time_bits, shard_bits=shard_bits, sequence_bits=sequence_bits)
