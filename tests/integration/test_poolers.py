"""``shardids routes``: files for poolers, and the command that keeps them current."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import COMMAND, command_here, connected, environment
from tests.support.waiting import wait_for

Db = psycopg.Connection[Any]


def point(db: Db, node: str, url: str) -> None:
    db.execute("update shardids_catalog.node set url = %s where name = %s", [url, node])


@pytest.fixture
def routed(cluster_url: URL) -> Iterator[Db]:
    """The catalog of a cluster whose nodes have plain addresses."""
    with connected(cluster_url) as db:
        point(db, "a", "postgresql://app@10.0.0.11:5432/photos")
        point(db, "b", "postgresql://app@[::1]:6000/it's")
        yield db


def printed(url: URL, form: str, *more: str) -> str:
    ran = command_here("routes", "--format", form, *more, "--catalog", dsn(url))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert command_here("routes", "--format", form, *more, "--catalog", dsn(url)).stdout == ran.stdout
    return ran.stdout


def test_pgbouncer_has_an_entry_per_node_and_per_shard(routed: Db, cluster_url: URL) -> None:
    lines = printed(cluster_url, "pgbouncer").splitlines()
    assert lines[1:4] == [
        "[databases]",
        "a = host=10.0.0.11 port=5432 dbname=photos",
        "b = host='::1' port=6000 dbname='it''s'",
    ]
    assert lines[4] == (
        "shard_0000 = host=10.0.0.11 port=5432 dbname=photos connect_query='set search_path = shard_0000'"
    )
    assert [line.split()[0] for line in lines[4:]] == [f"shard_000{shard}" for shard in range(8)]


def test_haproxy_has_a_port_per_shard_and_a_backend_per_node(
    routed: Db, cluster_url: URL, tmp_path: Path
) -> None:
    text = printed(cluster_url, "haproxy", "--listen", "[::1]:7000")
    assert "backend shardids_a\n    mode tcp\n    server a 10.0.0.11:5432 check\n" in text
    assert "    server b [::1]:6000 check\n" in text
    assert "frontend shard_0005\n    mode tcp\n    bind [::1]:7005\n    default_backend shardids_b\n" in text
    if haproxy := shutil.which("haproxy"):
        file = tmp_path / "haproxy.cfg"
        file.write_text(
            "defaults\n    timeout connect 1s\n    timeout client 1m\n    timeout server 1m\n" + text
        )
        checked = subprocess.run([haproxy, "-c", "-f", file], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


PGDOG = {
    "databases": {"name": str, "host": str, "port": int, "database_name": str, "shard": int},
    "sharded_schemas": {"database": str, "name": str, "shard": int},
}
"""The settings, with their types, of PgDog's own schema of pgdog.toml that are used."""


def test_pgdog_has_a_shard_per_node_and_each_schema_in_one(routed: Db, cluster_url: URL) -> None:
    found = tomllib.loads(printed(cluster_url, "pgdog", "--database", "photos"))
    assert found.keys() == PGDOG.keys()
    for section, settings_ in PGDOG.items():
        for entry in found[section]:
            assert {name: type(value) for name, value in entry.items()} == settings_
    assert [(one["host"], one["port"], one["shard"]) for one in found["databases"]] == [
        ("10.0.0.11", 5432, 0),
        ("::1", 6000, 1),
    ]
    schemas = {one["name"]: one["shard"] for one in found["sharded_schemas"]}
    assert schemas == {f"shard_000{shard}": int(shard > 3) for shard in range(8)}
    assert {one["database"] for one in found["sharded_schemas"]} == {"photos"}


@pytest.mark.parametrize(
    ("change", "form", "words"),
    [
        (("b", "postgresql:///x"), "pgbouncer", 'the URL of node "b" names no host'),
        (("b", "postgresql://h"), "pgbouncer", 'the URL of node "b" names no database'),
        (("b", "postgresql://h1,h2/x"), "haproxy", 'the URL of node "b" names several hosts: h1,h2'),
        (("b", "postgresql:///x?host=/tmp"), "pgdog", 'node "b" is reached by a socket in /tmp'),
    ],
)
def test_addresses_that_a_file_can_t_hold_are_refused(
    routed: Db, cluster_url: URL, change: tuple[str, str], form: str, words: str
) -> None:
    point(routed, *change)
    ran = command_here("routes", "--format", form, "--catalog", dsn(cluster_url))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert words in ran.stderr


