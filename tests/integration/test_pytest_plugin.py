"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import ROOT, environment
from tests.support.pytest_runs import run_pytest

MODELS = """
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
import shardids

class Base(DeclarativeBase):
    pass

class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = shardids.primary_key()
    name: Mapped[str] = shardids.sharding_key(unique=True)
"""
CONFTEST = """
import pytest
from models import Base

@pytest.fixture(scope="session")
def shard_metadata():
    return Base.metadata
"""
TESTS = """
import os
import pytest
from models import User
from shardids import ShardidsError
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

NAMES = ["ann", "bob", "cy", "dee", "eve", "fay", "gus", "hal"]

def count(session):
    return len(session.scalars(select(User)).all())

@pytest.mark.parametrize("run", range(4))
def test_each_test_finds_nothing_of_the_others(shard_cluster, shard_session, run):
    assert count(shard_session) == 0
    shard_session.add_all([User(name=name) for name in NAMES])
    shard_session.commit()
    nodes = {shard_cluster.node_of(shard_cluster.shard_for(name)).name for name in NAMES}
    assert nodes == {"a", "b"}
    assert count(shard_session) == 8
    shard_session.add(User(name="ian"))
    shard_session.flush()
    shard_session.rollback()
    assert count(shard_session) == 8
    shard_session.add(User(name="ann"))
    with pytest.raises(IntegrityError):
        shard_session.commit()
    shard_session.rollback()
    found = shard_session.scalars(select(User).where(User.name == "ann")).one()
    assert shard_cluster.shard_of(found.id) == shard_cluster.shard_for("ann")
    assert shard_session.get(User, found.id) is found
    shard_session.delete(found)
    shard_session.commit()
    assert count(shard_session) == 7
    with shard_cluster.sharded_session() as other:
        assert count(other) == 7

def test_the_cluster_is_as_asked(shard_cluster):
    assert shard_cluster.shard_count == 4
    assert len(shard_cluster.placement.nodes) == 2

def test_a_failed_test_is_rolled_back_too(shard_session):
    shard_session.add_all([User(name=name) for name in NAMES])
    shard_session.commit()
    if os.environ.get("FAIL"):
        raise RuntimeError

def test_after_it(shard_session):
    assert count(shard_session) == 0
"""


