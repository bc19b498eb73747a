"""shardids itself, as one scheme among the others: by the ID, and by the block."""

from __future__ import annotations

from psycopg import sql

from shardids.baselines.blocks import Blocks
from shardids.baselines.postgresql import SqlScheme, SqlSource
from shardids.baselines.scheme import About, Column, Decoded, Key, Needs, Servers, Source, integer_of
from shardids.catalog.rows import SCHEMA_PREFIX, Catalog
from shardids.catalog.topology import schema_name
from shardids.ids.layout import DEFAULT
from shardids.install import provision

BLOCK = 1000
"""IDs that a client sets aside at once."""

_SHARDS = 64  # the number is fixed for good: there is room for servers to come

_SAFE = (
    "any number of sessions, any rate, clocks that jump either way, crashes, promoted standbys, copies that"
    " are noticed"
)

_UNSAFE = (
    "an old primary that is started again beside the standby that replaced it; by a small chance, an older"
    " copy of a server's files that takes its place while IDs run ahead of the clock"
)
_REFUSES = "a shard ahead of its clock by over an hour; a copy of a database, until it is activated"


class Shardids(SqlScheme):
    """``next_id()`` of the shard that has the node's number."""

    about = About(
        name="shardids",
        title="shardids, next_id()",
        needs=Needs(postgresql=1),
        safe_under=_SAFE,
        unsafe_under=_UNSAFE,
        stops="the shards of a server that is down; " + _REFUSES,
        tells="time (ms), shard",
        settings="default layout: 41 bits of ms since 2024, 12 of shard, 10 of sequence; DEFAULT next_id()",
        described_at="docs/explanation/generator.md",
    )

    def install(self, servers: Servers) -> None:
        self.check(servers)
        catalog = Catalog(servers.postgresql[0])
        try:
            provision.init(catalog, DEFAULT, _SHARDS)
            for node, url in enumerate(servers.postgresql):
                provision.add_node(catalog, f"node{node}", url)
                provision.create_shards(catalog, [node], node=f"node{node}")
        finally:
            catalog.close()

    def column(self, node: int = 0) -> Column:
        function = sql.Identifier(schema_name(SCHEMA_PREFIX, node), "next_id")
        return Column(type="bigint", draw=sql.SQL("{}()").format(function))

    def decode(self, key: Key) -> Decoded:
        decoded = DEFAULT.decode(integer_of(key))
        return Decoded(time=decoded.time, origin=decoded.shard, sequence=decoded.sequence)


class ShardidsBlocks(Shardids):
    """``next_ids(n)``: the client sets IDs aside and brings them."""

    about = About(
        name="shardids-blocks",
        title="shardids, next_ids(n)",
        needs=Needs(postgresql=1),
        safe_under=_SAFE,
        unsafe_under=_UNSAFE,
        stops="the shards of a server that is down, but for IDs that clients have set aside; " + _REFUSES,
        tells="time (ms), shard",
        settings=f"default layout; blocks of {BLOCK:,} IDs for single draws, one statement for n at once",
        described_at="docs/explanation/generator.md",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        schema = schema_name(SCHEMA_PREFIX, node)
        source = SqlSource(
            servers.postgresql[node],
            sql.SQL("select {}()").format(sql.Identifier(schema, "next_id")),
            sql.SQL("select {}(%s::integer)").format(sql.Identifier(schema, "next_ids")),
        )
        return Blocks(source, BLOCK)

    def column(self, node: int = 0) -> Column:
        return Column(type="bigint")
