"""The state of the shards on a node, and how far their generators have come: one query for all who ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from sqlalchemy import Connection, text

from shardids.errors import ClusterConflict
from shardids.ids.layout import Layout
from shardids.pg.queries import BATCH, prepare
from shardids.pg.sqlfiles import read_sql

ShardState = Literal["active", "fenced", "arriving", "copy", "moved", "broken", "unreadable"]
"""``fenced``: though the row says active if a rollback took the fence back; ``arriving``: it is being
moved here; ``copy``: it was not activated on this server; ``moved``: the rest of a move; ``broken``: its
sequences are gone; ``unreadable``: the role may not read them."""


class Shard(NamedTuple):
    """A shard on a node, and how far its generator has come: a row of ``catalog/shards.v1.sql``.

    A tuple, for thousands are made in each reading.

    Attributes:
        shard: its number.
        state: see :data:`ShardState`.
        counter: OID of its sequence ``id_counter``; another one in its place has another OID.
        drawn: the last value of that sequence; 0 before the first draw, and where it was not read.
        offset_ms: its offset, in ms of the layout; ``None`` without a sequence to read.
        clock_ms: the server's clock, in ms of the layout.
        high_water_tick: no tick up to it is issued again.
        has_drawn: whether it has drawn at least once since it was activated.
    """

    shard: int
    state: ShardState
    counter: int | None
    drawn: int
    offset_ms: int | None
    clock_ms: int
    high_water_tick: int = -1
    has_drawn: bool = True

    def lead_ms(self, layout: Layout) -> int | None:
        """Return how far its ticks are ahead of the clock; ``None`` if it issues no IDs."""
        if self.state != "active" or self.offset_ms is None:
            return None
        return self.offset_ms + (self.drawn >> layout.sequence_bits) - self.clock_ms

    def stored_tick(self, layout: Layout) -> int:
        """Return the tick that its sequences hold: a draw that is not later has taken none above it."""
        return ((self.offset_ms or 0) << layout.sequence_bits) + self.drawn


def read_shards(connection: Connection) -> Iterator[list[Shard]]:
    """Yield the shards of a node by number, old copies among them, some hundred at a time."""
    first = 0
    while True:
        with connection.begin():
            batch = _batch(connection, first, BATCH)
        yield batch
        if len(batch) < BATCH:
            return
        first = batch[-1].shard + 1


def read_shard(connection: Connection, shard: int) -> Shard | None:
    """Return a shard as its node has it, in a new transaction; ``None`` if the node does not."""
    with connection.begin():
        return next((one for one in _batch(connection, shard, 1) if one.shard == shard), None)


def _batch(connection: Connection, first: int, count: int) -> list[Shard]:
    prepare(connection, first_shard=first, count=count)
    found = connection.execution_options(no_parameters=True).exec_driver_sql(read_sql("catalog/shards.v1"))
    return [Shard._make(row) for row in found.all()]


ISSUES_IDS: Final = "shardids: as long as this line is here, not activated is shard "
"""A comment in the body of a function that issues the IDs of a shard; the shard's number follows.

Any role can write it into its functions: it counts where the shard's row has an issuer.
"""


def issuers(connection: Connection) -> dict[int, list[str]]:
    """Return the functions of a node that issue IDs of its shards, by shard: each would issue the same."""
    found: dict[int, list[str]] = {}
    for row in connection.execute(_ISSUERS, {"mark": ISSUES_IDS}):
        found.setdefault(row.shard, []).append(row.name)
    return found


def require_no_issuer(connection: Connection, shard: int, node: str) -> None:
    """Require that no function issues the IDs of a shard that is to be activated.

    Raises:
        ClusterConflict: one does, since ``shardids key function --back``.
    """
    if names := issuers(connection).get(shard):
        raise ClusterConflict(
            f'shard {shard} is not activated: {names[0]} on node "{node}" issues its IDs, and both would'
            " issue the same",
            hint="Let the function draw from the shard, or drop it: shardids key function"
            f" {names[0].removesuffix('()')} --shard {shard}",
        )


_ISSUERS: Final = text(r"""
    select s.id as shard, p.oid::regprocedure::text as name
    from shardids.shard s join pg_proc p on p.prosrc ~ ('-- ' || :mark || s.id || '\n')
    where s.issuer is not null order by 1, 2""")
