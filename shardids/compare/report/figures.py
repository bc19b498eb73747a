"""The figures of a report: the measures by which schemes are compared, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardids.compare.results import SPREAD, Inserts, SchemeResult

MISSING = "\N{EN DASH}"
_SMALLEST = 0.001


def three(value: float | None) -> str:
    """Writes three significant digits; from 100 on all digits before the point. Never 0 for more than 0."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) < _SMALLEST:
        return f"<{_SMALLEST}"
    rounded = float(f"{value:.3g}")
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """Writes a number with k and M for thousands and millions: 412k, 1.20M."""
    if value is None or abs(value) < 10_000:
        return three(value)
    return f"{three(value / 1e6)}M" if abs(value) >= 999_500 else f"{three(value / 1e3)}k"


def duration(seconds: float) -> str:
    """Writes a duration in a suitable unit: 45 s, 12 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def sentence(words: str) -> str:
    """Begins the text with a capital letter and ends it with a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def listed(words: list[str]) -> str:
    """Joins the words with commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


OWN = ("shardids", "shardids-blocks")
"""Returns the names of shardids' own forms among the schemes."""

ONE_OWN = OWN[0]
"""The form that is ranked: who uses one of them has its figures, not the better of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measure that gives one number per scheme, by which schemes can be compared.

    Attributes:
        label: what is measured, with the unit.
        value: returns the number, or ``None`` where it is missing.
        text: writes the number.
        most: whether more is better.
    """

    label: str
    value: Callable[[SchemeResult], float | None]
    text: Callable[[float | None], str] = three
    most: bool = False


def clients_words(count: int) -> str:
    """Returns that many clients, in words."""
    return "1 client" if count == 1 else f"{count} clients"


def rows_a_second(count: int) -> Measure:
    """Returns the measure of rows inserted and committed one by one, by that many clients."""
    return Measure(
        label=f"Rows/s, {clients_words(count)}",
        value=lambda result: result.inserts.per_s.get(count) if result.inserts else None,
        text=short,
        most=True,
    )


def spread_rows(count: int) -> Measure:
    """Returns the measure of rows committed one by one, each in another shard, by that many clients."""
    return Measure(
        label=f"Rows/s over {SPREAD} shards, {clients_words(count)}",
        value=lambda result: result.spread.per_s.get(count) if result.spread else None,
        text=short,
        most=True,
    )


def _of_most_clients(inserts: Inserts | None) -> float | None:
    return inserts.per_s[max(inserts.per_s)] if inserts else None


DRAW = Measure(
    label="A single draw, median µs",
    value=lambda result: result.draws.p50_us if result.draws else None,
)
TAIL = Measure(
    label="A single draw, 99th percentile µs",
    value=lambda result: result.draws.p99_us if result.draws else None,
)
MANY = Measure(
    label="A key of many at once, µs",
    value=lambda result: result.draws.many_us if result.draws else None,
)
SINGLE = Measure(
    label="Rows/s, committed one by one",
    value=lambda result: _of_most_clients(result.inserts),
    text=short,
    most=True,
)
OVER_SHARDS = Measure(
    label=f"Rows/s over {SPREAD} shards, committed one by one",
    value=lambda result: _of_most_clients(result.spread),
    text=short,
    most=True,
)
BULK = Measure(
    label="Rows/s, filled in bulk",
    value=lambda result: result.storage.rows_per_s if result.storage else None,
    text=short,
    most=True,
)
TABLE = Measure(
    label="Table bytes a row",
    value=lambda result: result.storage.table_bytes_per_row if result.storage else None,
)
INDEX = Measure(
    label="Index bytes a row",
    value=lambda result: result.storage.index_bytes_per_row if result.storage else None,
)
DENSITY = Measure(
    label="Leaf pages full, %",
    value=lambda result: result.storage.leaf_density_percent if result.storage else None,
    most=True,
)
ROWS = Measure(
    label="Rows in the table",
    value=lambda result: float(result.storage.rows) if result.storage else None,
    text=lambda value: MISSING if value is None else f"{value:,.0f}",
    most=True,
)
WAL = Measure(
    label="WAL bytes a row",
    value=lambda result: result.storage.wal_bytes_per_row if result.storage else None,
)
DISORDER = Measure(
    label="Pairs out of order, %",
    value=lambda result: result.order.out_of_order_percent if result.order else None,
)
LATE = Measure(
    label="Lateness, 99th percentile ms",
    value=lambda result: result.order.late_p99_ms if result.order else None,
)
FIRST = Measure(
    label="Answers that sort first under the greatest skew, %",
    value=lambda r: 100 * r.causality[-1].first / max(r.causality[-1].answers, 1) if r.causality else None,
)
TOLD = Measure(
    label="The same, if the generator is told what is answered, %",
    value=lambda r: (
        100 * r.causality[-1].told_first / max(r.causality[-1].told or 0, 1)
        if r.causality and r.causality[-1].told_first is not None
        else None
    ),
)
TWICE = Measure(
    label="Ways in which keys came twice",
    value=lambda r: float(sum(case.twice > 0 for case in r.duplicates.values())) if r.duplicates else None,
    text=lambda value: f"{value or 0:.0f}",
)

RANKED = (DRAW, TAIL, MANY, SINGLE, OVER_SHARDS, BULK, INDEX, WAL, DISORDER, LATE)
"""The measures by which schemes are ranked."""

OF_A_TABLE = (BULK, INDEX, WAL)
"""The measures of a filled table, which can be compared only for the same number of rows."""
