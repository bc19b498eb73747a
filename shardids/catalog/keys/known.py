"""Keys as the directory names them, and the directory in memory: sorted hashes with their shards."""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Final
from uuid import UUID

from shardids.catalog.topology import digests_of_keys, key_bytes, shard_of_digest, shards_for_keys
from shardids.errors import BadArgument, UnsupportedKey

Key = int | str | bytes | UUID
"""A value of a sharding key."""

DIGEST_BYTES: Final = 16
"""How many bytes of a key's hash are compared: two keys that share them are not found by search."""
LONGEST_KEY: Final = 1024
"""How many bytes a key in the directory has at most, as text."""
MOST_CHANGES: Final = 10_000
"""From how many changes on the directory is read as a whole."""
_ROOM: Final = 4
"""How many places the filter has per key, at least: three of four keys that are not there end with it."""
_ABSENT: Final = -1
TEXT: Final = "text"
_KIND_OF: Final = {str: TEXT, int: "bigint", UUID: "uuid", bytes: "bytea"}
KINDS: Final = tuple(_KIND_OF.values())
_LARGEST: Final = 1 << 63
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def kind_of(key: object, region: str | None = None) -> str:
    """Return the kind of a key: the SQL type of its column, and ``@`` with its region if it has one.

    ``kind_of("ann")`` is ``text``, ``kind_of(5, "eu")`` is ``bigint@eu``.

    Raises:
        UnsupportedKey: a key of another type than int, str, bytes and UUID.
    """
    for type_, kind in _KIND_OF.items():
        if isinstance(key, type_) and not isinstance(key, bool):
            return kind if region is None else f"{kind}@{region}"
    raise UnsupportedKey(f"a key of type {type(key).__name__} can't be in the directory of keys")


def region_of(kind: str) -> str | None:
    """Return the region in a kind, or ``None``."""
    return kind.partition("@")[2] or None


def key_text(key: Key) -> str:
    """Return a key as the directory has it: decimal digits, the text itself, hex digits, or a UUID.

    Raises:
        BadArgument: the directory can't hold it: an integer above 64 bits, text with NUL or lone surrogates,
            or one of over 1,024 bytes.
        UnsupportedKey: a key of another type.
    """
    if isinstance(key, str):
        text = str(key)
    elif isinstance(key, bytes):
        text = key.hex()
    else:
        kind_of(key)
        if isinstance(key, int) and not -_LARGEST <= key < _LARGEST:
            raise BadArgument("an integer of more than 64 bits can't be in the directory of keys")
        text = str(int(key)) if isinstance(key, int) else str(key)
    if "\0" in text:
        raise BadArgument("a text with NUL can't be in the directory of keys: PostgreSQL stores none")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadArgument(f"a key has no UTF-8 form: {error}") from None
    if size > LONGEST_KEY:
        raise BadArgument(
            f"a key of {size} bytes can't be in the directory of keys",
            hint=f"It takes keys of at most {LONGEST_KEY} bytes.",
        )
    return text


def parse_key(text: str, kind: str = TEXT) -> Key:
    """Return the key that a text stands for, by its kind; ``text`` is any way to write the key.

    Raises:
        BadArgument: no such kind, or not a text of such a key.
    """
    plain = kind.partition("@")[0]
    try:
        match plain:
            case "text":
                return text
            case "bigint" if _INTEGER.fullmatch(text):
                return int(text)
            case "bigint":
                raise ValueError
            case "uuid":
                return UUID(text)
            case "bytea":
                return bytes.fromhex(text.removeprefix("\\x"))
    except ValueError:
        raise BadArgument(f"{text[:60]!r} is not a key of kind {plain}") from None
    raise _unknown_kind(kind)


def require_kind(kind: str) -> None:
    """Require that there are keys of a kind; its region is not looked at.

    Raises:
        BadArgument: no such kind.
    """
    if kind.partition("@")[0] not in KINDS:
        raise _unknown_kind(kind)


def _unknown_kind(kind: str) -> BadArgument:
    return BadArgument(
        f"{kind!r} is not a kind of keys", hint=f"Kinds: {', '.join(KINDS)}; in a region: text@eu."
    )


def digest_of(key: object, region: str | None = None) -> bytes:
    """Return the 32 bytes that a key is found by; without a region they are those of ``key_hash``.

    Raises:
        UnsupportedKey, BadArgument: as :func:`shardids.catalog.topology.key_hash` does.
    """
    digest = sha256(key_bytes(key)).digest()
    return digest if region is None else sha256(f"@{region}:".encode() + digest).digest()


