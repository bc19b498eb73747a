"""The README's and the pages' Python, as mypy --strict and pyright see it in a project of the reader's."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAMS = (
    ROOT / "README.md",
    *(
        DOCS / "how-to" / f"{name}.md"
        for name in (
            "async",
            "ids-in-json",
            "load-rows",
            "moved-shards",
            "other-clients",
            "paginate",
            "pandas",
            "route-queries",
            "sqlmodel",
        )
    ),
)
"""Pages whose blocks, one after the other, are a program."""

READERS = ("pages", "tutorial", "shop", "adopted", "operated", "fullstack", "tested")
"""Folders of programs in which the checkers find nothing."""

BESIDE = """
import asyncio
from uuid import UUID

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Engine, ForeignKey, Uuid, collate, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import shardids
from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.catalog.rows import Catalog
from shardids.migrate import key_column

url = "postgresql://host/database"
cluster, catalog, engine = Cluster.connect(url), Catalog(url), create_engine(url)
user_id = photo_id = 382529960780272642


class Base(DeclarativeBase):
    pass


def work(session: Session) -> None:
    session.commit()


"""
USER = """
class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    age: Mapped[int]
    balance: Mapped[int]


"""
PHOTO = """
class Photo(Base):
    __tablename__ = "photos"
    id: Mapped[int] = primary_key()


"""
ASYNC = "async def use(cluster: AsyncCluster) -> None:\n"
FRAGMENTS = {
    "index": BESIDE,
    "how-to/adopt-in-place": BESIDE + PHOTO,
    "how-to/commit-on-two-nodes": BESIDE + USER,
    "how-to/migrate": BESIDE,
    "how-to/old-ids": BESIDE,
    "how-to/pgbouncer": BESIDE,
    "how-to/query-all-shards": BESIDE + USER,
}
"""Pages whose blocks stand alone, but for classes in front of them, and what their text takes for granted."""

MISTAKES = """
from sqlalchemy import select, union
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from shardids import AsyncCluster, Cluster, PageQuery, primary_key

class Base(DeclarativeBase):
    pass

class Photo(Base):
    __tablename__ = "photos"
    id: Mapped[int] = primary_key()

class Ours(Session):
    pass

def one(session: Session) -> int:
    return 1

def of_ours(session: Ours) -> int:
    return 1

async def later(session: AsyncSession) -> int:
    return 1

async def use(cluster: Cluster, photos: AsyncCluster) -> None:
    cluster.session()  # call-overload reportCallIssue
    cluster.session(nokey=1)  # call-overload reportCallIssue
    cluster.session(shard=5, nokey=1)  # call-overload reportCallIssue
    cluster.session(key="ann", id=5)  # call-overload reportCallIssue
    cluster.session(key=1.5)  # call-overload reportArgumentType
    cluster.session(lookup="no")  # call-overload reportArgumentType
    cluster.session(class_=Ours, kee=1)  # call-overload reportCallIssue
    cluster.session(id=5, region="eu")  # call-overload reportCallIssue
    cluster.at()  # call-overload reportCallIssue
    cluster.at(key="ann", shard=5).engine  # call-overload reportCallIssue
    cluster.at(shard=5).session(nokey=1)  # call-overload reportCallIssue
    cluster.at(shard=5).session(class_=Photo)  # type-var reportArgumentType
    cluster.sharded_session(nokey=1)  # call-overload reportCallIssue
    cluster.sharded_session(fan_out="refuse")  # call-overload reportArgumentType
    cluster.at(shard=5).run(one, nokey=1)  # call-overload reportCallIssue
    cluster.at(shard=5).run(of_ours)  # arg-type reportArgumentType
    cluster.copy(Photo, [], nokey=1)  # call-arg reportCallIssue
    photos.session(nokey=1)  # call-overload reportCallIssue
    photos.session()  # call-overload reportCallIssue
    photos.sharded_session(nokey=1)  # call-overload reportCallIssue
    await photos.at(shard=5).run(later, nokey=1)  # call-overload reportCallIssue
    await photos.at(shard=5).run(one)  # arg-type reportArgumentType
    session: int = cluster.session(shard=5)  # assignment reportAssignmentType
    photo: Photo = cluster.sharded_session().get(Photo, 5)  # assignment reportAssignmentType
    query = PageQuery(select(Photo), Photo.id, limit=20)
    page = query.page(cluster.session(shard=5).scalars(query.statement))
    caption: str = page.items[0].caption  # attr-defined reportAttributeAccessIssue
    wrong: list[Session] = page.items  # assignment reportAssignmentType
    PageQuery(union(select(Photo)), Photo.id, limit=20)  # type-var reportArgumentType
    cluster.session(id=5, of=Photo, after=7)
    cluster.session(key="ann", region="eu")
    cluster.session(lookup=Photo.id == 5)
    cluster.at(shard=5).session(autoflush=False)
    ours: Ours = cluster.at(shard=5).session(class_=Ours)
    number: int = cluster.at(shard=5).run(of_ours, class_=Ours)
    there: int = (await photos.at(lookup=Photo.id == 5)).number