@pytest.mark.parametrize("name", ["shard_0003", "pgbouncer"])
def test_a_node_s_name_that_pgbouncer_has_already_is_refused(routed: Db, cluster_url: URL, name: str) -> None:
    routed.execute("update shardids_catalog.node set name = %s where name = 'a'", [name])
    ran = command_here("routes", "--format", "pgbouncer", "--catalog", dsn(cluster_url))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f'node "{name}" has the name of' in ran.stderr


def test_a_lost_shard_has_no_route(routed: Db, cluster_url: URL) -> None:
    routed.execute("update shardids_catalog.placement set state = 'lost' where shard = 2")
    assert "shard_0002" not in printed(cluster_url, "pgbouncer")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--format pgbouncer --watch", "--watch does not apply without --output FILE"),
        ("--format pgbouncer --run true", "--run does not apply without --output FILE"),
        ("--format pgbouncer --listen 0.0.0.0:1", "--listen does not apply to pgbouncer"),
        ("--format haproxy --database x", "--database does not apply to haproxy"),
        ("--format haproxy --listen 127.0.0.1:65530", "shard 7 would have port 65537, which is above 65535"),
        ("--format pgdog --output /nowhere/x", "folder /nowhere does not exist"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    routed: Db, cluster_url: URL, words: str, refusal: str
) -> None:
    ran = command_here("routes", *words.split(), "--catalog", dsn(cluster_url))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert refusal in ran.stderr


def test_a_file_is_replaced_only_when_it_differs(routed: Db, cluster_url: URL, tmp_path: Path) -> None:
    file, seen = tmp_path / "routes.ini", tmp_path / "seen"
    words = ("--format", "pgbouncer", "--output", str(file), "--catalog", dsn(cluster_url))
    assert command_here("routes", *words).stdout == f"Wrote {file}\n"
    file.chmod(0o640)
    before = file.stat().st_ino
    ran = command_here("routes", *words, "--run", f"cat {file} >> {seen}")
    assert ran.stdout == f"{file} is as it should be\n"
    assert (file.stat().st_ino, seen.read_text()) == (before, file.read_text())
    point(routed, "a", "postgresql://db-a/photos")
    assert command_here("routes", *words).stdout == f"Wrote {file}\n"
    assert "host=db-a" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["routes.ini", "seen"]


def test_a_command_that_fails_is_named(routed: Db, cluster_url: URL, tmp_path: Path) -> None:
    file = tmp_path / "routes.ini"
    words = ("--output", str(file), "--run", "echo no such pooler >&2; exit 7", "--catalog", dsn(cluster_url))
    ran = command_here("routes", "--format", "pgbouncer", *words)
    assert ran.returncode == 1
    assert "the command of --run exited 7" in ran.stderr
    assert "no such pooler" in ran.stderr
    assert file.exists()


@contextmanager
def watching(url: URL, file: Path, run: str) -> Iterator[subprocess.Popen[str]]:
    words = ("--watch", "--output", str(file), "--run", run, "--catalog", dsn(url))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "routes", "--format", "pgbouncer", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_file_follows_the_placement(routed: Db, cluster_url: URL, tmp_path: Path, admin: Db) -> None:
    file, seen = tmp_path / "routes.ini", tmp_path / "seen"
    with watching(cluster_url, file, f"grep shard_0003 {file} > {seen}"):
        wait_for(lambda: seen.exists() and "10.0.0.11" in seen.read_text(), "the file is there")
        routed.execute("update shardids_catalog.placement set node = 'b' where shard = 3")
        wait_for(lambda: "host='::1'" in seen.read_text(), "the file follows a move")
        # The connection that listens is lost, and meanwhile the placement changes.
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = %s and application_name = 'shardids listener'",
            [cluster_url.database],
        )
        routed.execute("update shardids_catalog.placement set node = 'a' where shard = 3")
        wait_for(lambda: "10.0.0.11" in seen.read_text(), "the file follows after the connection was lost")


def test_what_fails_while_a_file_is_followed_is_repeated(
    routed: Db, cluster_url: URL, tmp_path: Path
) -> None:
    file, works, seen = tmp_path / "routes.ini", tmp_path / "works", tmp_path / "seen"
    with watching(cluster_url, file, f"test -e {works} && cat {file} > {seen}"):
        wait_for(file.exists, "the file is there")
        assert not seen.exists()
        works.touch()
        wait_for(lambda: seen.exists() and seen.read_text() == file.read_text(), "the command is repeated")
