"""The layout of an ID: the split of its bits, and computations that need nothing else.

An ID is ``(ms << (shard_bits + sequence_bits)) | (shard << sequence_bits) | sequence``, where
``ms`` counts milliseconds since the layout's epoch, as a signed 64-bit integer (PostgreSQL's
``bigint``). The database makes the IDs; this module reads them, and makes bounds for queries.

IDs of other generators may count another unit of time, or have the sequence above the number of the
machine. A :class:`ForeignLayout` takes such IDs apart; no cluster can have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final

from shardids.errors import BadArgument, TimeExhausted
from shardids.ids.text import as_integer, checked_integer, shown, to_signed, to_unsigned


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecodedId:
    """The parts of an ID, here in its signed reading, by its layout. :meth:`Layout.decode` makes it.

    Each part is computed on access.
    """

    id: int
    layout: Layout

    def __repr__(self) -> str:
        return (
            f"DecodedId(id={self.id}, time={self.time.isoformat(timespec='milliseconds')},"
            f" ms={self.ms}, shard={self.shard}, sequence={self.sequence})"
        )

    @property
    def ms(self) -> int:
        """The time of birth in milliseconds since the layout's epoch."""
        layout = self.layout
        ms = self.id >> (layout.shard_bits + layout.sequence_bits)
        return ms & ((1 << layout.time_bits) - 1)

    @property
    def shard(self) -> int:
        """The origin: where the row was born, not necessarily where it is stored today."""
        return self.id >> self.layout.sequence_bits & (self.layout.shard_limit - 1)

    @property
    def sequence(self) -> int:
        """Which of the shard's IDs of that millisecond it is, from 0."""
        return self.id & (self.layout.sequence_limit - 1)

    @property
    def time(self) -> datetime:
        """The time of birth in UTC, exact to the millisecond."""
        return self.layout.time_at(self.ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRange:
    """Bounds, both included, for SQL: ``WHERE id BETWEEN first AND last``."""

    first: int
    last: int


_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_UNIX_MS: Final = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z: datetime ends there
_DEFAULT_EPOCH_MS: Final = 1_704_067_200_000  # 2024-01-01T00:00Z
_Limits = tuple[tuple[str, int, int], ...]
_WIDTHS: Final[_Limits] = (("time_bits", 30, 42), ("shard_bits", 1, 16), ("sequence_bits", 1, 22))
_FOREIGN_WIDTHS: Final[_Limits] = (("time_bits", 1, 62), ("shard_bits", 1, 32), ("sequence_bits", 1, 32))
_LONGEST_UNIT_MS: Final = 3_600_000
_WRITTEN: Final = re.compile(r"([0-9]{1,2})-([0-9]{1,2})-([0-9]{1,2})(?:@([0-9]{1,15}))?")
_FOREIGN_WRITTEN: Final = re.compile(
    r"(?P<time>[0-9]{1,2})x(?P<unit>[0-9]{1,7})(?P<second>m?s)-"
    r"(?:(?P<first_seq>[0-9]{1,2})seq-(?P<last_shard>[0-9]{1,2})shard"
    r"|(?P<first_shard>[0-9]{1,2})shard-(?P<last_seq>[0-9]{1,2})seq)@(?P<epoch>[0-9]{1,15})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitLayout:
    """Widths of time, shard and sequence, and the epoch where the time begins."""

    time_bits: int
    shard_bits: int
    sequence_bits: int
    epoch_ms: int
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for name, lowest, highest in self._limits():
            self._check(name, lowest, highest)
        if self.id_bits > 64:
            raise BadArgument(
                f"time, shard and sequence must take at most 64 bits, not {self.id_bits}"
                f" ({self.time_bits} + {self.shard_bits} + {self.sequence_bits})"
            )
        # Every time of the layout must be a datetime: decoding relies on it.
        latest = _LAST_UNIX_MS - (self._unit() << self.time_bits) + 1
        if latest < 0:
            raise BadArgument(f"{self.time_bits} bits of {self._unit():,} ms reach past the year 9999")
        self._check("epoch_ms", 0, latest)

    def _check(self, name: str, lowest: int, highest: int) -> None:
        # Stores a plain int: shifting a numpy integer would overflow.
        number = checked_integer(name, getattr(self, name), lowest, highest)
        object.__setattr__(self, name, number)

    def _limits(self) -> _Limits:
        return _WIDTHS

    def _unit(self) -> int:
        """Return the unit of time in milliseconds."""
        return 1

    @property
    def widths(self) -> dict[str, int]:
        """The bits of ``time``, ``shard`` and ``sequence``, from the highest to the lowest."""
        return {"time": self.time_bits, "shard": self.shard_bits, "sequence": self.sequence_bits}

    @property
    def id_bits(self) -> int:
        """Bits that the layout's IDs take, at most 64."""
        return self.time_bits + self.shard_bits + self.sequence_bits

    @property
    def uses_sign_bit(self) -> bool:
        """Whether IDs turn negative in the later half of the layout's time."""
        return self.id_bits == 64

    @property
    def shard_limit(self) -> int:
        """How many shards there can be; shard numbers are below it."""
        return 1 << self.shard_bits

    @property
    def sequence_limit(self) -> int:
        """How many IDs a shard has for each unit of time, a millisecond; sequence numbers are below it."""
        return 1 << self.sequence_bits

    @property
    def ids_per_second(self) -> int:
        """How many IDs a shard can issue in a second without running ahead of the clock."""
        return self.sequence_limit * 1000 // self._unit()

    def years_left(self, now: datetime) -> float:
        """Return how many years from ``now`` on the time bits last; negative once they have ended."""
        return (self.last_time - now) / timedelta(days=365.2425)

    @property
    def first_time(self) -> datetime:
        """The epoch, in UTC."""
        return self.time_at(0)

    @property
    def last_time(self) -> datetime:
        """The last unit of time that the time bits can hold, in UTC."""
        return self.time_at(self._unit() * ((1 << self.time_bits) - 1))

    @property
    def negative_from(self) -> datetime | None:
        """The time when IDs turn negative, in UTC; ``None`` if they never do."""
        return self.time_at(self._unit() << (self.time_bits - 1)) if self.uses_sign_bit else None

    def time_at(self, ms: int) -> datetime:
        """Return the time in UTC, ``ms`` milliseconds after the epoch.

        Raises:
            BadArgument: ``ms`` is not an integer, or negative.
            TimeExhausted: ``ms`` is more than the time bits can hold.
        """
        return _UNIX_EPOCH + timedelta(milliseconds=self.epoch_ms + self._checked_ms(ms))

    def _bits_of(self, id_: int) -> int:
        """Return an ID's unsigned reading, or refuse one that the layout can't hold."""
        bits = to_unsigned(id_) if type(id_) is not int or id_ < 0 else id_
        if bits >> self.id_bits:
            raise self._foreign(id_)
        return bits

    def _checked_ms(self, ms: object, named: str = "") -> int:
        number = as_integer("ms", ms)
        if 0 <= number < self._unit() << self.time_bits:
            return number
        named = named or f"ms {shown(number)}"
        if number < 0:
            epoch = self.first_time.isoformat()
            raise BadArgument(f"{named} is before the layout's epoch, {epoch}")
        raise TimeExhausted(
            f"{named} is past {self.last_time.isoformat()}, the last that {self.time_bits} time bits can hold"
        )

    def _foreign(self, id_: int) -> BadArgument:
        bits = to_unsigned(id_)
        if id_ < 0:
            return BadArgument(f"ID {id_} is negative, but layout {self} leaves the sign bit zero")
        return BadArgument(
            f"ID {bits} takes {bits.bit_length()} bits, but layout {self} has only {self.id_bits}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(BitLayout):
    """The split of 64 bits into time, shard and sequence; fixed when a cluster is made.

    ``epoch_ms`` is milliseconds from 1970-01-01T00:00Z to the moment that the IDs count from.
    Widths that sum to 64 use the sign bit: the later half of their IDs is negative. ``name`` is
    for people; layouts are equal when their widths and epochs are.

    Raises:
        BadArgument: a width out of range (time 30 … 42, shard 1 … 16, sequence 1 … 22), a sum above
            64, or an epoch before 1970 or so late that the time bits reach past the year 9999.
    """

    @classmethod
    def preset(cls, name: str) -> Layout:
        """Return the layout of that name in :data:`PRESETS`.

        Raises:
            BadArgument: the preset does not exist; the message lists the names.
        """
        try:
            return PRESETS[name]
        except KeyError:
            known = ", ".join(PRESETS)
            raise BadArgument(f"{name!r} is not a preset layout: the presets are {known}") from None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout written as a preset's name, or as widths: ``41-12-10@1704067200000``.

        The number after ``@`` is ``epoch_ms``; without it, the default layout's. Widths and epoch
        of a preset give that preset, with its name. ``str(layout)`` writes this form.

        Raises:
            BadArgument: neither form, or no valid layout.
        """
        if text in PRESETS:
            return PRESETS[text]
        written = _WRITTEN.fullmatch(text)
        if text in FOREIGN or _FOREIGN_WRITTEN.fullmatch(text):
            raise BadArgument(
                f"{text!r} is the layout of another ID generator: no cluster can use it",
                hint="Only shardids id decode and shardids plan --layout accept it.",
            )
        if written is None:
            raise BadArgument(
                f"{text!r} is not a layout",
                hint=f"Write a preset ({', '.join(PRESETS)}), or the bits of time, shard and"
                f" sequence and the epoch in Unix milliseconds: {DEFAULT}",
            )
        layout = cls(
            time_bits=int(written[1]),
            shard_bits=int(written[2]),
            sequence_bits=int(written[3]),
            epoch_ms=int(written[4] or _DEFAULT_EPOCH_MS),
        )
        return next((preset for preset in PRESETS.values() if preset == layout), layout)

    def __str__(self) -> str:
        return f"{self.time_bits}-{self.shard_bits}-{self.sequence_bits}@{self.epoch_ms}"

    @property
    def fits_javascript(self) -> bool:
        """Whether every ID is a safe integer in JavaScript (at most 53 bits)."""
        return self.id_bits <= 53

    def encode(
        self, *, at: datetime | None = None, ms: int | None = None, shard: int, sequence: int = 0
    ) -> int:
        """Return the ID, in its signed reading, of a time, a shard and a sequence number.

        The time is either ``at``, an aware datetime that is rounded down to its millisecond, or
        ``ms`` since the epoch. Only the database knows which IDs are taken: never insert an ID
        that was made here.

        Raises:
            BadArgument: both times or none, a naive datetime, a time before the epoch, or a shard
                or sequence number out of range.
            TimeExhausted: a time past the last that the layout can hold.
        """
        if (at is None) == (ms is None):
            raise BadArgument("give exactly one of at and ms")
        ms = self._checked_ms(ms) if at is None else self._ms_of(at)
        shard = self._checked_shard(shard)
        sequence = checked_integer("sequence", sequence, 0, self.sequence_limit - 1)
        return self._pack(ms, shard, sequence)

    def decode(self, id_: int, /) -> DecodedId:
        """Return the parts of an ID, given in its signed or its unsigned reading.

        Raises:
            BadArgument: not an integer, beyond 64 bits, or with bits set above the layout's (a
                negative ID in a layout that does not use the sign bit, for one).
        """
        bits = self._bits_of(id_)
        return DecodedId(id=bits - (1 << 64) if bits >> 63 else bits, layout=self)

    def shard_of(self, id_: int, /) -> int:
        """Return the shard of an ID, faster than :meth:`decode`, and raise what that does."""
        if type(id_) is not int or id_ >> self.id_bits:
            return self.decode(id_).shard
        return id_ >> self.sequence_bits & (1 << self.shard_bits) - 1

    def min_id(self, at: datetime) -> int:
        """Return the lowest ID that any shard can issue in the millisecond of ``at``.

        Raises:
            BadArgument: a naive datetime, or a time before the epoch.
            TimeExhausted: a time past the last that the layout can hold.
        """
        return self._pack(self._ms_of(at), 0, 0)

    def max_id(self, at: datetime) -> int:
        """Return the highest ID of that millisecond over all shards. Raises what :meth:`min_id` does."""
        return self._pack(self._ms_of(at), self.shard_limit - 1, self.sequence_limit - 1)

    def id_range(self, start: datetime, end: datetime, shard: int | None = None) -> IdRange:
        """Return the bounds of all IDs born at ``start`` or later and before ``end``.

        An ID is born at the beginning of its millisecond. Times that the layout can't hold count
        as its first or its end. ``shard`` narrows the bounds to the first and the last ID of that
        shard; IDs of other shards lie between them, so also test ``shardids.shard_of(id)``.

        Raises:
            BadArgument: a naive datetime, a range that holds no millisecond of the layout (empty,
                reversed, or outside of it), a shard out of range, or a range whose IDs turn
                negative, which takes two ``BETWEEN``; the message names the time to split it at.
        """
        first_ms = self._first_ms_from(start)
        after_ms = self._first_ms_from(end)
        if first_ms >= after_ms:
            raise BadArgument(
                f"no ID can be born from {start.isoformat()} until before {end.isoformat()}:"
                " the range is empty, reversed, or outside the layout's"
                f" {self.first_time.isoformat()} … {self.last_time.isoformat()}"
            )
        negative_from = self.negative_from
        if negative_from and first_ms < self._ms_of(negative_from) < after_ms:
            turn = negative_from.isoformat()
            raise BadArgument(
                f"IDs turn negative at {turn}, so that one BETWEEN can't select this range",
                hint=f"Split the range at {turn}.",
            )
        lowest, highest = 0, self.shard_limit - 1
        if shard is not None:
            lowest = highest = self._checked_shard(shard)
        return IdRange(
            first=self._pack(first_ms, lowest, 0),
            last=self._pack(after_ms - 1, highest, self.sequence_limit - 1),
        )

    def _pack(self, ms: int, shard: int, sequence: int) -> int:
        return to_signed(((ms << self.shard_bits | shard) << self.sequence_bits) | sequence)

    def _checked_shard(self, shard: int) -> int:
        return checked_integer("shard", shard, 0, self.shard_limit - 1)

    def _ms_of(self, at: datetime) -> int:
        ms = _unix_microseconds(at) // 1000 - self.epoch_ms
        return self._checked_ms(ms, at.isoformat())

    def _first_ms_from(self, at: datetime) -> int:
        ms = -(-_unix_microseconds(at) // 1000) - self.epoch_ms
        return min(max(ms, 0), 1 << self.time_bits)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForeignId:
    """The parts of an ID of another generator, here in its signed reading, in its layout.

    ``shard`` is the number of its machine or worker. :meth:`ForeignLayout.decode` makes it.
    """

    id: int
    layout: ForeignLayout
    ms: int
    shard: int
    sequence: int

    def __repr__(self) -> str:
        return (
            f"ForeignId(id={self.id}, time={self.time.isoformat(timespec='milliseconds')},"
            f" ms={self.ms}, shard={self.shard}, sequence={self.sequence})"
        )

    @property
    def time(self) -> datetime:
        """The time of birth in UTC, rounded down to the layout's unit."""
        return self.layout.time_at(self.ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLayout(BitLayout):
    """The split of 64 bits by another generator. Its IDs can be taken apart; no cluster can have it.

    ``unit_ms`` is the unit of its time, in milliseconds; ``sequence_first``: the sequence is
    above the shard, which is a machine or a worker here.

    Raises:
        BadArgument: a width out of range (time 1 … 62, shard and sequence 1 … 32), a sum above 64, a unit
            below 1 ms or above an hour, or an epoch before 1970 or so late that the time bits reach past
            the year 9999.
    """

    unit_ms: int
    sequence_first: bool = False

    def __post_init__(self) -> None:
        self._check("unit_ms", 1, _LONGEST_UNIT_MS)
        BitLayout.__post_init__(self)

    def _limits(self) -> _Limits:
        return _FOREIGN_WIDTHS

    def _unit(self) -> int:
        return self.unit_ms

    def __str__(self) -> str:
        unit = f"{self.unit_ms}ms" if self.unit_ms % 1000 else f"{self.unit_ms // 1000}s"
        parts = [f"{self.shard_bits}shard", f"{self.sequence_bits}seq"]
        first, last = reversed(parts) if self.sequence_first else parts
        return f"{self.time_bits}x{unit}-{first}-{last}@{self.epoch_ms}"

    @property
    def widths(self) -> dict[str, int]:
        """The bits of ``time``, ``shard`` and ``sequence``, from the highest to the lowest."""
        shard, sequence = {"shard": self.shard_bits}, {"sequence": self.sequence_bits}
        rest = sequence | shard if self.sequence_first else shard | sequence
        return {"time": self.time_bits} | rest

    def decode(self, id_: int, /) -> ForeignId:
        """Return the parts of an ID, given in its signed or its unsigned reading.

        Raises:
            BadArgument: as :meth:`Layout.decode` does.
        """
        bits = rest = self._bits_of(id_)
        parts = {}
        for name, width in reversed(self.widths.items()):
            parts[name] = rest & ((1 << width) - 1)
            rest >>= width
        return ForeignId(
            id=to_signed(bits),
            layout=self,
            ms=parts["time"] * self.unit_ms,
            shard=parts["shard"],
            sequence=parts["sequence"],
        )


def parse_layout(text: str) -> Layout | ForeignLayout:
    """Return what :meth:`Layout.parse` does, or the layout of another generator.

    That is written as a name in :data:`FOREIGN`, or as ``39x10ms-8seq-16shard@1409529600000``: the bits of
    the time and its unit, in ms or s; the bits of sequence and shard, the higher first; the epoch.

    Raises:
        BadArgument: no such form, or no valid layout.
    """
    if text in FOREIGN:
        return FOREIGN[text]
    written = _FOREIGN_WRITTEN.fullmatch(text)
    if written is None:
        return Layout.parse(text)
    layout = ForeignLayout(
        time_bits=int(written["time"]),
        unit_ms=int(written["unit"]) * (1 if written["second"] == "ms" else 1000),
        shard_bits=int(written["first_shard"] or written["last_shard"]),
        sequence_bits=int(written["first_seq"] or written["last_seq"]),
        epoch_ms=int(written["epoch"]),
        sequence_first=written["first_seq"] is not None,
    )
    return next((known for known in FOREIGN.values() if known == layout), layout)


def _unix_microseconds(at: datetime) -> int:
    if not isinstance(at, datetime):
        raise BadArgument(f"a time must be a datetime, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise BadArgument(f"{at.isoformat()} has no time zone: a time must be an aware datetime")
    # Integer arithmetic throughout: datetime.timestamp() is a float and rounds.
    return (at - _UNIX_EPOCH) // timedelta(microseconds=1)


DEFAULT: Final = Layout(
    time_bits=41, shard_bits=12, sequence_bits=10, epoch_ms=_DEFAULT_EPOCH_MS, name="default"
)
"""4096 shards, 1024 IDs per millisecond and shard, never negative, until 2093."""

INSTAGRAM: Final = Layout(
    time_bits=41, shard_bits=13, sequence_bits=10, epoch_ms=1_314_220_021_721, name="instagram"
)
"""The published layout; its IDs turn negative in 2046. For compatibility only."""

TWITTER: Final = Layout(
    time_bits=41, shard_bits=10, sequence_bits=12, epoch_ms=1_288_834_974_657, name="twitter"
)
"""Twitter's snowflakes, with the worker number as the shard."""

DISCORD: Final = Layout(
    time_bits=42, shard_bits=10, sequence_bits=12, epoch_ms=1_420_070_400_000, name="discord"
)
"""Discord's snowflakes; they use the sign bit and turn negative in 2084."""

JS53: Final = Layout(time_bits=41, shard_bits=6, sequence_bits=6, epoch_ms=_DEFAULT_EPOCH_MS, name="js53")
"""64 shards, 64 IDs per millisecond and shard; every ID is a safe JavaScript number."""

PRESETS: Final[Mapping[str, Layout]] = MappingProxyType(
    {layout.name: layout for layout in (DEFAULT, INSTAGRAM, TWITTER, DISCORD, JS53)}
)
"""The layouts that have a name, by their names."""

SONYFLAKE: Final = ForeignLayout(
    time_bits=39,
    unit_ms=10,
    shard_bits=16,
    sequence_bits=8,
    sequence_first=True,
    epoch_ms=1_409_529_600_000,
    name="sonyflake",
)
"""Sonyflake, its machine as the shard, from 2014-09-01, where its settings name no other start."""

UIDGENERATOR: Final = ForeignLayout(
    time_bits=28,
    unit_ms=1000,
    shard_bits=22,
    sequence_bits=13,
    epoch_ms=1_463_673_600_000,
    name="uidgenerator",
)
"""Baidu's UidGenerator, its worker as the shard, by default: from midnight of 2016-05-20 in China to 2024."""

FOREIGN: Final[Mapping[str, ForeignLayout]] = MappingProxyType(
    {layout.name: layout for layout in (SONYFLAKE, UIDGENERATOR)}
)
"""The layouts of other generators that have a name, by their names."""