"""
"""Beside each mistake what mypy and pyright call it; the other lines are right."""


def python_of(page: Path) -> list[tuple[str, str]]:
    """The blocks of Python, each with the last words before it."""
    found, words = [], ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "inline":
            words = token.content
        elif token.type == "fence" and token.info == "python":
            found.append((words, token.content))
    return found


def write_programs(tutorial: Path, folder: Path) -> None:
    for words, block in python_of(tutorial):
        (name,) = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE) or re.findall(r"`([\w/]+\.py)`", words)
        (folder / name).write_text(block, encoding="utf-8")


def write_fragments(page: str, beside: str, folder: Path) -> None:
    for number, (_, block) in enumerate(python_of(DOCS / f"{page}.md")):
        is_async = re.search(r"\b(await|async with)\b", block)
        code = ASYNC + indent(block, "    ") if is_async else block
        script = folder / f"{page.rpartition('/')[2].replace('-', '_')}_{number}.py"
        script.write_text(beside + code, encoding="utf-8")
        if block.startswith("class "):
            beside += block


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Projects of readers, who have followed one page or tutorial each."""
    root = tmp_path_factory.mktemp("documents")
    made = {name: root / name for name in (*READERS, "mistakes")}
    for name in ("shop", "adopted"):
        shutil.copytree(ROOT / "examples" / "shop", made[name])
    for folder in made.values():
        folder.mkdir(exist_ok=True)
    for page in PROGRAMS:
        script = "\n".join(block for _, block in python_of(page))
        (made["pages"] / f"page_{page.stem.replace('-', '_')}.py").write_text(script, encoding="utf-8")
    for name, beside in FRAGMENTS.items():
        write_fragments(name, beside, made["pages"])
    write_programs(DOCS / "tutorial.md", made["tutorial"])
    (made["adopted"] / "migrations" / "versions").mkdir(parents=True)
    write_programs(DOCS / "tutorial-adopt.md", made["adopted"])
    shutil.copy(ROOT / "examples" / "standby.py", made["operated"])
    write_programs(DOCS / "tutorial-operate.md", made["operated"])
    write_programs(DOCS / "how-to" / "test-your-application.md", made["tested"])
    shutil.copytree(ROOT / "examples" / "fullstack", made["fullstack"] / "fullstack")
    (made["mistakes"] / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    return made


def expected(column: int) -> dict[int, str]:
    """What a checker calls the mistakes, by line."""
    marked = (line.partition("#")[2].split() for line in MISTAKES.splitlines())
    return {number: words[column] for number, words in enumerate(marked, start=1) if words}


@pytest.mark.parametrize("name", READERS)
def test_documents_pass_mypy(folders: dict[str, Path], name: str) -> None:
    ran = mypy(folders[name])
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_mypy_finds_mistakes(folders: dict[str, Path]) -> None:
    ran = mypy(folders["mistakes"])
    found = re.findall(r"^mistakes\.py:(\d+): error: .* \[([\w-]+)\]$", ran.stdout, re.MULTILINE)
    assert {int(line): rule for line, rule in found} == expected(0), ran.stdout


def mypy(folder: Path) -> subprocess.CompletedProcess[str]:
    """Strict, by the settings of `make lint`: under others, what that has read would be read again."""
    cache = ROOT / ".mypy_cache"
    cache.mkdir(exist_ok=True)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache)]
    # Folders have modules of the same names: workers take turns in the cache.
    with (cache / "documents.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run(
            [sys.executable, "-m", "mypy", *options, "."],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.mark.long
def test_pyright_passes_documents_and_finds_mistakes(folders: dict[str, Path]) -> None:
    root = folders["pages"].parent
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for one in pyright(root, folders):
        path = Path(one["file"]).relative_to(root)
        found[str(path)][one["range"]["start"]["line"] + 1] = one.get("rule", one["message"])
    assert found.pop("mistakes/mistakes.py") == expected(1)
    assert found == {}


def pyright(root: Path, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """All folders in one process: what it costs is to read SQLAlchemy."""
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT)],
        "executionEnvironments": [{"root": name, "extraPaths": [str(ROOT)]} for name in folders],
    }
    (root / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    ran = subprocess.run(
        # From the wheels of basedpyright and Node.js: nothing is fetched.
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--pythonpath",
            sys.executable,
            "--outputjson",
            "-p",
            str(root),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.stdout, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] >= 30
    return [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
