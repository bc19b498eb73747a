"""The tables of a comparison and their columns, in a terminal, in Markdown and in the page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Literal

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from shardids.compare.report.advice import advices
from shardids.compare.report.summary import (
    BULK,
    DENSITY,
    DRAW,
    INDEX,
    MANY,
    MISSING,
    MISSING_TITLE,
    OWN,
    RISKS_TITLE,
    ROUGH,
    TABLE,
    TAIL,
    WAL,
    Measure,
    best_of,
    clients_words,
    duration,
    left_out,
    repeaters,
    risks,
    rows_a_second,
    short,
    spread_rows,
    three,
    verdict,
)
from shardids.compare.results import CASES, SPREAD, Comparison, Inserts, SchemeResult

NOT_MEASURED = "not measured"
_ALL_ALONG = 0.9
"""The largest part of the run for a delay of a key; a longer one could be greater in a longer run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the figure.
        why: the basis of the figure: how many were counted, or why it is missing.
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
    """Return why a measure is missing: the first reason noted for any of these measures."""
    return next((result.left_out[name] for name in names if name in result.left_out), NOT_MEASURED)


def clients(found: Iterable[Inserts | None]) -> list[int]:
    """Return the least and the greatest number of clients that inserted rows."""
    counts = {count for inserts in found if inserts for count in inserts.per_s}
    return sorted({min(counts), max(counts)}) if counts else []


def speed_columns(comparison: Comparison) -> Sequence[ReportColumn]:
    """Return the columns of speed."""
    many = next((result.draws.many for result in comparison.schemes if result.draws), 0)
    return (
        _figure("draw p50 µs", "a single draw, the median", "draws", DRAW),
        _figure("draw p99 µs", "99 of 100 single draws stay below", "draws", TAIL),
        _figure(f"of {many:,} µs", f"time a key when the client asks for {many:,} at once", "draws", MANY),
        *(_inserts(count) for count in clients(each.inserts for each in comparison.schemes)),
        *(_spread(count) for count in clients(each.spread for each in comparison.schemes)),
        _figure("bulk rows/s", "rows per second, filled in bulk", "storage", BULK),
    )


def size_columns() -> Sequence[ReportColumn]:
    """Return the columns of size."""
    return (
        ReportColumn(heading="bits", meaning="size of a key", cell=lambda r: Cell(text=str(r.key_bytes * 8))),
        _figure("table B/row", "table, bytes a row", "storage", TABLE),
        _figure("index B/row", "primary key's index, bytes a row", "storage", INDEX),
        _figure("leaf full %", "how full the index's leaf pages are", "storage", DENSITY),
        _figure("WAL B/row", "write-ahead log, bytes a row", "storage", WAL),
    )


def safety_columns() -> Sequence[ReportColumn]:
    """Return the columns of safety: keys issued twice, and who works without a server."""
    return (
        *(_case(name, meaning) for name, meaning in CASES.items()),
        ReportColumn(
            heading="nodes go on",
            meaning="nodes whose clients drew all they were to draw while a server was dead",
            cell=_outage,
        ),
    )


def order_columns(comparison: Comparison) -> Sequence[ReportColumn]:
    """Return the columns of order: by the time of the draws, and of rows that answer each other."""
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
        f"rows per second, inserted and committed one by one by {clients_words(count)}"
        + (" on two nodes, or on the one node of schemes of one server" if count > 1 else ""),
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


_STYLES = {"": "", "good": "green", "bad": "bold red", "missing": "dim"}
_WIDE = 10_000


def print_table(comparison: Comparison, console: Console) -> None:
    """Print speed, size, safety and order, then omissions. Needs a terminal of some 92 columns."""
    for title, columns in _tables(comparison):
        console.print(Text(f"\n{title}", "bold"))
        roomy = _table(comparison.schemes, columns, gap=2)
        fits = _width(roomy) <= console.width
        found = roomy if fits else _table(comparison.schemes, columns, gap=1)
        lines = console.render(found, console.options.update(width=_width(found)))
        console.print(Segments(lines), crop=False, end="")
    console.print(Text(verdict(comparison)))
    for title, cases in repeaters(comparison):
        console.print(Text.assemble("  ", (title, "bold"), f": {cases}"))
    if comparison.conditions.quick:
        console.print(Text(ROUGH, "yellow"))
    missing = list(left_out(comparison))
    if missing:
        console.print(Text(f"\n{MISSING_TITLE}", "bold"))
    for names, reason in missing:
        console.print(Text.assemble("  ", (names, "bold"), f": {reason}"))


def markdown(comparison: Comparison) -> str:
    """Return a page: conditions, summary, tables, omissions with their reasons, each scheme's settings."""
    return "\n\n".join(part for part in _page(comparison) if part) + "\n"


