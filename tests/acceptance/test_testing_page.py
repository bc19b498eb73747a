"""The blocks of ``docs/how-to/test-your-application.md`` are files; the tests among them pass."""

from __future__ import annotations

from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.pytest_runs import run_pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "test-your-application.md"


def test_the_files_of_the_page_are_tests_that_pass(tmp_path: Path) -> None:
    fences = [token for token in MarkdownIt().parse(PAGE.read_text("utf-8")) if token.type == "fence"]
    for fence in fences:
        if fence.info == "python":
            name = fence.content.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(fence.content, "utf-8")
    ran = run_pytest(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "7 passed" in ran.stdout
