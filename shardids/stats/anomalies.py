"""What the detector finds, and from where on it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Kind(StrEnum):
    """What is unusual."""

    HOT = "hot shard"
    BURST = "burst"
    SILENCE = "silence"
    CLOCK = "clock jump"
    FUTURE = "future"
    OUTSIDE = "outside"
    SEQUENCE = "sequence"
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One thing that is unusual.

    Attributes:
        shard: its shard; None if it is of all shards together.
        start: when it begins, in UTC, and ``end`` when it ends; None where it has no time.
        value: what was seen, and ``expected`` what is usual, in the unit of ``message``.
        message: both in words.
    """

    kind: Kind
    shard: int | None = None
    start: datetime | None = None
    end: datetime | None = None
    value: float
    expected: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From where on the detector speaks. Each rule asks that all of its bounds are passed.

    Attributes:
        chance: how probable one false alarm by chance is at most, a rule and a call. It is divided by how
            many places the rule looks at (Bonferroni).
        ratio: how many times the usual a hot shard and a burst are. Three times is more than the shares of
            shards differ by the hash of a key, and more than a quarter of a day changes a load.
        least_ids: how many IDs a burst has at least, and a shard that is said to be silent: fewer tell
            nothing of what is usual.
        deviations: how many deviations from the median; 1.4826 median absolute deviations are one, as in a
            normal distribution. Six are passed by two of a thousand million.
        clock_ms: how far a shard's clock is from the others'. The generator itself differs by up to 16 ms
            ahead and 100 ms behind.
        clock_ids: how many IDs in a row, of one shard, say so.
        future_ms: how far an ID is ahead of now. The usual draw goes up to a minute ahead.
        sequence_share: how much of a shard's IDs a second are used in its busiest interval.
        layout_years: how many years the layout's time lasts.
    """

    chance: float = 1e-3
    ratio: float = 3.0
    least_ids: int = 20
    deviations: float = 6.0
    clock_ms: int = 1000
    clock_ids: int = 5
    future_ms: int = 60_000
    sequence_share: float = 0.8
    layout_years: float = 1.0


DEFAULTS: Final = Thresholds()


_TIMES: Final = ((1, "a second"), (60, "a minute"), (3600, "an hour"), (86_400, "a day"))
_UNITS: Final = ((365.2425 * 86_400, "years"), (86_400, "days"), (3600, "h"))


def span(seconds: float, digits: int = 1) -> str:
    """Returns a length of time in the largest unit of which it has two: ``61.0 s``, ``3.2 h``, ``9.0 days``.

    ``digits`` is how many a figure in seconds has after the point.
    """
    for unit, name in _UNITS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.{digits}f} s"


def plain(number: float) -> str:
    """Returns a number without an exponent: whole from 100 on, else of two decimals at most."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rate(per_second: float, unit: str) -> str:
    """Returns a rate by the shortest time in which there is one: ``12 IDs a second``, ``3.4 IDs a day``."""
    seconds, name = next((one for one in _TIMES if per_second * one[0] >= 1), _TIMES[-1])
    return f"{plain(per_second * seconds)} {unit}s {name}"


def time_of(unix_ms: int) -> datetime:
    """Returns the time in UTC, also of milliseconds that a float would round."""
    return _EPOCH + timedelta(milliseconds=int(unix_ms))
