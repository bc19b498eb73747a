"""The README's examples, as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL

from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from tests.conftest import MakeDatabase, dsn

README = Path(__file__).parents[2] / "README.md"


def fences(language: str) -> list[str]:
    tokens = MarkdownIt().parse(README.read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == language]


@pytest.fixture
def cluster_url(make_database: MakeDatabase) -> URL:
    urls = [make_database(), make_database()]
    catalog = Catalog(urls[0])
    provision.init(catalog, DEFAULT, 8)
    for name, url in zip("ab", urls, strict=True):
        provision.add_node(catalog, name, dsn(url))
    provision.create_shards(catalog, range(8))
    catalog.close()
    return urls[0]


def test_the_python_example_runs(cluster_url: URL, tmp_path: Path) -> None:
    (example,) = fences("python")
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={"SHARDIDS_CATALOG": dsn(cluster_url), "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    first, second = ran.stdout.splitlines()
    assert first == "ann"
    assert "born 20" in second
    assert second.endswith(("now on a", "now on b"))


def test_the_sql_example_runs(db: psycopg.Connection) -> None:
    (example,) = fences("sql")
    statements = [statement for statement in example.split(";") if statement.strip()]
    results = [cursor.fetchall() if (cursor := db.execute(s)).description else [] for s in statements]
    ((user,),) = results[1]
    assert len(results[2]) == 1000
    assert [row[0] for row in results[3]] == [user]
    assert results[4] == [(user, "ann")]


def test_the_decoded_example_is_what_the_command_prints() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from shardids.cli import app; app()", "id", "decode", "382529960780272642"],
        cwd=README.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    printed = [line.rstrip() for line in ran.stdout.splitlines()]
    shown = [line.removeprefix("    ").rstrip() for line in README.read_text(encoding="utf-8").splitlines()]
    start = shown.index("$ shardids id decode 382529960780272642") + 1
    assert shown[start : start + len(printed)] == printed
