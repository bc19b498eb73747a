"""Rounds, medians, and the tables that are made of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import rich.table
from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure: its median over the rounds, with the lowest and the highest."""

    name: str
    unit: str
    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A figure, mostly one over another of the same rounds, and what it is to reach, if anything."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def promised(self) -> str:
        """Returns the limit, as a report shows it."""
        limits = (("≤", self.at_most), ("≥", self.at_least))
        return ", ".join(f"{sign} {limit:.3g}" for sign, limit in limits if limit is not None)

    @property
    def reached(self) -> bool:
        """Returns whether it is within what is promised."""
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures that were taken once, or are shown without their spread: a row a case; units in the columns."""

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one benchmark found."""

    title: str
    conditions: str
    measures: tuple[Measure, ...] = ()
    table: Table | None = None
    ratios: tuple[Ratio, ...] = ()


LEAST_WIDTH = 200

Case = TypeVar("Case")
Found = TypeVar("Found")
Timed = Callable[[], float]
"""Does the work once and returns the figure, in the unit that the measure names."""


def interleaved(cases: Mapping[str, Timed], *, rounds: int, unit: str) -> dict[str, Measure]:
    """Run the cases in turn, round after round, so that a slow moment of the machine hits all alike."""
    return {
        name: Measure(
            name=name, unit=unit, median=statistics.median(all_), lowest=min(all_), highest=max(all_)
        )
        for name, all_ in rounds_of(cases, rounds=rounds).items()
    }


def rounds_of(cases: Mapping[Case, Callable[[], Found]], *, rounds: int) -> dict[Case, list[Found]]:
    """Run the cases in turn, as :func:`interleaved` does; return what each round of each found."""
    found: dict[Case, list[Found]] = {case: [] for case in cases}
    with Console(stderr=True).status("") as status:
        for round_ in range(rounds + 1):
            for case, run in cases.items():
                status.update(f"round {round_} of {rounds}: {case}")
                result = run()
                if round_:  # the first one warms up
                    found[case].append(result)
    return found


def seconds(work: Callable[[], object]) -> float:
    """Return how long the work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratio(of: Measure, to: Measure, *, at_most: float | None = None) -> Ratio:
    """Return the ratio of two medians."""
    return Ratio(name=f"{of.name} / {to.name}", value=of.median / to.median, at_most=at_most)


def figure(name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> Ratio:
    """Return a figure that is not a ratio of two medians of :func:`interleaved`."""
    return Ratio(name=name, value=value, at_most=at_most, at_least=at_least)


def show(section: Section) -> None:
    """Print a section on the terminal."""
    console = Console(soft_wrap=True)
    # A table of many columns is cut off otherwise.
    console.width = max(console.width, LEAST_WIDTH)
    console.print(f"\n[bold]{section.title}[/]\n{section.conditions}")
    for header, rows in _grids(section):
        grid = rich.table.Table(box=None, pad_edge=False)
        for column in header:
            grid.add_column(column, no_wrap=True)
        for row in rows:
            grid.add_row(*row)
        console.print(grid)
    for r in section.ratios:
        wanted = f"  ({r.promised})" if r.promised else ""
        mark = "[green]✓[/]" if r.reached else "[red]✗[/]"
        console.print(f"{mark if wanted else ' '} {r.name}: {r.value:.2f}{wanted}")


def write(measured: Sequence[Section], machine: str, folder: Path) -> None:
    """Write ``benchmarks.json`` and ``benchmarks.md`` into a folder.

    Sections that are there under other titles stay as they are, and keep their places.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sections = merged(_read(folder / "benchmarks.json"), measured)
    value = {"machine": machine, "sections": [asdict(section) for section in sections]}
    (folder / "benchmarks.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    lines = ["# Benchmarks", "", f"Made by `make bench`. {machine}", ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.conditions, ""]
        for header, rows in _grids(section):
            lines += [*_markdown(header, rows), ""]
        if section.ratios:
            rows = [(r.name, f"{r.value:.2f}", r.promised) for r in section.ratios]
            lines += [*_markdown(("", "measured", "promised"), rows), ""]
    (folder / "benchmarks.md").write_text("\n".join(lines), encoding="utf-8")


def merged(there: Sequence[Section], measured: Sequence[Section]) -> list[Section]:
    """Return the sections that are there, with those that were measured again in place of the old ones."""
    new = {section.title: section for section in measured}
    kept = [new.pop(section.title, section) for section in there]
    return [*kept, *new.values()]


def _read(file: Path) -> list[Section]:
    if not file.exists():
        return []
    return [
        Section(
            title=section["title"],
            conditions=section["conditions"],
            measures=tuple(Measure(**measure) for measure in section["measures"]),
            table=section["table"] and Table(**section["table"]),
            ratios=tuple(Ratio(**ratio) for ratio in section["ratios"]),
        )
        for section in json.loads(file.read_text(encoding="utf-8"))["sections"]
    ]


Rows = list[tuple[str, ...]]


def _grids(section: Section) -> Iterator[tuple[tuple[str, ...], Rows]]:
    """Return the section's tables as text, each with its header."""
    if section.measures:
        yield (
            ("", "median", "lowest", "highest", ""),
            [
                (m.name, f"{m.median:.3f}", f"{m.lowest:.3f}", f"{m.highest:.3f}", m.unit)
                for m in section.measures
            ],
        )
    if section.table:
        rows = section.table.rows
        yield (
            ("", *section.table.columns),
            [(name, *map(_shown, figures)) for name, figures in rows.items()],
        )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.4g}"


def _markdown(header: tuple[str, ...], rows: Rows) -> list[str]:
    marks = ["---"] + ["---:" if cell or index < 4 else "---" for index, cell in enumerate(header[1:], 1)]
    return [f"| {' | '.join(row)} |" for row in (header, marks, *rows)]
