"""The key schemes that shardids is compared with, each as it is really run, and shardids itself.

Libraries and drivers of the extra ``compare`` are imported when a scheme that needs them is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardids.compare.schemes.blocks import Ranges
from shardids.compare.schemes.postgresql import Identity, Offsets, OneSequence
from shardids.compare.schemes.redis_counter import RedisBlocks, RedisIncr
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
from shardids.compare.schemes.tickets import Tickets
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
            OneSequence(),
            Identity(),
            Offsets(),
            Tickets(),
            Ranges(),
            RedisIncr(),
            RedisBlocks(),
            Published(),
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
"""All schemes, by their names, in the order of a report."""


def scheme_of(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        BadArgument: there is none; the hint lists those that there are.
    """
    try:
        return SCHEMES[name]
    except KeyError:
        known = ", ".join(SCHEMES)
        raise BadArgument(f"there is no scheme {name!r}", hint=f"The schemes are {known}.") from None
