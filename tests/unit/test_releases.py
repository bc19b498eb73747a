"""Released versions are frozen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.releases import REVISIONS, changed_since_release, is_released, release


@pytest.mark.parametrize("version", REVISIONS)
def test_nothing_of_a_released_version_has_changed(version: str) -> None:
    assert changed_since_release(version) == [], "A change needs a new SQL file and a revision"


def test_a_version_that_the_changelog_dates_is_frozen() -> None:
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in REVISIONS:
        released = rf"^## \[?{re.escape(version)}\.0\b.*[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}"
        dated = re.search(released, changelog, re.MULTILINE)
        assert not dated or is_released(version), f"python -m tests.releases {version} --release"


def test_changes_after_a_release_are_found(tmp_path: Path) -> None:
    sql = tmp_path / "sql" / "engine"
    sql.mkdir(parents=True)
    for path in (tmp_path / "9.9" / "database.sql", sql / "a.v1.sql", sql / "b.v1.sql"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("select 1")
    found = {"folder": tmp_path, "sql": tmp_path / "sql"}
    (sql / "a.v1.sql").write_text("select 2")
    assert changed_since_release("9.9", **found) == []
    release("9.9", **found)
    assert changed_since_release("9.9", **found) == []
    (sql / "a.v1.sql").write_text("select 3")
    (sql / "b.v1.sql").unlink()
    (sql / "a.v2.sql").write_text("select 4")
    (tmp_path / "9.9" / "database.sql").write_text("")
    assert changed_since_release("9.9", **found) == ["database.sql", "engine/a.v1.sql", "engine/b.v1.sql"]
