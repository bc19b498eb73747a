"""The notation of shards, nodes and durations in commands and messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import Final

from shardids.errors import BadArgument

_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*(ms|s|min|h)")
_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%)?")
_SIZE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*(kB|MB|GB|TB)")
_UNITS_BYTES: Final = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000}


def shown_shards(shards: Iterable[int]) -> str:
    """Return shard numbers as ``--shards`` takes them: ``0-31,40``, sorted and without duplicates."""

    def runs() -> Iterator[str]:
        for _, run in groupby(enumerate(sorted(set(shards))), lambda pair: pair[1] - pair[0]):
            members = [number for _, number in run]
            yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])

    return ",".join(runs())


def counted(count: int, noun: str) -> str:
    """Return ``1 row``, ``0 rows`` or ``1,064 rows`` for the noun ``row``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def named_shards(shards: Collection[int]) -> str:
    """Return ``shard 5`` or ``shards 0-3,7``."""
    return f"shard{'' if len(set(shards)) == 1 else 's'} {shown_shards(shards)}"


def named_nodes(names: Collection[str]) -> str:
    """Return ``node "a"`` or ``nodes "a", "b"``."""
    return f"node{'' if len(names) == 1 else 's'} " + ", ".join(f'"{name}"' for name in names)


def parse_shards(text: str, shard_count: int) -> list[int]:
    """Parse shard numbers, ``0-31,40`` or ``all``, and return them sorted.

    Raises:
        BadArgument: the text is not such a list, or names a shard outside 0 to ``shard_count`` - 1.
    """
    if text == "all":
        return list(range(shard_count))
    shards: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (_NUMBER.fullmatch(first) and _NUMBER.fullmatch(last)):
            raise BadArgument(f"{part!r} is not a shard number or range", hint="For example: 0-31,40 or all")
        if int(last) < int(first):
            raise BadArgument(
                f"{part.strip()} runs backwards: {last}-{first}", hint="For example: 0-31,40 or all"
            )
        if not int(last) < shard_count:
            raise BadArgument(
                f"{part!r} is not a range of shards of this cluster",
                hint=f"Shards are numbered 0 to {shard_count - 1}.",
            )
        shards.update(range(int(first), int(last) + 1))
    return sorted(shards)


def parse_duration_ms(text: str) -> int:
    """Parse a duration, ``2s``, ``500ms`` or ``1min``, and return it in ms; only 0 needs no unit.

    Raises:
        BadArgument: the text is not a duration, or has no unit.
    """
    if text.strip() == "0":
        return 0
    match = _DURATION.fullmatch(text.strip())
    if match is None and _DURATION.fullmatch(f"{text.strip()}s"):
        raise BadArgument(f"{text!r} is a duration without a unit", hint=f"Write {text}ms or {text}s.")
    milliseconds = float(match[1]) * _UNITS_MS[match[2]] if match else -1.0
    if not 0 <= milliseconds < 1 << 31:
        raise BadArgument(f"{text!r} is not a duration", hint="Write 2s, 500ms or 1min; 0 means no limit.")
    return round(milliseconds)


def parse_part(text: str, option: str) -> float:
    """Parse a part of a whole, ``0.1`` or ``10%``, and return it as a number below 1; errors name the option.

    Raises:
        BadArgument: the text is not such a part.
    """
    match = _PART.fullmatch(text.strip())
    part = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if part >= 1:
        raise BadArgument(f"{option}: {text!r} is not a part below 1", hint="For a tenth write 0.1 or 10%.")
    return part


def parse_size_bytes(text: str) -> int:
    """Parse a size, ``500MB`` or ``2GB``, and return it in bytes; units are powers of 1,000.

    Raises:
        BadArgument: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise BadArgument(f"{text!r} is not a size", hint="Write 500MB or 2GB.")
    return round(float(match[1]) * _UNITS_BYTES[match[2]])
