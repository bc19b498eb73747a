"""Keys made by a function in each shard: shardids' own, and the one that Instagram published in 2012."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from shardids.catalog.rows import SCHEMA_PREFIX, Catalog
from shardids.catalog.topology import schema_name
from shardids.compare.multimaster.postgresql import PostgreSqlSession
from shardids.compare.schemes.blocks import Blocks
from shardids.compare.schemes.postgresql import SqlScheme, SqlSource, install
from shardids.compare.schemes.scheme import About, Decoded, Key, KeyColumn, Needs, Servers, Source, integer_of
from shardids.ids.layout import DEFAULT, INSTAGRAM
from shardids.migrate.install import provision
from shardids.pg.sqlfiles import read_sql

BLOCK = 1000
"""The number of IDs that a client reserves at once."""

_FIRST_OF_MANY = 64
"""The first of the shards that are all on the first server; those below have a server each."""
_SHARDS = 128

SAFE = (
    "any number of sessions, any rate, clocks that jump either way, crashes, promoted standbys, copies that"
    " are noticed"
)
"""The events that IDs of shardids stay unique under."""

UNSAFE = (
    "an old primary that is started again beside the standby that replaced it; the loss of a server whose IDs"
    " led its clock by over safety_margin (10 s, some 10 million IDs of a shard reserved at once), or led it"
    " when the copy was made that replaces it"
)
"""The events that they do not stay unique under."""
REFUSES = "a shard ahead of its clock by over an hour; a copy of a database, until it is activated"
"""The shards that issue no IDs."""


class Shardids(SqlScheme):
    """``next_id()`` of the shard whose number is the node's."""

    about = About(
        name="shardids",
        title="shardids, next_id()",
        needs=Needs(postgresql=1),
        safe_under=SAFE,
        unsafe_under=UNSAFE,
        stops="the shards of a server that is down; " + REFUSES,
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

    def install_shards(self, servers: Servers, count: int) -> None:
        catalog = Catalog(servers.postgresql[0])
        try:
            wanted = range(_FIRST_OF_MANY, _FIRST_OF_MANY + count)
            provision.create_shards(catalog, wanted, node="node0")
        finally:
            catalog.close()

    hears = True

    def _open(self, servers: Servers, node: int) -> Source:
        function = sql.Identifier(schema_name(SCHEMA_PREFIX, node), "next_id")
        after = sql.SQL("select case when shardids.advance_past({}, %s) is not null then {}() end")
        return SqlSource.of(
            servers.postgresql[node],
            sql.SQL("{}()").format(function),
            after.format(sql.Literal(node), function),
        )

    def column(self, node: int = 0) -> KeyColumn:
        function = sql.Identifier(schema_name(SCHEMA_PREFIX, node), "next_id")
        return KeyColumn(type="bigint", draw=sql.SQL("{}()").format(function))

    def column_of(self, shard: int) -> KeyColumn:
        return Shardids.column(self, _FIRST_OF_MANY + shard)

    def place(self, key: Key) -> int:
        bits = integer_of(key)
        ms, sequence = bits >> DEFAULT.shard_bits + DEFAULT.sequence_bits, bits % DEFAULT.sequence_limit
        return _place(ms << DEFAULT.sequence_bits | sequence, DEFAULT.shard_of(bits))

    def decode(self, key: Key) -> Decoded:
        decoded = DEFAULT.decode(integer_of(key))
        return Decoded(time=decoded.time, origin=decoded.shard, sequence=decoded.sequence)


class _ShardSource(SqlSource):
    """Draws from one shard, and reserves ticks there."""

    sets_aside = True

    def __init__(self, url: str, shard: int) -> None:
        one = sql.SQL("select {}()").format(sql.Identifier(schema_name(SCHEMA_PREFIX, shard), "next_id"))
        super().__init__(url, one, _many_of(shard))
        self._shard = shard

    def _set_aside(self, count: int) -> range:
        ((first, last),) = self._session.rows(
            "select first_tick, last_tick from shardids.reserve(%s, %s)", (self._shard, count)
        )
        return range(_place(first, self._shard), _place(last, self._shard) + 1)


def _place(tick: int, shard: int) -> int:
    return shard << 64 | tick


def _many_of(shard: int) -> sql.Composed:
    function = sql.Identifier(schema_name(SCHEMA_PREFIX, shard), "next_ids")
    return sql.SQL("select {}(%s::integer)").format(function)


class _BlocksOfShards(Source):
    """Hands out one block after another of each shard; draws them all on one session."""

    def __init__(self, url: str) -> None:
        self._session = PostgreSqlSession(url)
        self._left: dict[int, Iterator[Key]] = {}

    def draw(self) -> Key:
        return self.draw_for(0)

    def draw_for(self, shard: int) -> Key:
        for key in self._left.get(shard, ()):
            return key
        drawn = self._session.rows(_many_of(_FIRST_OF_MANY + shard), (BLOCK,))
        self._left[shard] = iter([key for (key,) in drawn])
        return next(self._left[shard])

    def close(self) -> None:
        self._session.close()


class ShardidsBlocks(Shardids):
    """``next_ids(n)``: the client reserves IDs and supplies them with its rows."""

    about = About(
        name="shardids-blocks",
        title="shardids, next_ids(n)",
        needs=Needs(postgresql=1),
        safe_under=SAFE,
        unsafe_under=UNSAFE,
        stops="the shards of a server that is down, except for IDs that clients have set aside; " + REFUSES,
        tells="time (ms), shard",
        settings=f"default layout; blocks of {BLOCK:,} IDs for single draws, one statement for n at once",
        described_at="docs/explanation/generator.md",
    )

    hears = False

    def _open(self, servers: Servers, node: int) -> Source:
        return Blocks(_ShardSource(servers.postgresql[node], node), BLOCK)

    def open_shards(self, servers: Servers) -> Source:
        self.check(servers)
        return _BlocksOfShards(servers.postgresql[0])

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint")

    def column_of(self, shard: int) -> KeyColumn:
        return self.column()


class Published(SqlScheme):
    """Milliseconds, a shard number and a sequence modulo 1024; the shard's number is the node's."""

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

    def install_shards(self, servers: Servers, count: int) -> None:
        script = read_sql("compare/published.v1")
        session = PostgreSqlSession(servers.postgresql[0])
        try:
            for shard in range(count):
                session.rows("select set_config('shardids.shard', %s, false)", (str(_FIRST_OF_MANY + shard),))
                session.rows("select set_config('shardids.schema', %s, false)", (_published(shard),))
                session.run(script)
        finally:
            session.close()

    def column(self, node: int = 0) -> KeyColumn:
        return KeyColumn(type="bigint", draw=sql.SQL("published.next_id()"))

    def column_of(self, shard: int) -> KeyColumn:
        function = sql.Identifier(_published(shard), "next_id")
        return KeyColumn(type="bigint", draw=sql.SQL("{}()").format(function))

    def decode(self, key: Key) -> Decoded:
        decoded = INSTAGRAM.decode(integer_of(key))
        return Decoded(time=decoded.time, origin=decoded.shard, sequence=decoded.sequence)


def _published(shard: int) -> str:
    return f"published_{shard:04d}"
