"""What can be compared as one number a scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardids.compare.figures import MISSING, short, three
from shardids.compare.results import SchemeResult

OWN = ("shardids", "shardids-blocks")
"""The names of shardids' own forms among the schemes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Something that can be compared as one number a scheme.

    Attributes:
        label: what it is, with the unit.
        value: the number, or ``None`` where it is missing.
        text: how it is written.
        most: whether more is better.
    """

    label: str
    value: Callable[[SchemeResult], float | None]
    text: Callable[[float | None], str] = three
    most: bool = False


def clients_words(count: int) -> str:
    """That many clients, in words."""
    return "1 client" if count == 1 else f"{count} clients"


def rows_a_second(count: int) -> Measure:
    """Rows inserted and committed one by one, by that many clients."""
    return Measure(
        label=f"Rows/s, {clients_words(count)}",
        value=lambda result: result.inserts.per_s.get(count) if result.inserts else None,
        text=short,
        most=True,
    )


def _at_most_clients(result: SchemeResult) -> float | None:
    return result.inserts.per_s[max(result.inserts.per_s)] if result.inserts else None


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
SINGLE = Measure(label="Rows/s, committed one by one", value=_at_most_clients, text=short, most=True)
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
TWICE = Measure(
    label="Ways in which keys came twice",
    value=lambda r: float(sum(case.twice > 0 for case in r.duplicates.values())) if r.duplicates else None,
    text=lambda value: f"{value or 0:.0f}",
)

RANKED = (DRAW, TAIL, MANY, SINGLE, BULK, INDEX, WAL, DISORDER, LATE)
"""Those that schemes are ranked by."""

OF_A_TABLE = (BULK, INDEX, WAL)
"""Those of a table that was filled, which need the same number of rows."""
