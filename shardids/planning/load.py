"""A load that is still to come, what a node holds, and how people write both."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Final

from shardids.errors import BadArgument

SECONDS_A_YEAR: Final = 365.2425 * 86_400
KEY_INDEX_BYTES: Final = 22.5
"""Bytes of a row in the index of a bigint key, as docs/comparison.md publishes them."""

_NUMBER: Final = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kMGT]?)")
_SCALE: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_GROWTH: Final = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)%(?:/(y|m))?")
_PEAK: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)x?")
_LARGEST: Final = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a cluster has to bear.

    Attributes:
        ids_per_second: the mean today; each is a row.
        peak: how many times the mean the busiest second is.
        years: for how long.
        growth: by which part the mean grows a year: 0.4 is 40 %. Below zero it shrinks, above -1.
        rows: rows that are there already.
        row_bytes: what a row takes on disk with all but the index of its key.

    Raises:
        BadArgument: a number that is not finite or out of range; the message names it.
    """

    ids_per_second: float
    peak: float = 1.0
    years: float = 10.0
    growth: float = 0.0
    rows: float = 0.0
    row_bytes: float = 200.0

    def __post_init__(self) -> None:
        _check(self, "ids_per_second", 0, above=True)
        _check(self, "peak", 1)
        _check(self, "years", 0, above=True, highest=1000)
        _check(self, "growth", -1, above=True, highest=100)
        _check(self, "rows", 0)
        _check(self, "row_bytes", 0, above=True)

    def rate(self, year: float) -> float:
        """Returns the mean IDs a second after so many years."""
        try:
            return self.ids_per_second * math.exp(math.log1p(self.growth) * year)
        except OverflowError:
            return math.inf

    def peak_rate(self, year: float) -> float:
        """Returns the IDs of the busiest second after so many years."""
        return self.rate(year) * self.peak

    def most(self) -> float:
        """Returns the IDs of the busiest second until the end."""
        return max(self.peak_rate(0), self.peak_rate(self.years))

    def rows_after(self, year: float) -> float:
        """Returns how many rows there are after so many years, if none is deleted."""
        rise = math.log1p(self.growth)
        try:
            lasting = math.expm1(rise * year) / rise if abs(rise) > 1e-9 else year
        except OverflowError:
            return math.inf
        return self.rows + self.ids_per_second * SECONDS_A_YEAR * lasting

    def bytes_after(self, year: float) -> float:
        """Returns the bytes of rows and of the index of their key."""
        return self.rows_after(year) * (self.row_bytes + KEY_INDEX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node holds.

    Attributes:
        rows_per_second: rows that it commits; measure yours. docs/benchmarks.md has some 12,000 on two cores.
        disk: bytes, of which ``fill`` are used before the node counts as full.
        connections: how many it accepts, and ``latency_s`` for how long a row has one.

    Raises:
        BadArgument: a number that is not finite or out of range; the message names it.
    """

    rows_per_second: float = 10_000.0
    disk: float = 2e12
    fill: float = 0.8
    connections: float = 400.0
    latency_s: float = 0.005

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(self, field.name, 0, above=True, highest=1 if field.name == "fill" else _LARGEST)

    def parts(self, load: Load, year: float) -> dict[str, float]:
        """Returns how many nodes rows a second, disk and connections take after so many years."""
        return {
            "rows a second": load.peak_rate(year) / self.rows_per_second,
            "disk": load.bytes_after(year) / (self.disk * self.fill),
            "connections": load.peak_rate(year) * self.latency_s / self.connections,
        }


def _check(of: object, name: str, lowest: float, *, above: bool = False, highest: float = _LARGEST) -> None:
    value = getattr(of, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadArgument(f"{name} must be a number, not {type(value).__name__}")
    low_enough = lowest < value if above else lowest <= value
    if not (math.isfinite(value) and low_enough and value <= highest):
        least = f"above {lowest:g}" if above else f"at least {lowest:g}"
        raise BadArgument(f"{name} must be {least} and at most {highest:g}, not {value:g}")


def parse_number(what: str, text: str, unit: str = "") -> float:
    """Parses ``50000``, ``50,000``, ``50k``; with a unit of ``B`` also ``2TB``. Powers of 1,000.

    Raises:
        BadArgument: another form; the message starts with ``what``.
    """
    found = _NUMBER.fullmatch(text.strip().removesuffix(unit) if unit else text.strip())
    if found is None:
        example = "2TB" if unit else "50000 or 50k"
        raise BadArgument(f"{what}: {text!r} is no number of that kind", hint=f"For example: {example}")
    return float(re.sub("[_,]", "", found[1])) * _SCALE[found[2]]


def parse_peak(text: str) -> float:
    """Parses how many times the mean the busiest second is: ``8x``.

    Raises:
        BadArgument: another form.
    """
    found = _PEAK.fullmatch(text.strip())
    if found is None:
        raise BadArgument(f"--peak: {text!r} says not how many times the mean it is", hint="For example: 8x")
    return float(found[1])


def parse_growth(text: str) -> float:
    """Parses ``40%/y``, or ``2%/m`` as what becomes of it in a year; returns 0.4 for the first.

    Raises:
        BadArgument: another form, a month that leaves nothing, or one of which no number can say the year.
    """
    found = _GROWTH.fullmatch(text.strip())
    if found is None:
        raise BadArgument(f"--growth: {text!r} is no growth", hint="For example: 40%/y, or 2%/m")
    part = float(found[1]) / 100
    if part <= -1:
        raise BadArgument(f"--growth: {text!r} leaves nothing")
    try:
        return float((1 + part) ** 12 - 1) if found[2] == "m" else part
    except OverflowError:
        raise BadArgument(f"--growth: {text!r} is too much") from None
