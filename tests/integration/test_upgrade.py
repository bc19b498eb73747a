"""Clusters of released versions are upgraded, with the application running, to what a new one is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from sqlalchemy.engine import URL

from shardids.migrate.install import trees
from shardids.migrate.install import upgrade as own_upgrade
from shardids.migrate.install.trees import head
from shardids.migrate.runner import Observer, RunSettings, one_run
from shardids.pg.sqlfiles import data_folder
from tests.conftest import dsn, found_cluster
from tests.releases import HERE as RELEASE_FOLDER
from tests.releases import REVISIONS, install_version, is_released
from tests.support.clusters import catalog_at, command, connected, everything, objects
from tests.support.waiting import wait_for

Blank = Callable[[], URL]
RELEASES = sorted(REVISIONS)


@pytest.fixture(params=RELEASES)
def old(request: pytest.FixtureRequest, blank_database: Blank) -> URL:
    """The catalog of a cluster of a released version: node a, in the same database, with two shards."""
    url = blank_database()
    dump = RELEASE_FOLDER / request.param / "database.sql"
    with connected(url) as connection:
        connection.execute(dump.read_bytes())
    with connected(url) as connection:
        bare = url.set(drivername="postgresql", password=None).render_as_string()
        connection.execute("update shardids_catalog.node set url = %s", [bare])
        # A dump is a copy; the original is gone.
        connection.execute("select shardids.activate(0), shardids.activate(1)")
    return url


@pytest.mark.parametrize("version", [version for version in RELEASES if not is_released(version)])
def test_the_dump_of_an_unreleased_version_is_what_the_code_installs(
    version: str, blank_database: Blank
) -> None:
    dumped, installed = blank_database(), blank_database()
    with connected(dumped) as connection:
        connection.execute((RELEASE_FOLDER / version / "database.sql").read_bytes())
        connection.execute("drop table shard_0000.kept")
    install_version(version, installed)
    differences = set(objects(dumped)) ^ set(objects(installed))
    names = sorted({f"{kind} {name}" for kind, name, _ in differences})
    assert not names, f"To write the dump again: python -m tests.releases {version}"


def upgrade(url: URL, *words: str) -> subprocess.CompletedProcess[str]:
    return command("upgrade", *words, SHARDIDS_CATALOG=dsn(url))


def test_a_released_version_becomes_this_one(old: URL, blank_database: Blank) -> None:
    drawn, ended = list[int](), Event()

    def application() -> None:
        with connected(old) as connection:
            while not ended.is_set():
                (row,) = connection.execute(
                    "insert into shard_0000.kept default values returning id"
                ).fetchall()
                drawn.append(row[0])

    thread = Thread(target=application)
    thread.start()
    wait_for(lambda: drawn, "the application runs")
    before = objects(old)
    planned = upgrade(old, "--dry-run")
    assert (planned.returncode, objects(old)) == (0, before)
    assert [line.split() for line in planned.stdout.splitlines()[1:]] == [
        ["node", "a", "node_0001", head("node")]
    ]
    done = upgrade(old)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"Upgraded node a to {head('node')}\n"
    count = len(drawn)
    wait_for(lambda: len(drawn) > count, "the application still runs")
    ended.set()
    thread.join()
    with connected(old) as connection:
        (row,) = connection.execute("select count(*), count(distinct id) from shard_0000.kept").fetchall()
        assert row == (len(drawn) + 3,) * 2

    fresh = blank_database()
    found_cluster(fresh, {"a": fresh}, 2)
    for schema in ("shardids_catalog", "shardids", "shard_0001"):
        assert objects(old, schema) == objects(fresh, schema)
    after = everything(old)
    again = upgrade(old)
    assert (again.returncode, again.stdout) == (0, "Nothing to do: everything is up to date\n")
    assert everything(old) == after


def test_migrations_ask_for_the_upgrade(old: URL, tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text("from shardids.migrate import run_environment\nrun_environment()\n")
    ran = command("migrate", "status", "--dir", str(tmp_path), SHARDIDS_CATALOG=dsn(old))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert 'node "a" has an engine that is too old for migrations' in ran.stderr
    assert "shardids upgrade" in ran.stderr


@pytest.mark.long
def test_one_upgrade_at_a_time_and_none_of_what_is_newer(old: URL) -> None:
    with catalog_at(old) as catalog, one_run(catalog, "upgrade"):
        refused = upgrade(old)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "another run is changing the shards of this cluster: shardids upgrade by " in refused.stderr
    with connected(old) as connection:
        connection.execute("update shardids.shardids_version set version_num = 'node_9999'")
    before = everything(old)
    for more in ([], ["--dry-run"]):
        newer = upgrade(old, *more)
        assert (newer.returncode, newer.stdout) == (1, "")
        assert 'node "a"' in newer.stderr
        assert "A newer shardids" in newer.stderr
    assert everything(old) == before


def test_the_shards_are_upgraded_by_the_same_machine(
    cluster_url: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data_folder("migrations"), tmp_path / "migrations")
    (tmp_path / "migrations" / "shard" / "versions" / "shard_0002.py").write_text(
        """from alembic import op
revision, down_revision = "shard_0002", "shard_0001"
def upgrade():
    op.execute("create function shard_number() returns integer return shardids.shard_of(next_id())")
"""
    )
    monkeypatch.setattr(trees, "data_folder", lambda name: tmp_path / name)
    with catalog_at(cluster_url) as catalog:
        with one_run(catalog, "upgrade") as leases:
            done = own_upgrade.upgrade(catalog, RunSettings(), Observer(), Event(), leases=leases)
        assert all(target.is_current for target in done.targets)
        assert {(one.start, one.end, one.way, one.status) for one in done.shards.outcomes} == {
            (("shard_0001",), ("shard_0002",), "sql", "done")
        }
        assert len(done.shards.outcomes) == 8
        with one_run(catalog, "upgrade") as leases:
            again = own_upgrade.upgrade(catalog, RunSettings(), Observer(), Event(), leases=leases)
        assert again.shards.outcomes == ()
    with connected(cluster_url) as connection:
        assert connection.execute("select shard_0003.shard_number()").fetchone() == (3,)
