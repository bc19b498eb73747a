"""The function that Instagram published in 2012, statement by statement."""

from __future__ import annotations

from psycopg import sql

from shardids.baselines.postgresql import SqlScheme, install
from shardids.baselines.scheme import About, Column, Decoded, Key, Needs, Servers, integer_of
from shardids.ids.layout import INSTAGRAM


class Published(SqlScheme):
    """Milliseconds, a shard number and a sequence modulo 1024; the node's number is the shard's."""

    about = About(
        name="published",
        title="Instagram's published function",
        needs=Needs(postgresql=1),
        safe_under="up to 1,024 keys a ms and shard, while clock and sequence are read in step",
        unsafe_under="sessions that read the sequence and then the clock in another order; more than 1,024"
        " keys a ms; a clock that steps back",
        stops="the shards of a server that is down",
        tells="time (ms), shard",
        settings="41 bits of ms since 1314220021721, 13 of shard, 10 of sequence; PL/pgSQL as published",
        described_at="https://instagram-engineering.com/sharding-ids-at-instagram-1cf5a71e5a5c",
    )

    def install(self, servers: Servers) -> None:
        self.check(servers)
        for node, url in enumerate(servers.postgresql):
            install(url, "compare/published.v1", settings={"shardids.shard": str(node)})

    def column(self, node: int = 0) -> Column:
        return Column(type="bigint", draw=sql.SQL("published.next_id()"))

    def decode(self, key: Key) -> Decoded:
        decoded = INSTAGRAM.decode(integer_of(key))
        return Decoded(time=decoded.time, origin=decoded.shard, sequence=decoded.sequence)
