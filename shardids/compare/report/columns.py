"""The columns of the full tables, the same in a terminal, in Markdown and in the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardids.compare.report.figures import (
    BULK,
    DENSITY,
    DRAW,
    INDEX,
    MANY,
    MISSING,
    TABLE,
    TAIL,
    WAL,
    Measure,
    clients_words,
    rows_a_second,
    short,
    spread_rows,
    three,
)
from shardids.compare.results import CASES, SPREAD, Comparison, Inserts, SchemeResult

NOT_MEASURED = "not measured"
_ALL_ALONG = 0.9
"""The part of the run above which a key's delay could be greater in a longer run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the figure.
        why: what the figure rests on: how many were counted, or why it is missing.
        state: whether it is a promise kept or broken, or missing; empty for a plain figure.
    """

    text: str
    why: str = ""
    state: Literal["", "good", "bad", "missing"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportColumn:
    """A column of figures.

    Attributes:
        heading: the name in a few words, with the unit.
        meaning: the full meaning.
        cell: returns a scheme's figure.
    """

    heading: str
    meaning: str
    cell: Callable[[SchemeResult], Cell]


def reason(result: SchemeResult, *names: str) -> str:
    """Returns why a measure is missing: the first reason noted for any of these measures."""
    return next((result.left_out[name] for name in names if name in result.left_out), NOT_MEASURED)


def clients(found: Iterable[Inserts | None]) -> list[int]:
    """Returns the least and the greatest number of clients that inserted rows."""
    counts = {count for inserts in found if inserts for count in inserts.per_s}
    return sorted({min(counts), max(counts)}) if counts else []


def speed_columns(comparison: Comparison) -> Sequence[ReportColumn]:
    """Returns the columns of speed."""
    many = next((result.draws.many for result in comparison.schemes if result.draws), 0)
    return (
        _figure("draw p50 µs", "a single draw, the median", "draws", DRAW),
        _figure("draw p99 µs", "99 of 100 single draws stay below", "draws", TAIL),
        _figure(f"of {many:,} µs", f"time a key when the client asks for {many:,} at once", "draws", MANY),
        *(_inserts(count) for count in clients(each.inserts for each in comparison.schemes)),
        *(_spread(count) for count in clients(each.spread for each in comparison.schemes)),
        _figure("bulk rows/s", "rows a second, filled in bulk", "storage", BULK),
    )


def size_columns() -> Sequence[ReportColumn]:
    """Returns the columns of size."""
    return (
        ReportColumn(heading="bits", meaning="size of a key", cell=lambda r: Cell(text=str(r.key_bytes * 8))),
        _figure("table B/row", "table, bytes a row", "storage", TABLE),
        _figure("index B/row", "primary key's index, bytes a row", "storage", INDEX),
        _figure("leaf full %", "how full the index's leaf pages are", "storage", DENSITY),
        _figure("WAL B/row", "write-ahead log, bytes a row", "storage", WAL),
    )


def safety_columns() -> Sequence[ReportColumn]:
    """Returns the columns of safety: keys issued twice, and who works without a server."""
    return (
        *(_case(name, meaning) for name, meaning in CASES.items()),
        ReportColumn(
            heading="nodes go on",
            meaning="nodes whose clients drew all they were to draw while a server was dead",
            cell=_outage,
        ),
    )


def order_columns(comparison: Comparison) -> Sequence[ReportColumn]:
    """Returns the columns of order: by the time of the draws, and of rows that answer each other."""
    skews_ms = sorted({one.skew_ms for result in comparison.schemes for one in result.causality})
    return (
        ReportColumn(
            heading="out of order %",
            meaning="pairs of draws, one after the other, whose keys are the wrong way round",
            cell=_out_of_order,
        ),
        ReportColumn(
            heading="late p99 ms",
            meaning="a key is late by the time since a greater one was there; 99 of 100 are less late",
            cell=_late,
        ),
        *(_first(skew_ms) for skew_ms in skews_ms),
        *(_told_first(skew_ms) for skew_ms in skews_ms[-1:]),
    )


def _figure(heading: str, meaning: str, attribute: str, measure: Measure) -> ReportColumn:
    def cell(result: SchemeResult) -> Cell:
        found = measure.value(result)
        if found is None:
            return Cell(text=MISSING, why=reason(result, attribute), state="missing")
        return Cell(text=short(found))

    return ReportColumn(heading=heading, meaning=meaning, cell=cell)


def _inserts(count: int) -> ReportColumn:
    return _figure(
        f"rows/s {clients_words(count)}",
        f"rows a second, inserted and committed one by one by {clients_words(count)}",
        "inserts",
        rows_a_second(count),
    )


def _spread(count: int) -> ReportColumn:
    return _figure(
        f"over {SPREAD} shards, {clients_words(count)}",
        f"the same, each row in another of {SPREAD} shards of one server, by {clients_words(count)}",
        "spread",
        spread_rows(count),
    )


def _case(name: str, meaning: str) -> ReportColumn:
    def cell(result: SchemeResult) -> Cell:
        case = result.duplicates.get(name)
        if case is None:
            return Cell(text=MISSING, why=reason(result, name, "duplicates"), state="missing")
        why = f"{case.keys:,} keys, {case.twice:,} of them issued before"
        if case.refused:
            why += f"; {case.refused:,} draws refused: {case.refusal}"
        return Cell(text=f"{case.twice:,}", why=why, state="bad" if case.twice else "good")

    return ReportColumn(heading=name, meaning=f"keys issued twice while {meaning}", cell=cell)


def _out_of_order(result: SchemeResult) -> Cell:
    if result.order is None:
        return Cell(text=MISSING, why=reason(result, "order"), state="missing")
    return Cell(
        text=three(result.order.out_of_order_percent),
        why=f"of {result.order.pairs:,} pairs of {result.order.keys:,} keys",
    )


def _late(result: SchemeResult) -> Cell:
    if result.order is None:
        return Cell(text=MISSING, why=reason(result, "order"), state="missing")
    all_along = result.order.late_p99_ms > _ALL_ALONG * result.order.lasted_ms
    return Cell(
        text="the run" if all_along else three(result.order.late_p99_ms),
        why=f"at most {three(result.order.late_most_ms)} ms, in a run of {three(result.order.lasted_ms)} ms",
    )


def _first(skew_ms: float) -> ReportColumn:
    def cell(result: SchemeResult) -> Cell:
        found = next((one for one in result.causality if one.skew_ms == skew_ms), None)
        if found is None:
            return Cell(text=MISSING, why=reason(result, "causality"), state="missing")
        return Cell(
            text=_percent(found.first, found.answers), why=f"{found.first:,} of {found.answers:,} answers"
        )

    return ReportColumn(
        heading=f"answers first %, {skew_ms:g} ms",
        meaning="rows of two nodes that answer each other, and sort before what they answer, the clocks"
        f" {skew_ms:g} ms apart",
        cell=cell,
    )


def _told_first(skew_ms: float) -> ReportColumn:
    def cell(result: SchemeResult) -> Cell:
        found = next((one for one in result.causality if one.skew_ms == skew_ms), None)
        if found is None:
            return Cell(text=MISSING, why=reason(result, "causality"), state="missing")
        if found.told is None or found.told_first is None:
            return Cell(text=MISSING, why="its generator can't be told what is answered", state="missing")
        return Cell(
            text=_percent(found.told_first, found.told),
            why=f"{found.told_first:,} of {found.told:,} answers",
            state="bad" if found.told_first else "good",
        )

    return ReportColumn(
        heading="told, %",
        meaning=f"the same, {skew_ms:g} ms apart, by generators that are told the key that is answered",
        cell=cell,
    )


def _percent(part: int, whole: int) -> str:
    return three(100 * part / max(whole, 1))


def _outage(result: SchemeResult) -> Cell:
    outage = result.outage
    if outage is None:
        return Cell(text=MISSING, why=reason(result, "outage"), state="missing")
    going = sum(keys >= outage.tried for keys in outage.keys.values())
    drawn = ", ".join(f"node {node}: {keys:,}" for node, keys in sorted(outage.keys.items()))
    return Cell(
        text=f"{going} of {len(outage.keys)}",
        why=f"killed: {outage.server}; drawn of {outage.tried:,}: {drawn}",
        state="" if going else "bad",
    )
