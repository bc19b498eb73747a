"""docs/how-to/reference-tables.md as it stands: its model, its commands, and what its code prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from shardids.pg.embedded import temporary_servers
from tests.support.clusters import COMMAND
from tests.support.moves import two_nodes

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "reference-tables.md"


def test_the_page(tmp_path: Path) -> None:
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    model, code = [one.content for one in tokens if one.type == "fence" and one.info == "python"]
    (printed,) = [one.content for one in tokens if one.type == "fence" and one.info == "text"]
    lines = [line for one in tokens if one.type == "code_block" for line in one.content.splitlines()]
    create, refresh, delete, *looks = lines
    (tmp_path / "shop.py").write_text(model, encoding="utf-8")
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        nodes.catalog.close()

        def run(*words: str) -> str:
            ran = subprocess.run(
                [sys.executable, "-W", "error", *words],
                cwd=tmp_path,
                env={
                    "SHARDIDS_CATALOG": nodes.catalog_url,
                    "PYTHONPATH": f"{ROOT}:{tmp_path}",
                    "PATH": "/usr/bin:/bin",
                },
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            return ran.stdout

        def command(line: str) -> str:
            program, *words = shlex.split(line)
            assert program == "shardids"
            return run("-c", COMMAND, *words)

        assert "is on all nodes" in command(create)
        assert run("-c", code) == printed
        assert command(refresh)
        assert command(delete) == "Deleted row FR of countries\n"
        assert [command(line) != "" for line in looks] == [True] * len(looks)
        with nodes.connected("b") as connection:
            assert connection.execute("select code from shardids_ref.countries").fetchall() == [("DE",)]
