"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.errors import BadArgument
from shardids.testing.clusters import rolled_back
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
    # Nobody else sees any of it.
    with shard_cluster.sharded_session() as other:
        assert count(other) == 0

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
        assert other.scalars(select(User)).all() == []

def test_reference_tables_are_on_every_node(shard_cluster, shard_session):
    assert shard_session.scalars(select(Country)).all() == []
    with shard_cluster.reference_session() as session:
        session.add(Country(code="ES"))
        session.commit()
"""


def test_all_of_the_metadata_is_made(folder: Path, server_url: URL, admin: psycopg.Connection) -> None:
    (folder / "models.py").write_text(ALL_MODELS)
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


def test_a_commit_on_two_nodes_is_refused(cluster: Cluster) -> None:
    with pytest.raises(BadArgument, match="needs a real COMMIT"), rolled_back(cluster, {"twophase": True}):
        pass


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
