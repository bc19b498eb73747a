"""The summary of a comparison: its figures, the best at each measure, keys issued twice, schemes left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardids.compare.results import SPREAD, Comparison, Inserts, SchemeResult
from shardids.pg.notation import counted

MISSING = "\N{EN DASH}"
_SMALLEST = 0.001


def three(value: float | None) -> str:
    """Write three significant digits; from 100 on all digits before the point. Never 0 for more than 0."""
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
    """Write a number with k and M for thousands and millions: 412k, 1.20M."""
    if value is None or abs(value) < 10_000:
        return three(value)
    return f"{three(value / 1e6)}M" if abs(value) >= 999_500 else f"{three(value / 1e3)}k"


def duration(seconds: float) -> str:
    """Write a duration in a suitable unit: 45 s, 12 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def sentence(words: str) -> str:
    """Begin the text with a capital letter and end it with a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def listed(words: list[str]) -> str:
    """Join the words with commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


OWN = ("shardids", "shardids-blocks")
"""Returns the names of shardids' own forms among the schemes."""

ONE_OWN = OWN[0]
"""The form that is ranked: a user of one of them has its figures, not the better of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measure that gives one number per scheme, to compare schemes with.

    Attributes:
        label: the measured quantity, with the unit.
        value: returns the number, or ``None`` where it is missing.
        text: writes the number.
        most: whether more is better.
    """

    label: str
    value: Callable[[SchemeResult], float | None]
    text: Callable[[float | None], str] = three
    most: bool = False


def clients_words(count: int) -> str:
    """Return that many clients, in words."""
    return counted(count, "client")


def rows_a_second(count: int) -> Measure:
    """Return the measure of rows inserted and committed one by one, by that many clients."""
    return Measure(
        label=f"Rows/s, {clients_words(count)}",
        value=lambda result: result.inserts.per_s.get(count) if result.inserts else None,
        text=short,
        most=True,
    )


def spread_rows(count: int) -> Measure:
    """Return the measure of rows committed one by one, each in another shard, by that many clients."""
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
"""The measures that rank schemes."""

OF_A_TABLE = (BULK, INDEX, WAL)
"""The measures of a filled table, which can be compared only for the same number of rows."""

ROUGH = (
    "A quick run: its figures are rough, and no more than a hint. Leave --quick out for figures to rely on."
)
"""The remark on a quick run."""
RISKS_TITLE = "Issued none twice in this run, but would under"
"""The title over :func:`risks`."""
MISSING_TITLE = "Left out, and why"
"""The title over :func:`left_out`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best at a measure, and where shardids with ``next_id()`` stands.

    Attributes:
        label: the measure, with its unit.
        name: the best scheme; with "and n more" if others share the figure.
        text: its figure.
        own_text: shardids' figure.
        place: its rank: how many schemes are better, plus one.
        of: how many schemes have the measure.
    """

    label: str
    name: str
    text: str
    own_text: str
    place: int
    of: int


def best_of(comparison: Comparison) -> list[Best]:
    """Return the best scheme at each measure, except measures that shardids or all others lack."""
    return [best for measure in RANKED if (best := _best(comparison, measure)) is not None]


def _best(comparison: Comparison, measure: Measure) -> Best | None:
    # Figures of a smaller table can't be compared: they are shown, but never as the best.
    rows = max((result.storage.rows for result in comparison.schemes if result.storage), default=0)
    found = [
        (value, result.about.name)
        for result in comparison.schemes
        if (value := measure.value(result)) is not None
        and not (measure in OF_A_TABLE and result.storage and result.storage.rows < rows)
    ]
    own_value = next((value for value, name in found if name == ONE_OWN), None)
    if own_value is None or all(name in OWN for _, name in found):
        return None
    pick = max if measure.most else min
    value, name = pick(found, key=lambda pair: pair[0])
    alike = sum(measure.text(other) == measure.text(value) for other, _ in found) - 1
    # Figures that read alike count as equal: they are not more exact than that.
    better = sum(
        (other > own_value if measure.most else other < own_value)
        and measure.text(other) != measure.text(own_value)
        for other, _ in found
    )
    return Best(
        label=measure.label,
        name=f"{name} and {alike} more" if alike else name,
        text=measure.text(value),
        own_text=measure.text(own_value),
        place=better + 1,
        of=len(found),
    )


def verdict(comparison: Comparison) -> str:
    """Say in a sentence how many of the schemes issued a key twice."""
    counted = [result for result in comparison.schemes if result.duplicates]
    if not counted:
        return "No keys were counted for duplicates in this run."
    keys = sum(case.keys for result in counted for case in result.duplicates.values())
    guilty = sum(result.twice > 0 for result in counted)
    found = f"{len(counted) - guilty} issued none twice, {guilty} did" if guilty else "none was issued twice"
    return f"{keys:,} keys of {len(counted)} schemes were checked for duplicates: {found}."


def repeaters(comparison: Comparison) -> list[tuple[str, str]]:
    """Return a title, and the schemes that issued keys twice, with the cases and the numbers of keys."""
    return [
        (
            result.about.title,
            listed([f"{name} ({case.twice:,})" for name, case in result.duplicates.items() if case.twice]),
        )
        for result in comparison.schemes
        if result.twice
    ]


def risks(comparison: Comparison) -> list[tuple[str, str]]:
    """Return a title, and the schemes that issued no key twice in this run, with the events that would."""
    return [
        (result.about.title, result.about.unsafe_under)
        for result in comparison.schemes
        if result.duplicates and not result.twice and result.about.unsafe_under
    ]


def left_out(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Return the missing measures, and why: "scheme, scheme" or "scheme, scheme (measure, measure)"."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, reason in comparison.left_out.items():
        names.setdefault(("", reason), []).append(name)
    for result in comparison.schemes:
        measures: dict[str, list[str]] = {}
        for measure, reason in result.left_out.items():
            measures.setdefault(reason, []).append(measure)
        for reason, of in measures.items():
            names.setdefault((f" ({', '.join(of)})", reason), []).append(result.about.name)
    for (suffix, reason), schemes in names.items():
        yield ", ".join(schemes) + suffix, reason