def _tables(comparison: Comparison) -> Sequence[tuple[str, Sequence[ReportColumn]]]:
    return (
        ("Speed", speed_columns(comparison)),
        ("Size", size_columns()),
        ("Safety: keys issued twice, and who goes on without a server", safety_columns()),
        ("Order: by the time of draws, and of rows that answer each other", order_columns(comparison)),
    )


def _table(results: Sequence[SchemeResult], columns: Sequence[ReportColumn], *, gap: int) -> Table:
    """Return a table as narrow as it can be without breaking a name or a number; wraps its headings."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0))
    table.add_column("scheme")
    cells = [[column.cell(result) for column in columns] for result in results]
    for number, column in enumerate(columns):
        words = [*column.heading.split(), *(row[number].text for row in cells)]
        heading = textwrap.fill(column.heading, max(map(len, words)))
        table.add_column(Text(heading), justify="right")
    for result, row in zip(results, cells, strict=True):
        table.add_row(
            Text(result.about.name, "bold" if result.about.name in OWN else ""),
            *(Text(cell.text, _STYLES[cell.state]) for cell in row),
        )
    return table


def _width(table: Table) -> int:
    console = Console(width=_WIDE)
    return console.measure(table).maximum


def _page(comparison: Comparison) -> Iterator[str]:
    conditions = comparison.conditions
    yield "# Key schemes, side by side"
    yield (
        f"Made by `{_line(conditions.command)}` on {conditions.made_at:%Y-%m-%d},"
        f" in {duration(conditions.seconds)}."
        f" {_plain(conditions.machine)}; {_plain(_pairs(conditions.versions))}."
    )
    if conditions.quick:
        yield f"**{ROUGH}**"
    yield _plain(verdict(comparison))
    yield "\n".join(f"- {_plain(title)}: {cases}" for title, cases in repeaters(comparison))
    yield "## Which scheme suits whom"
    for advice in advices(comparison):
        yield f"**{advice.need}**: *{advice.choice}*. {advice.reason}"
        yield "\n".join(
            f"- {figure.label}: " + ", ".join(f"{value.name} {value.text}" for value in figure.values)
            for figure in advice.figures
        )
    yield "## The best at each measure"
    yield _rows(
        ("measure", "best", "", "shardids", "place"),
        [
            (best.label, best.name, best.text, best.own_text, f"{best.place} of {best.of}")
            for best in best_of(comparison)
        ],
    )
    for title, columns in _tables(comparison):
        yield f"## {title}"
        yield _rows(
            ("scheme", *(column.heading for column in columns)),
            [
                (result.about.name, *(column.cell(result).text for column in columns))
                for result in comparison.schemes
            ],
        )
        yield "\n".join(f"- *{column.heading}*: {column.meaning}" for column in columns)
    found = risks(comparison)
    if found:
        yield f"{RISKS_TITLE}:"
        yield "\n".join(f"- {_plain(title)}: {_plain(words)}" for title, words in found)
    yield from _circumstances(comparison)


def _circumstances(comparison: Comparison) -> Iterator[str]:
    conditions = comparison.conditions
    missing = list(left_out(comparison))
    if missing:
        yield f"## {MISSING_TITLE}"
        yield "\n".join(f"- {names}: {_plain(reason)}" for names, reason in missing)
    yield "## The schemes, as they were set up"
    for result in comparison.schemes:
        about = result.about
        yield f"### {_plain(about.title)} (`{about.name}`)"
        yield "\n".join(
            f"- {label}: {_plain(text)}"
            for label, text in (
                ("set up", about.settings),
                ("safe under", about.safe_under),
                ("not under", about.unsafe_under),
                ("stops", about.stops),
                ("a key tells", about.tells),
                ("described at", about.described_at),
                ("checked", _checked(result)),
            )
            if text
        )
    yield "## What was done"
    yield "\n".join(f"- {name}: {_plain(words)}" for name, words in conditions.sizes.items())
    yield "Where keys were counted: " + "; ".join(f"*{name}*: {words}" for name, words in CASES.items()) + "."
    yield "## Servers"
    yield "\n".join(
        f"- {server.count} {_plain(server.kind)} {_plain(server.version)}"
        + (f": {_plain(_pairs(server.settings, '='))}" if server.settings else "")
        for server in conditions.servers
    )


def _checked(result: SchemeResult) -> str:
    return ", ".join(f"{case.keys:,} keys at {name}" for name, case in result.duplicates.items())


def _pairs(of: Mapping[str, str], between: str = " ") -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in of.items())


def _rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        table.add_column(_plain(heading))
    for row in rows:
        table.add_row(*(Text(_plain(text)) for text in row))
    file = StringIO()
    Console(file=file, width=_WIDE, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())


def _plain(text: str) -> str:
    """Escape the text as one line that neither Markdown nor HTML interprets."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", _line(text)).replace("&", "&amp;").replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(text.split())