ALL_MODELS = """
from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
import shardids

class Base(DeclarativeBase):
    pass

class Country(Base):
    __tablename__ = "countries"
    __table_args__ = shardids.reference_table()
    code: Mapped[str] = mapped_column(primary_key=True)

class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = shardids.primary_key()
    name: Mapped[str] = shardids.sharding_key(unique=True)
    email: Mapped[str] = shardids.lookup_key(unique=True)
    number: Mapped[str] = shardids.counter("user", per="day")
    country: Mapped[str | None] = mapped_column(ForeignKey("shardids_ref.countries.code"))

class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = shardids.primary_key()
    by: Mapped[str] = shardids.sharding_key()
"""
ALL_TESTS = """
import pytest
from models import Country, User
from shardids import ShardidsError
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

@pytest.mark.parametrize("run", range(3))
def test_claims_and_numbers_are_rolled_back(shard_cluster, shard_session, run):
    found = {shard_cluster.shard_for(name): name for name in map(str, range(run, 99, 3))}
    names = [found[shard] for shard in range(4)]
    assert shard_session.scalars(select(User).where(User.email == "ann@example.com")).all() == []
    ann = User(name=names[run], email="ann@example.com")
    shard_session.add(ann)
    shard_session.commit()
    assert ann.number.endswith("0001")
    assert shard_session.scalars(select(User).where(User.email == "ann@example.com")).one() is ann
    shard_session.add(User(name=names[(run + 1) % 4], email="ann@example.com"))
    with pytest.raises(IntegrityError, match="look-up"):
        shard_session.commit()
    shard_session.rollback()
    shard_session.delete(ann)
    shard_session.commit()
    shard_session.add(User(name=names[(run + 1) % 4], email="ann@example.com"))
    shard_session.commit()
    with shard_cluster.sharded_session() as other:
        assert len(other.scalars(select(User)).all()) == 1

def test_reference_tables_are_on_every_node(spain, shard_cluster, shard_session):
    assert shard_session.scalars(select(Country)).one().code == "ES"
    shard_session.add(User(name="ann", email="ann@example.com", country="ES"))
    shard_session.commit()
    with pytest.raises(ShardidsError, match="this test is rolled back"):
        shard_cluster.reference_session()
"""
ALL_CONFTEST = """
import pytest
from models import Base, Country

@pytest.fixture(scope="session")
def shard_metadata():
    return Base.metadata

@pytest.fixture(scope="session")
def spain(shard_cluster):
    with shard_cluster.reference_session(wait=True) as session:
        session.add(Country(code="ES"))
        session.commit()
"""
MANY_WAYS = """
import asyncio
import pytest
import models
from models import Note, User
from shardids import AsyncCluster, Cluster, ShardidsError
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import IntegrityError

def write(cluster):
    \"\"\"Commit a row in each way of a cluster; return their number.\"\"\"
    with cluster.session(key="a") as session:
        session.add(User(name="a", email="a@example.com"))
        session.commit()
    cluster.at(key="b").run(lambda session: session.add(User(name="b", email="b@example.com")))
    with cluster.sharded_session() as session:
        session.add_all([User(name=name, email=name) for name in ("c", "d", "e", "f")])
        session.commit()
    with cluster.at(key="g").connection() as connection:
        connection.execute(insert(Note).values(by="g"))
        connection.commit()
    cluster.copy(Note, [{"by": "h"}, {"by": "i"}])
    with cluster.sharded_session() as session:
        assert sorted(session.scalars(select(Note.by))) == ["g", "h", "i"]
    return 6

async def write_async(cluster):
    async with cluster.session(key="i") as session:
        session.add(User(name="i", email="i"))
        await session.commit()
    async def add(session):
        session.add(User(name="j", email="j"))
    await cluster.at(key="j").run(add)
    async with cluster.sharded_session() as session:
        session.add_all([User(name=name, email=name) for name in ("k", "l", "m")])
        await session.commit()
        assert (await session.scalars(select(User).where(User.email == "i"))).one().name == "i"
    return 5

def names(session):
    return sorted(session.scalars(select(User.name)))

@pytest.mark.parametrize("run", range(2))
def test_every_way_is_rolled_back(shard_cluster, shard_catalog_url, shard_session, run):
    assert names(shard_session) == []
    count = write(shard_cluster)
    assert len(names(shard_session)) == count
    # The application's own clusters are in it, too.
    with Cluster.connect(shard_catalog_url, listen=False) as own:
        with own.session(lookup=User.email == "a@example.com") as session:
            assert "a" in names(session)
            session.rollback()
        with pytest.raises(IntegrityError, match="look-up"), own.session(key="z") as session:
            session.add(User(name="z", email="a@example.com"))
            session.commit()
        with own.sharded_session() as session:
            session.add(User(name="y", email="y"))
            session.flush()
        with own.sharded_session() as session:
            assert len(names(session)) == count

@pytest.mark.anyio
@pytest.mark.parametrize("run", range(2))
async def test_anyio(shard_cluster, shard_async_cluster, shard_async_session, run):
    assert (await shard_async_session.scalars(select(User))).all() == []
    count = await write_async(shard_async_cluster)
    count += await asyncio.to_thread(write, shard_cluster)
    assert len((await shard_async_session.scalars(select(User))).all()) == count
    shard_async_session.add(User(name="n", email="n"))
    await shard_async_session.commit()

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.asyncio
@pytest.mark.parametrize("run", range(2))
async def test_pytest_asyncio(shard_cluster, shard_async_cluster, run):
    count = await write_async(shard_async_cluster)
    async def one(name):
        async with shard_async_cluster.session(key=name) as session:
            session.add(User(name=name, email=name))
            await session.commit()
    await asyncio.gather(*[one(name) for name in "xyz"])
    with shard_cluster.sharded_session() as session:
        assert len(names(session)) == count + 3

def test_an_error_leaves_others_alone(shard_cluster, shard_rollback):
    cluster = shard_cluster
    with cluster.session(key="a") as one, cluster.session(key="a") as other:
        one.add(User(name="a", email="a"))
        one.flush()
        with pytest.raises(IntegrityError):
            other.add(User(name="a", email="b"))
            other.flush()
        one.add(User(name="a2", email="c")) if cluster.shard_for("a2") == cluster.shard_for("a") else None
        other.rollback()
        one.commit()
        assert "a" in names(other)

def test_a_rollback_that_would_undo_the_work_of_others_is_refused(shard_cluster, shard_rollback):
    with shard_cluster.session(key="a") as one:
        one.add(User(name="a", email="a"))
        one.flush()
        with one.begin_nested() as savepoint:
            one.execute(text("select 1"))
            savepoint.rollback()
        shard_cluster.at(key="b", ).run(lambda _: None)
        other = shard_cluster.at(shard=shard_cluster.shard_for("a"))
        other.run(lambda session: session.execute(
            text(f"update {shard_cluster.schema_of(other.number)}.users set number = 'x'")))
        with pytest.raises(ShardidsError, match="can't roll back: another one has committed"):
            one.rollback()
        one.commit()

def test_a_rollback_takes_open_sessions_along(shard_cluster, shard_rollback):
    on_a = [shard for shard, node in shard_cluster.placement.node_of.items() if node == "a"]
    for is_committed in (False, True):
        with shard_cluster.session(shard=on_a[0]) as one, shard_cluster.session(shard=on_a[1]) as other:
            other.execute(insert(Note).values(by=named(shard_cluster, on_a[1])))
            one.execute(insert(Note).values(by=named(shard_cluster, on_a[0])))
            other.execute(insert(Note).values(by=named(shard_cluster, on_a[1])))
            one.rollback()
            if is_committed:
                with pytest.raises(ShardidsError, match="undone by the ROLLBACK of another"):
                    other.commit()
            other.rollback()
            assert not one.scalars(select(Note)).all() + other.scalars(select(Note)).all()

def named(cluster, shard):
    return next(str(number) for number in range(99) if cluster.shard_for(str(number)) == shard)

def test_two_phases_and_views_are_refused(shard_cluster, shard_rollback):
    with shard_cluster.sharded_session(twophase=True) as session:
        session.add_all([User(name=name, email=name) for name in ("c", "d", "e", "f")])
        with pytest.raises(ShardidsError, match="needs a real COMMIT"):
            session.flush()
    write(shard_cluster)
    with shard_cluster.sharded_session() as session:
        by_name = select(func.count(), func.percentile_disc(0.5).within_group(User.name))
        with pytest.raises(ShardidsError, match="committed rows|written to users"):
            session.execute(by_name).all()

def test_nothing_stayed(shard_cluster):
    with shard_cluster.sharded_session() as session:
        assert names(session) == []
"""


