"""The README's and the pages' Python, as mypy --strict sees it in a project of the reader's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/how-to/async.md",
    "docs/how-to/ids-in-json.md",
    "docs/how-to/moved-shards.md",
    "docs/how-to/paginate.md",
)


def python_of(page: Path) -> list[tuple[str, str]]:
    """The blocks of Python, each with the last words before it."""
    found, words = [], ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "inline":
            words = token.content
        elif token.type == "fence" and token.info == "python":
            found.append((words, token.content))
    return found


def test_all_of_it_passes_the_strict_checker(tmp_path: Path) -> None:
    for number, page in enumerate(PAGES):
        script = "\n".join(block for _, block in python_of(ROOT / page))
        (tmp_path / f"page_{number}.py").write_text(script, encoding="utf-8")
    for words, block in python_of(ROOT / "docs" / "tutorial.md"):
        (name,) = re.findall(r"`(\w+\.py)`", words)
        (tmp_path / name).write_text(block, encoding="utf-8")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--warn-unused-ignores",
            "--cache-dir",
            str(tmp_path / "cache"),
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
