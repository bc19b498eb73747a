"""The page on values that are unique over all shards: its code and commands, in their order."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import COMMAND

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "unique-over-shards.md"


def test_the_page(cluster_url: URL, tmp_path: Path) -> None:
    fences = [token for token in MarkdownIt().parse(PAGE.read_text("utf-8")) if token.type == "fence"]
    models, use = (one.content for one in fences if one.info == "python")
    (commands,) = (one.content for one in fences if one.info == "console")
    allowed, _ = (one.content for one in fences if one.info == "sql")
    printed, session = (one.content for one in fences if one.info == "text")
    environment = {**os.environ, "SHARDIDS_CATALOG": dsn(cluster_url), "COLUMNS": "200"}

    def run(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-W", "error", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    script = tmp_path / "models.py"
    script.write_text(models + "cluster.close()\n", encoding="utf-8")
    assert not run(str(script))

    for command in commands.split("$ ")[1:]:
        line, _, answer = command.partition("\n")
        program, *words = shlex.split(line)
        assert program == "shardids"
        assert run("-c", COMMAND, *words) == answer
    script.write_text(models + use, encoding="utf-8")
    assert run(str(script)) == printed
    statement, _, answer = session.removeprefix("=> ").partition("\n")
    with (
        psycopg.connect(dsn(cluster_url), autocommit=True) as connection,
        pytest.raises(psycopg.Error) as refused,
    ):
        connection.execute(statement.encode())
    said = refused.value.diag
    assert answer == f"ERROR:  {said.message_primary}\nHINT:  {said.message_hint}\n"
    with psycopg.connect(dsn(cluster_url), autocommit=True) as connection:
        connection.execute(allowed.encode())
    backfill = ("lookup", "backfill", "users.email")
    assert run("-c", COMMAND, *backfill) == "users.email: 1 of 2 rows in 8 shards were claimed\n"
