"""The key schemes that shardids is compared with, each as it is really run, and shardids itself.

Libraries and drivers of the extra ``compare`` are imported when a scheme that needs them is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardids.baselines.flake128 import Flake128
from shardids.baselines.identity import Identity
from shardids.baselines.offsets import Offsets
from shardids.baselines.own import Shardids, ShardidsBlocks
from shardids.baselines.published import Published
from shardids.baselines.ranges import Ranges
from shardids.baselines.redis_counter import RedisBlocks, RedisIncr
from shardids.baselines.scheme import (
    About,
    Column,
    Decoded,
    Key,
    Login,
    Needs,
    Scheme,
    Servers,
    Source,
)
from shardids.baselines.sequence import OneSequence
from shardids.baselines.snowflake import Snowflake
from shardids.baselines.tickets import Tickets
from shardids.baselines.ulids import Ulid
from shardids.baselines.uuids import Uuid1, Uuid4, Uuid4OfClient, Uuid6, Uuid7, Uuid7OfClient
from shardids.errors import BadArgument

__all__ = [
    "SCHEMES",
    "About",
    "Column",
    "Decoded",
    "Key",
    "Login",
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
