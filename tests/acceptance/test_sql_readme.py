"""sql/README.md: one shard by psql alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from markdown_it import MarkdownIt

from tests.conftest import MakeDatabase, dsn
from tests.support.client_programs import client_folder

FOLDER = Path(__file__).parents[2] / "sql"


def test_psql_alone_makes_a_shard(make_database: MakeDatabase) -> None:
    tokens = MarkdownIt().parse((FOLDER / "README.md").read_text(encoding="utf-8"))
    typed = "".join(token.content for token in tokens if token.type == "fence" and token.info == "sql")
    psql = client_folder(14) / "psql"
    ran = subprocess.run(
        [psql, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", dsn(make_database())],
        input=typed,
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    (ann, *_, born_with_ann), (bob, *_, born_with_bob) = (
        line.split("|") for line in ran.stdout.split("\n") if "|" in line
    )
    assert int(ann) < int(bob)
    assert born_with_ann == born_with_bob == "5"
