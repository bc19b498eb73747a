"""The tutorials, as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from shardids.pg.embedded import EmbeddedServer
from tests.support.lengths import long

ROOT = Path(__file__).parents[2]
INSTALLATION = re.compile(r"python3 -m venv|\. \.venv/bin/activate|pip install")
EXPORTS = re.compile(r"^export (\w+)=")
READER = "/home/ann/trial"
"""The folder of the reader of a page, as the page prints it."""
VARIES = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])|\?|\d[\d.,]*\d( bytes| [kMG]?B)?|\d( bytes| [kMG]?B)|[ \t]+"
    r"|(?<=table public\.)\w+(?= was taken)"
)
"""Parts that differ from run to run: revisions, times, ports, IDs, sizes, the width of columns, and the table
that a program meets first."""


@pytest.mark.parametrize(
    "page",
    ["tutorial", long("tutorial-adopt"), long("tutorial-operate")],
)
def test_a_tutorial_shows_what_a_reader_sees(tmp_path: Path, page: str) -> None:
    (tmp_path / "shardids").symlink_to(ROOT)
    reader = Reader(tmp_path)
    try:
        text = ""
        for token in MarkdownIt().parse((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
            if token.type == "inline":
                text = token.content
            elif token.type == "fence" and token.info == "python":
                (name,) = re.findall(r"`([\w/]+\.py)`", text)
                (tmp_path / name).write_text(token.content, encoding="utf-8")
            elif token.type == "fence" and token.info == "console":
                for step in re.split(r"^\$ ", token.content, flags=re.MULTILINE)[1:]:
                    reader.type(*step.split("\n", 1))
        assert reader.commands > 6
    finally:
        (tmp_path / "stop").touch()
        if (tmp_path / "standby" / "server.json").exists():
            EmbeddedServer.open(tmp_path / "standby").remove()
        for folder in (".shardids", "old"):
            reader.type(f"shardids dev down --remove --yes --dir {folder} || true")
    assert not (tmp_path / ".shardids").exists()
    assert not (tmp_path / "old").exists()


def masked(output: str) -> list[str]:
    """Return the lines of an output without the parts that vary; whole numbers below ten stay."""
    return [VARIES.sub("#", line.strip()) for line in output.strip().splitlines()]


class Reader:
    """Types commands in a folder, and copies the exports that they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        # As for a reader who saves the output: its tables are not folded.
        self.environment.pop("COLUMNS", None)
        # Programs of a page may leave their pool of connections to the end of the process.
        self.environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error,ignore::ResourceWarning"}
        self.commands = 0

    def type(self, command: str, expected: str | None = None) -> None:
        if INSTALLATION.match(command):
            return
        exported = EXPORTS.match(command)
        ran = subprocess.run(
            ["sh", "-c", f'{command}; echo "${exported[1]}"' if exported else command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        self.commands += 1
        if exported:
            self.environment[exported[1]] = ran.stdout.strip()
        if exported or expected is None:
            return
        shown = ran.stdout.replace(str(self.folder), READER)
        # A how-to leaves parts out.
        same = OutputChecker().check_output(expected, shown, ELLIPSIS | NORMALIZE_WHITESPACE)
        same = same or masked(shown) == masked(expected)
        assert same, f"$ {command}\n{shown}\n-- instead of --\n{expected}"
        assert ran.returncode == 0
        for name, value in re.findall(r"^export (\w+)='(.*)'$", ran.stdout, flags=re.MULTILINE):
            self.environment[name] = value
