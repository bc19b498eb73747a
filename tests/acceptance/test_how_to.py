"""The examples of the how-to pages, as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL

from tests.conftest import dsn

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "printed"), [("async.md", ["anne", "1000"]), ("moved-shards.md", ["ann"])])
def test_the_example_runs(page: str, printed: list[str], cluster_url: URL) -> None:
    tokens = MarkdownIt().parse((ROOT / "docs/how-to" / page).read_text(encoding="utf-8"))
    (example,) = (token.content for token in tokens if token.type == "fence" and token.info == "python")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        env={"SHARDIDS_CATALOG": dsn(cluster_url), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert ran.stdout.splitlines() == printed