def test_every_way_to_commit_is_rolled_back(folder: Path, server_url: URL, admin: psycopg.Connection) -> None:
    (folder / "models.py").write_text(ALL_MODELS)
    (folder / "test_users.py").write_text(MANY_WAYS)
    ran = run_pytest(folder, "--shardids-server", dsn(server_url), has_asyncio=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "11 passed" in ran.stdout
    assert databases(admin) == set()


def test_all_of_the_metadata_is_made(folder: Path, server_url: URL, admin: psycopg.Connection) -> None:
    (folder / "models.py").write_text(ALL_MODELS)
    (folder / "conftest.py").write_text(ALL_CONFTEST)
    (folder / "test_users.py").write_text(ALL_TESTS)
    ran = run_pytest(folder, "--shardids-server", dsn(server_url))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 passed" in ran.stdout
    assert databases(admin) == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in (("models", MODELS), ("conftest", CONFTEST), ("test_users", TESTS)):
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def databases(admin: psycopg.Connection) -> set[str]:
    found = admin.execute("select datname from pg_database where datname ~ '^shardids_tests_'")
    return {name for (name,) in found}


@pytest.mark.long
def test_the_session_is_rolled_back_after_each_test(
    folder: Path, server_url: URL, admin: psycopg.Connection
) -> None:
    ran = run_pytest(folder, "--shardids-server", dsn(server_url))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "7 passed" in ran.stdout
    assert databases(admin) == set()
    ran = run_pytest(folder, "--shardids-server", dsn(server_url), FAIL="1")
    assert ran.returncode == 1
    assert "1 failed, 6 passed" in ran.stdout


@pytest.mark.long
def test_each_worker_has_a_cluster_of_its_own(
    folder: Path, server_url: URL, admin: psycopg.Connection
) -> None:
    (folder / "pytest.ini").write_text(f"[pytest]\nshardids_server = {dsn(server_url)}\n")
    ran = run_pytest(folder, "-n", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "7 passed" in ran.stdout
    assert databases(admin) == set()


@pytest.mark.long
def test_an_embedded_server_is_started_where_none_is_named(folder: Path) -> None:
    (folder / "pytest.ini").write_text(
        "[pytest]\nshardids_layout = js53\nshardids_shards = 3\nshardids_nodes = 1\n"
    )
    (folder / "test_users.py").write_text(
        """
def test_the_cluster_is_as_asked(shard_cluster, shard_session):
    assert shard_cluster.layout.name == "js53"
    assert shard_cluster.shard_count == 3
    assert list(shard_cluster.placement.nodes) == ["a"]
"""
    )
    ran = run_pytest(folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
def test_a_cluster_that_is_there_is_left_as_it_is(folder: Path, cluster_url: URL) -> None:
    (folder / "test_users.py").write_text(
        """
from sqlalchemy import inspect

def test_no_tables_were_made(shard_cluster, shard_session):
    assert shard_cluster.shard_count == 8
    schema = shard_cluster.schema_of(5)
    assert not inspect(shard_cluster.at(shard=5).engine).has_table("users", schema=schema)
"""
    )
    ran = run_pytest(folder, "--shardids-catalog", dsn(cluster_url))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = run_pytest(folder, "--shardids-catalog", dsn(cluster_url), "-n", "2")
    assert ran.returncode == 1
    assert "2 workers can't share the cluster of one catalog" in ran.stdout


@pytest.mark.long
def test_wrong_settings_are_told_in_a_line(folder: Path) -> None:
    url = "postgresql://u:secret@127.0.0.1:1/d"
    (folder / "pytest.ini").write_text(f"[pytest]\nshardids_server = {url}\n")
    ran = run_pytest(folder, "-k", "test_after_it")
    assert ran.returncode == 1
    assert "127.0.0.1" in ran.stdout
    assert "Traceback" not in ran.stdout
    assert "secret" not in ran.stdout


def test_an_application_has_its_own_session_class(folder: Path, server_url: URL) -> None:
    more = """
from sqlalchemy.orm import Session

class OurSession(Session):
    def names(self):
        return "ours"

@pytest.fixture(scope="session")
def shard_session_options():
    return {"class_": OurSession, "expire_on_commit": False}
"""
    (folder / "conftest.py").write_text(CONFTEST + more)
    (folder / "test_users.py").write_text(
        "def test_it(shard_session):\n    assert shard_session.names() == 'ours'\n"
    )
    ran = run_pytest(folder, "--shardids-server", dsn(server_url))
    assert ran.returncode == 0, ran.stdout


def test_loading_the_plugin_loads_nothing_else() -> None:
    script = """
import sys, pytest
before = set(sys.modules)
import shardids.testing.plugin
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("shardids")))
assert not {"sqlalchemy", "psycopg", "alembic", "typer"} & set(sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("\n", "")
