"""The report of the benchmarks: what was measured again replaces what is there."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Measure, Section, Table, figure, write

MEASURE = Measure(name="m", unit="s", median=1.0, lowest=0.5, highest=2.0)


def test_sections_are_replaced_by_title(tmp_path: Path) -> None:
    first = Section(title="A", conditions="old", measures=(MEASURE,), ratios=(figure("r", 2, at_most=1),))
    second = Section(title="B", conditions="stays", table=Table(columns=("c",), rows={"x": (1.0, 2.0)}))
    write([first, second], "machine", tmp_path)
    before = (tmp_path / "benchmarks.md").read_text("utf-8")
    write([Section(title="A", conditions="new"), Section(title="C", conditions="last")], "machine", tmp_path)
    text = (tmp_path / "benchmarks.md").read_text("utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## A", "## B", "## C"]
    assert "old" not in text
    assert text[text.index("## B") : text.index("## C")].strip() in before
