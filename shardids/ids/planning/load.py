"""A future load, the capacity of a node, and the notation of both."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Final

from shardids.errors import BadArgument

_DAYS_A_YEAR: Final = 365.2425
SECONDS_A_YEAR: Final = _DAYS_A_YEAR * 86_400
KEY_INDEX_BYTES: Final = 22.5
"""Bytes of a row in the index of a bigint key, as docs/comparison.md publishes them."""

_NUMBER: Final = re.compile(r"((?:[0-9]{1,3}(?:[_,][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\s*([kMGT]?)")
_SCALE: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_GROWTH: Final = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)%(?:/(y|m))?")
_PEAK: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)x?")
_KEEP: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dy])")
_LARGEST: Final = 1e18
_STEEP: Final = 100.0
_MOST_YEARS: Final = 1000
_MOST_GROWTH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a cluster.

    Attributes:
        ids_per_second: the mean today; each is a row.
        peak: the load of the busiest second, as a multiple of the mean.
        years: the number of years to plan for.
        growth: the growth of the mean per year: 0.4 is 40 %. Below zero it shrinks, above -1.
        rows: the number of existing rows.
        row_bytes: the bytes of a row on disk, without the index of its key.
        keep_years: the age in years at which a row is deleted; None: never. Existing rows are taken to have
            come within this time, with the same growth.

    Raises:
        BadArgument: a number that is not finite or out of range; the message names it.
    """

    ids_per_second: float
    peak: float = 1.0
    years: float = 10.0
    growth: float = 0.0
    rows: float = 0.0
    row_bytes: float = 200.0
    keep_years: float | None = None

    def __post_init__(self) -> None:
        _check(self, "ids_per_second", 0, above=True)
        _check(self, "peak", 1)
        _check(self, "years", 0, above=True, highest=_MOST_YEARS)
        _check(self, "growth", -1, above=True, highest=_MOST_GROWTH)
        _check(self, "rows", 0)
        _check(self, "row_bytes", 0, above=True)
        if self.keep_years is not None:
            _check(self, "keep_years", 0, above=True, highest=_MOST_YEARS)

    def rate(self, year: float) -> float:
        """Return the mean IDs per second after so many years."""
        try:
            return self.ids_per_second * math.exp(math.log1p(self.growth) * year)
        except OverflowError:
            return math.inf

    def peak_rate(self, year: float) -> float:
        """Return the IDs of the busiest second after so many years."""
        return self.rate(year) * self.peak

    def most(self) -> float:
        """Return the IDs of the busiest second until the end."""
        return max(self.peak_rate(0), self.peak_rate(self.years))

    def rows_after(self, year: float) -> float:
        """Return how many rows there are after so many years.

        Without ``keep_years`` they only rise. With it they only rise, or only fall, until ``keep_years``, and
        so from then on.
        """
        keep = math.inf if self.keep_years is None else self.keep_years
        try:
            if year < keep:
                return self.rows * self._part_left(year) + self._born(year)
            # A later time is the same with another rate.
            return self._born(keep) * self.rate(year - keep) / self.ids_per_second
        except OverflowError:
            return math.inf

    def _born(self, years: float) -> float:
        """Return the rows of the first so many years."""
        return self.ids_per_second * SECONDS_A_YEAR * years * _mean(math.log1p(self.growth) * years)

    def _part_left(self, year: float) -> float:
        """Return the remaining share of the existing rows; they leave in the order of their arrival."""
        if self.keep_years is None:
            return 1.0
        fall, left = -math.log1p(self.growth), self.keep_years - year
        if fall * self.keep_years > _STEEP:
            return math.exp(-fall * year)
        return left * _mean(fall * left) / (self.keep_years * _mean(fall * self.keep_years))

    def bytes_after(self, year: float) -> float:
        """Return the bytes of rows and of the index of their key."""
        return self.rows_after(year) * (self.row_bytes + KEY_INDEX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The capacity of a node.

    Attributes:
        rows_per_second: rows that it commits; measure yours. docs/benchmarks.md has some 12,000 on two cores.
        disk: its bytes; the node counts as full when the share ``fill`` of them is used.
        connections: how many it accepts, and ``latency_ms`` for how long a row has one.

    Raises:
        BadArgument: a number that is not finite or out of range; the message names it.
    """

    rows_per_second: float = 10_000.0
    disk: float = 2e12
    fill: float = 0.8
    connections: float = 400.0
    latency_ms: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(self, field.name, 0, above=True, highest=1 if field.name == "fill" else _LARGEST)

    def parts(self, load: Load, year: float) -> dict[str, float]:
        """Return how many nodes rows per second, disk and connections take after so many years."""
        return {
            "rows per second": load.peak_rate(year) / self.rows_per_second,
            "disk": load.bytes_after(year) / (self.disk * self.fill),
            "connections": load.peak_rate(year) * self.latency_ms / 1000 / self.connections,
        }


def _mean(rise: float) -> float:
    """Return the mean of exp(x) for x from 0 to ``rise``."""
    return math.expm1(rise) / rise if rise else 1.0


def _check(of: object, name: str, lowest: float, *, above: bool = False, highest: float = _LARGEST) -> None:
    value = getattr(of, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadArgument(f"{name} must be a number, not {type(value).__name__}")
    # Of an integer that no float can hold, too.
    if not (lowest <= value <= highest) or (above and value == lowest):
        least = f"above {lowest:g}" if above else f"at least {lowest:g}"
        given = f"{value:g}" if isinstance(value, float) or abs(value) < 1e300 else "that"
        raise BadArgument(f"{name} must be {least} and at most {highest:g}, not {given}")


def parse_number(what: str, text: str, unit: str = "") -> float:
    """Parse ``50000``, ``50,000``, ``50_000``, ``50k``; with a unit of ``B`` also ``2TB``. Powers of 1,000.

    Raises:
        BadArgument: another form; the message starts with ``what``.
    """
    found = _NUMBER.fullmatch(text.strip().removesuffix(unit) if unit else text.strip())
    if found is None:
        example = "2TB" if unit else "50000 or 50k"
        raise BadArgument(f"{what}: {text!r} is not a valid number", hint=f"For example: {example}")
    return float(re.sub("[_,]", "", found[1])) * _SCALE[found[2]]


def parse_peak(text: str) -> float:
    """Parse how many times the mean the busiest second is: ``8x``.

    Raises:
        BadArgument: another form.
    """
    found = _PEAK.fullmatch(text.strip())
    if found is None:
        raise BadArgument(f"--peak: {text!r} is not a multiple of the mean", hint="For example: 8x")
    return float(found[1])


def parse_growth(text: str) -> float:
    """Parse ``40%/y``, or ``2%/m`` as what becomes of it in a year; return 0.4 for the first.

    Raises:
        BadArgument: another form, one that leaves nothing, or one of more than 10,000 % a year.
    """
    found = _GROWTH.fullmatch(text.strip())
    if found is None:
        raise BadArgument(f"--growth: {text!r} is not a rate of growth", hint="For example: 40%/y, or 2%/m")
    part = float(found[1]) / 100
    if part <= -1:
        raise BadArgument(f"--growth: {text!r} leaves no load")
    try:
        a_year = float((1 + part) ** 12 - 1) if found[2] == "m" else part
    except OverflowError:
        a_year = math.inf
    if a_year <= -1:
        raise BadArgument(f"--growth: {text!r} leaves no load after a year")
    if a_year > _MOST_GROWTH:
        raise BadArgument(f"--growth: {text!r} is more than the limit of {_MOST_GROWTH:,.0%} per year")
    return a_year


def parse_keep(text: str) -> float:
    """Parse for how long a row is kept, ``90d`` or ``2y``; return years.

    Raises:
        BadArgument: another form, no time, or more than a thousand years.
    """
    found = _KEEP.fullmatch(text.strip())
    if found is None:
        raise BadArgument(f"--keep: {text!r} is not a duration", hint="For example: 90d, or 2y")
    years = float(found[1]) / (_DAYS_A_YEAR if found[2] == "d" else 1)
    if not 0 < years <= _MOST_YEARS:
        raise BadArgument(f"--keep: {text!r} must be above 0 and at most {_MOST_YEARS:,} years")
    return years
