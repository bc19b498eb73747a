"""The key schemes that shardids is compared with, each set up as in production, and shardids itself.

A scheme imports libraries and drivers of the extra ``compare`` only when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardids.compare.schemes.blocks import Ranges, Tickets
from shardids.compare.schemes.id_service import IdService
from shardids.compare.schemes.logical import Hybrid, Lamport
from shardids.compare.schemes.mariadb_offsets import MariaDbOffsets
from shardids.compare.schemes.postgresql import Counter, Identity, Offsets, OneSequence
from shardids.compare.schemes.redis_counter import RedisBlocks, RedisConfirmed, RedisIncr
from shardids.compare.schemes.scheme import (
    About,
    Decoded,
    Key,
    KeyColumn,
    Needs,
    Scheme,
    Servers,
    Source,
)
from shardids.compare.schemes.shards import Published, Shardids, ShardidsBlocks
from shardids.compare.schemes.snowflake import Snowflake
from shardids.compare.schemes.uuids import (
    Flake128,
    Ulid,
    Uuid1,
    Uuid4,
    Uuid4OfClient,
    Uuid6,
    Uuid7,
    Uuid7OfClient,
)
from shardids.errors import BadArgument

__all__ = [
    "SCHEMES",
    "About",
    "Decoded",
    "Key",
    "KeyColumn",
    "Needs",
    "Scheme",
    "Servers",
    "Source",
    "scheme_of",
]

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        scheme.about.name: scheme
        for scheme in (
            Shardids(),
            ShardidsBlocks(),
            IdService(),
            OneSequence(),
            Identity(),
            Counter(),
            Offsets(),
            MariaDbOffsets(),
            Tickets(),
            Ranges(),
            RedisIncr(),
            RedisBlocks(),
            RedisConfirmed(),
            Published(),
            Lamport(),
            Hybrid(),
            Snowflake("wait"),
            Snowflake("offset"),
            Snowflake("fail"),
            Uuid1(),
            Uuid4(),
            Uuid4OfClient(),
            Uuid6(),
            Uuid7(),
            Uuid7OfClient(),
            Ulid(),
            Flake128(),
        )
    }
)
"""All schemes by name, in the order of a report."""


def scheme_of(name: str) -> Scheme:
    """Return the scheme of that name.

    Raises:
        BadArgument: no scheme has the name; the hint lists all names.
    """
    try:
        return SCHEMES[name]
    except KeyError:
        known = ", ".join(SCHEMES)
        raise BadArgument(f"scheme {name!r} does not exist", hint=f"The schemes are {known}.") from None
