"""Rounds, medians, and the tables that are made of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


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
    """A figure over another of the same rounds, and what it is to reach (``None``: nothing promised)."""

    name: str
    value: float
    at_most: float | None

    @property
    def reached(self) -> bool:
        """Whether it is as low as promised."""
        return self.at_most is None or self.value <= self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one benchmark found."""

    title: str
    conditions: str
    measures: tuple[Measure, ...]
    ratios: tuple[Ratio, ...]


Timed = Callable[[], float]
"""Does the work once and returns the figure, in the unit that the measure names."""


def interleaved(cases: Mapping[str, Timed], *, rounds: int, unit: str) -> dict[str, Measure]:
    """Runs the cases in turn, round after round, so that a slow moment of the machine hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in cases}
    with Console(stderr=True).status("") as status:
        for round_ in range(rounds + 1):
            for name, run in cases.items():
                status.update(f"round {round_} of {rounds}: {name}")
                figure = run()
                if round_:  # the first one warms up
                    figures[name].append(figure)
    return {
        name: Measure(
            name=name, unit=unit, median=statistics.median(all_), lowest=min(all_), highest=max(all_)
        )
        for name, all_ in figures.items()
    }


def seconds(work: Callable[[], object]) -> float:
    """How long the work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratio(of: Measure, to: Measure, *, at_most: float | None = None) -> Ratio:
    """The ratio of two medians."""
    return Ratio(name=f"{of.name} / {to.name}", value=of.median / to.median, at_most=at_most)


def show(section: Section) -> None:
    """Prints a section on the terminal."""
    console = Console(soft_wrap=True)
    console.print(f"\n[bold]{section.title}[/]\n{section.conditions}")
    table = Table("", "median", "lowest", "highest", "", box=None, pad_edge=False)
    for m in section.measures:
        table.add_row(m.name, f"{m.median:.3f}", f"{m.lowest:.3f}", f"{m.highest:.3f}", m.unit)
    console.print(table)
    for r in section.ratios:
        wanted = "" if r.at_most is None else f"  (at most {r.at_most:g})"
        mark = "[green]✓[/]" if r.reached else "[red]✗[/]"
        console.print(f"{mark if r.at_most is not None else ' '} {r.name}: {r.value:.2f}{wanted}")


def write(sections: list[Section], machine: str, folder: Path) -> None:
    """Writes ``benchmarks.json`` and ``benchmarks.md`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    value = {"machine": machine, "sections": [asdict(section) for section in sections]}
    (folder / "benchmarks.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    lines = ["# Benchmarks", "", f"Made by `make bench`. {machine}", ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.conditions, ""]
        lines += ["| | median | lowest | highest | |", "| --- | ---: | ---: | ---: | --- |"]
        lines += [
            f"| {m.name} | {m.median:.3f} | {m.lowest:.3f} | {m.highest:.3f} | {m.unit} |"
            for m in section.measures
        ]
        if section.ratios:
            lines += ["", "| ratio | measured | promised |", "| --- | ---: | ---: |"]
            lines += [
                f"| {r.name} | {r.value:.2f} | {'' if r.at_most is None else f'≤ {r.at_most:g}'} |"
                for r in section.ratios
            ]
        lines.append("")
    (folder / "benchmarks.md").write_text("\n".join(lines), encoding="utf-8")
