"""The page on adopting tables in place: its commands as they stand there, while clients write."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from markdown_it import MarkdownIt
from psycopg import sql
from sqlalchemy import BigInteger, Column, MetaData, Table, select
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.catalog.rows import Catalog
from shardids.ids.layout import INSTAGRAM
from shardids.pg.sqlfiles import read_sql
from tests.conftest import dsn
from tests.support.clusters import connected

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "adopt-in-place.md"

APPLICATION = """
import os, sys
from sqlalchemy import BigInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from shardids import Cluster

class Base(DeclarativeBase):
    pass

class Photo(Base):
    __tablename__ = "photos"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    caption: Mapped[str]

cluster = Cluster.connect(os.environ["SHARDIDS_CATALOG"])
for photo_id in map(int, sys.argv[1:]):
{lines}
    print(photo.caption, cluster.decode(photo_id).shard)
cluster.close()
"""


def fences(heading: str) -> list[tuple[str, str]]:
    """The fenced blocks of a section of the page, with their languages."""
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    section, found = "", []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open" and before.tag == "h2":
            section = token.content
        if token.type == "fence" and section == heading:
            found.append((token.info, token.content))
    return found


@pytest.fixture
def database(blank_database: Callable[[], URL], make_role: Callable[..., URL]) -> Iterator[tuple[URL, str]]:
    """An empty database, and a role that is called app on the page."""
    url, role = blank_database(), str(make_role("app").username)
    yield url, role
    with connected(url) as connection:
        connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))


def run(url: URL, role: str, language: str, block: str) -> str:
    """Runs a block of the page; ``app`` is the test's role."""
    if language == "sql":
        with psycopg.connect(dsn(url), autocommit=True) as connection:
            connection.execute(block.replace("TO app", f'TO "{role}"').encode())
        return ""
    ran = subprocess.run(
        ["bash", "-ec", block.replace("grant app", f'grant "{role}"')],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SHARDIDS_CATALOG": dsn(url),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_database_with_the_published_function(database: tuple[URL, str], tmp_path: Path) -> None:
    url, role = database
    with connected(url) as connection:
        connection.execute(
            "select set_config('shardids.shard', '5', false), set_config('shardids.schema', 'insta5', false)"
        )
        connection.execute(read_sql("compare/published.v1").encode())
        connection.execute(
            "create table insta5.photos (id bigint primary key default insta5.next_id(), caption text)"
        )
        for kind, name in (
            ("schema", "insta5"),
            ("table", "insta5.photos"),
            ("sequence", "insta5.table_id_seq"),
        ):
            rights = {"schema": "usage", "table": "select, insert", "sequence": "usage"}[kind]
            connection.execute(f'grant {rights} on {kind} {name} to "{role}"'.encode())

        def insert(caption: str) -> int:
            with connection.transaction():
                connection.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
                row = connection.execute(
                    "insert into insta5.photos (caption) values (%s) returning id", [caption]
                ).fetchone()
            assert row is not None
            return int(row[0])

        ids = [insert("old") for _ in range(50)]
        blocks = fences("A database that uses Instagram's function")
        assert [language for language, _ in blocks] == ["sh", "sh", "sql", "python", "sh"]
        for language, block in blocks[:2]:
            printed = run(url, role, language, block)
        ids += [insert("new") for _ in range(50)]
        assert f"highest ID in them: {ids[49]}" in printed
        bound = int(printed.rpartition("new ones are above: ")[2])
        assert ids[49] < bound < ids[50]
        run(url, role, *blocks[2])
        ids += [insert("through the view") for _ in range(50)]
        assert ids == sorted(set(ids))
        assert {INSTAGRAM.shard_of(id_) for id_ in ids} == {5}
    script = tmp_path / "application.py"
    script.write_text(APPLICATION.format(lines=textwrap.indent(blocks[3][1], "    ")))
    ran = subprocess.run(
        [sys.executable, str(script), str(ids[0]), str(ids[60]), str(ids[-1])],
        env={"SHARDIDS_CATALOG": dsn(url), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stderr, ran.stdout) == ("", "old 5\nnew 5\nthrough the view 5\n")
    with connected(url) as connection:
        connection.execute("alter table shard_0005.photos alter id set default insta5.next_id()")
    run(url, role, *blocks[4])
    with connected(url) as connection:
        assert connection.execute("select insta5.next_id() > %s", [max(ids)]).fetchone() == (True,)


def test_a_table_whose_keys_are_integers(database: tuple[URL, str]) -> None:
    url, role = database
    with connected(url) as connection:
        connection.execute(
            """create table orders (id serial primary key, parent integer references orders, note text);
               insert into orders (note) select 'old' from generate_series(1, 1000)"""
        )
        for what in ("schema public", "table orders", "sequence orders_id_seq"):
            rights = "usage" if not what.startswith("table") else "select, insert, update"
            connection.execute(f'grant {rights} on {what} to "{role}"'.encode())

        def insert() -> int:
            with connection.transaction():
                connection.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
                row = connection.execute("insert into orders (parent) values (17) returning id").fetchone()
            assert row is not None
            return int(row[0])

        blocks = fences("A table whose keys are integers")
        assert [language for language, _ in blocks] == ["sh", "sh", "sh"]
        for language, block in blocks[:2]:
            printed = run(url, role, language, block)
        assert "public.orders: bigint" in printed or "orders.id, orders.parent: bigint" in printed
        assert insert() == 1001
        run(url, role, *blocks[2])
        new = insert()
        assert new > 1 << 40
    ((language, rules),) = fences("Tables on one server as shard 0")
    assert language == "python"
    with connected(url) as connection:
        connection.execute("alter table orders set schema shard_0000")
    catalog = Catalog(url)
    exec(rules, {"catalog": catalog})
    catalog.close()
    orders = Table("orders", MetaData(), Column("id", BigInteger, primary_key=True))
    with Cluster.connect(url) as cluster:
        for id_ in (17, new):
            with cluster.session(id=id_, of="orders") as session:
                assert session.scalars(select(orders.c.id).where(orders.c.id == id_)).all() == [id_]
