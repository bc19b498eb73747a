"""The examples of the how-to pages, as they stand there, print what the pages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.lengths import sampled

ROOT = Path(__file__).parents[2]

# What a reader of the page would do next.
CALLS = """
import asyncio
import httpx

with cluster.at(shard=5).engine.begin() as connection:
    Base.metadata.create_all(connection)
with cluster.session(shard=5) as session, session.begin():
    session.add(Photo(caption="dunes"))
    session.flush()
    made = session.query(Photo.id).scalar()

async def use():
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://photos") as client:
        for id_ in (made, made + 1, made + (9 << 10), -1, "x"):
            answer = await client.get(f"/photos/{id_}")
            print(answer.status_code, answer.text.replace(str(made), "made")[:60])

asyncio.run(use())
cluster.close()
"""

ANSWERS = """
200 {"id":"made","cover_of":null,"caption":"dunes"}
404 {"detail":"there is no such photo"}
404 {"detail":"shard 14 does not exist in this cluster"}
404 {"detail":"ID -1 is negative, but layout 41-12-10@1704067200
422 {"detail":[{"type":"value_error","loc":["path","photo_id"],"
"""


@pytest.mark.parametrize(
    ("page", "more", "printed"),
    sampled(
        [
            ("async", "", "anne\n1000\n"),
            ("ids-in-json", CALLS, ANSWERS),
            ("metrics", "", ""),
            ("load-rows", "", "3,000 rows\nrow 2, shard 5\n"),
            ("moved-shards", "", "ann\n"),
            ("numbers-for-people", "", ""),
            ("paginate", "", ""),
            ("pandas", "", ""),
            ("plan-a-cluster", "", ""),
            ("read-load-from-ids", "", ""),
            ("route-queries", "", ""),
            ("sqlmodel", "", ""),
        ],
        every=3,
    ),
)
def test_the_examples_of_a_page(cluster_url: URL, tmp_path: Path, page: str, more: str, printed: str) -> None:
    source = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    fences = [token for token in MarkdownIt().parse(source) if token.type == "fence"]
    script = tmp_path / "example.py"
    script.write_text("".join(one.content for one in fences if one.info == "python") + more, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={"SHARDIDS_CATALOG": dsn(cluster_url), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stderr == ""
    shown = "".join(one.content for one in fences if one.info == "text")
    assert ran.stdout == shown + printed.lstrip()
