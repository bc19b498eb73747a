"""Writes the tables of a comparison, in a terminal or as a page of documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from shardids.compare.report.advice import advices
from shardids.compare.report.columns import (
    ReportColumn,
    order_columns,
    safety_columns,
    size_columns,
    speed_columns,
)
from shardids.compare.report.figures import OWN, duration
from shardids.compare.report.summary import (
    MISSING_TITLE,
    RISKS_TITLE,
    ROUGH,
    best_of,
    left_out,
    repeaters,
    risks,
    verdict,
)
from shardids.compare.results import CASES, Comparison, SchemeResult

_STYLES = {"": "", "good": "green", "bad": "bold red", "missing": "dim"}
_WIDE = 10_000


def print_table(comparison: Comparison, console: Console) -> None:
    """Prints speed, size, safety and order, then what was left out. Needs a terminal of some 92 columns."""
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
    """Returns a page: conditions, summary, tables, what was left out and why, each scheme's settings."""
    return "\n\n".join(part for part in _page(comparison) if part) + "\n"


def _tables(comparison: Comparison) -> Sequence[tuple[str, Sequence[ReportColumn]]]:
    return (
        ("Speed", speed_columns(comparison)),
        ("Size", size_columns()),
        ("Safety: keys issued twice, and who goes on without a server", safety_columns()),
        ("Order: by the time of draws, and of rows that answer each other", order_columns(comparison)),
    )


def _table(results: Sequence[SchemeResult], columns: Sequence[ReportColumn], *, gap: int) -> Table:
    """Returns a table as narrow as it can be without breaking a name or a number; wraps its headings."""
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
    """Escapes the text as one line that neither Markdown nor HTML interprets."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", _line(text)).replace("&", "&amp;").replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(text.split())
