"""The tutorial, as a reader would type it."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
INSTALLATION = re.compile(r"python3 -m venv|\. \.venv/bin/activate|pip install")


def test_the_tutorial_shows_what_a_reader_sees(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        text = ""
        for token in MarkdownIt().parse(TUTORIAL.read_text(encoding="utf-8")):
            if token.type == "inline":
                text = token.content
            elif token.type == "fence" and token.info == "python":
                (name,) = re.findall(r"`(\w+\.py)`", text)
                (tmp_path / name).write_text(token.content, encoding="utf-8")
            elif token.type == "fence" and token.info == "console":
                for step in re.split(r"^\$ ", token.content, flags=re.MULTILINE)[1:]:
                    reader.type(*step.split("\n", 1))
        assert reader.commands > 6
    finally:
        reader.type("shardids dev down --remove || true", "...\n")
    assert not (tmp_path / ".shardids").exists()


class Reader:
    """Types commands in a folder, and copies the export that one of them prints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        self.environment |= {"PYTHONPATH": str(TUTORIAL.parents[1]), "PYTHONWARNINGS": "error"}
        self.commands = 0

    def type(self, command: str, expected: str) -> None:
        if INSTALLATION.match(command):
            return
        ran = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        self.commands += 1
        checker = doctest.OutputChecker()
        same = checker.check_output(expected, ran.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert same, f"$ {command}\n{ran.stdout}\n-- instead of --\n{expected}"
        assert ran.returncode == 0
        for name, value in re.findall(r"^export (\w+)='(.*)'$", ran.stdout, flags=re.MULTILINE):
            self.environment[name] = value