def numbers_of(code: str, packed: bytes) -> array[int]:
    """Return numbers that are packed with the highest byte first; ``code`` is their type, as in an array."""
    found = array(code)
    found.frombytes(packed)
    if sys.byteorder == "little":
        found.byteswap()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Rows that have left the shard in their IDs.

    Attributes:
        lowest: the lowest ID of such a row.
        highest: the highest one.
        shards: where the rows of each key are, at the key's slot in the shard.
        version: grows when any of this or the shard's list changes.
    """

    lowest: int
    highest: int
    shards: array[int]
    version: int

    def shard_at(self, slot: int | None, origin: int) -> int:
        """Return where the rows of a slot's key are; ``origin`` for a slot that is not known yet."""
        return origin if slot is None or slot >= len(self.shards) else self.shards[slot]


class KnownHomes:
    """The directory of keys in memory, at one version; immutable. At most 26 bytes per key.

    Args:
        version: the version of the catalog's directory; 0: it never had an entry.
        digests: the first 16 bytes of each key's hash, concatenated in order.
        shards: two bytes per key, the higher first, in the same order.
        newer: keys that changed since, with their shards, or ``None`` for those that were taken out.
        departures: the shards that rows have left.

    Attributes:
        version: as given.
        departures: as given.
    """

    __slots__ = ("_filter", "_high", "_low", "_mask", "_newer", "_shards", "departures", "version")

    def __init__(
        self,
        version: int = 0,
        digests: bytes = b"",
        shards: bytes = b"",
        newer: Mapping[bytes, int | None] = MappingProxyType({}),
        departures: Mapping[int, Departures] = MappingProxyType({}),
    ) -> None:
        both, self._shards = numbers_of("Q", digests), numbers_of("H", shards)
        if len(both) != 2 * len(self._shards):
            raise BadArgument(f"{len(both) // 2} keys have {len(self._shards)} shards")
        self.version = version
        self._high, self._low = both[::2], both[1::2]
        places = 1 << (_ROOM * len(self._high) - 1).bit_length() if self._high else 1
        self._mask = places - 1
        self._filter = bytearray(places)
        for high in self._high:
            self._filter[high & self._mask] = 1
        self._newer = dict(newer)
        self.departures = departures

    def __bool__(self) -> bool:
        return bool(self._shards or self._newer)

    @property
    def size_bytes(self) -> int:
        """How much memory the keys of :attr:`version` take, without those that changed since."""
        arrays = self._high, self._low, self._shards
        return len(self._filter) + sum(one.itemsize * len(one) for one in arrays)

    @property
    def changes(self) -> int:
        """How many keys changed since it was read as a whole."""
        return len(self._newer)

    def with_changes(
        self, version: int, changed: Mapping[bytes, int | None], departures: Mapping[int, Departures]
    ) -> KnownHomes:
        """Return the directory at a later version, by the keys that changed, and all departures."""
        later = object.__new__(KnownHomes)
        later._high, later._low, later._shards = self._high, self._low, self._shards
        later._filter, later._mask = self._filter, self._mask
        later._newer = {**self._newer, **changed}
        later.departures = departures
        later.version = version
        return later

    def shard_of(self, digest: bytes) -> int | None:
        """Return the shard of a key by what :func:`digest_of` returned; ``None`` if it has no entry."""
        if self._newer:
            shard = self._newer.get(digest[:DIGEST_BYTES], _ABSENT)
            if shard != _ABSENT:
                return shard
        high = int.from_bytes(digest[:8], "big")
        if not self._filter[high & self._mask]:
            return None
        at = bisect_left(self._high, high)
        low = int.from_bytes(digest[8:DIGEST_BYTES], "big")
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                return self._shards[at]
            at += 1
        return None

    def shards_for(self, keys: Sequence[int] | Sequence[str], shard_count: int) -> list[int]:
        """Return the shards of keys of one type: those of the entries, and else of the hashes.

        Raises:
            ValueError: a key that ``shard_for_key`` refuses for its value.
        """
        if not self:
            return shards_for_keys(keys, shard_count)
        if self._newer:
            return [self._shard_for(digest, shard_count) for digest in digests_of_keys(keys)]
        # Most keys end with the filter: no call for each of them.
        filter_, mask = self._filter, self._mask
        return [
            self._shard_for(digest, shard_count)
            if filter_[(high := int.from_bytes(digest[:8], "big")) & mask]
            else high % shard_count
            for digest in digests_of_keys(keys)
        ]

    def _shard_for(self, digest: bytes, shard_count: int) -> int:
        home = self.shard_of(digest)
        return shard_of_digest(digest, shard_count) if home is None else home


NO_HOMES: Final = KnownHomes()
"""The directory without entries."""
