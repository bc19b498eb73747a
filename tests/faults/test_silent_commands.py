"""A network that swallows packets under the doctor, migrations and a failover: no command hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
from sqlalchemy.engine import make_url

from shardids.pg.embedded import temporary_servers
from tests.support.clusters import COMMAND, environment
from tests.support.faults import LONG
from tests.support.migrations import REVISION
from tests.support.moves import TwoNodes, proxies_of, two_nodes
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for

ENDS_S = 60
LONG_STATEMENT_S = 45 if LONG else 14
"""Longer than it takes to notice a server that is silent."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 4)
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def proxies(nodes: TwoNodes) -> Iterator[dict[str, Proxy]]:
    with proxies_of(nodes) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Migrations with one revision."""
    (tmp_path / "versions").mkdir()
    env = "import sqlalchemy as sa\nfrom shardids.migrate import run_environment\n"
    (tmp_path / "env.py").write_text(env + "run_environment(sa.MetaData())\n")
    add(tmp_path, "one", None, "op.execute('create table users (id bigint primary key)')")
    return tmp_path


def add(folder: Path, revision: str, after: str | None, up: str) -> None:
    body = REVISION.format(
        message=revision,
        revision=revision,
        down=after,
        more="",
        up=indent(up, "    "),
        downgrade="    pass",
    )
    (folder / "versions" / f"{revision}.py").write_text(body)


def started(nodes: TwoNodes, proxies: dict[str, Proxy], folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command that knows the catalog by its proxy."""
    url = make_url(nodes.catalog_url).set(host="127.0.0.1", port=proxies["catalog"].port)
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(
            SHARDIDS_CATALOG=url.render_as_string(hide_password=False), SHARDIDS_MIGRATIONS=str(folder)
        ),
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and all that it said; it ends soon."""
    try:
        out, err = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
    return process.returncode, out + err


COMMANDS = (
    ("doctor",),
    ("migrate", "status"),
    ("migrate", "check", "--all"),
    ("migrate", "up", "--retries", "1"),
    ("migrate", "stamp", "one"),
    ("shard", "move", "0", "--to", "b", "--dry-run"),
)


@pytest.mark.parametrize("silent", ["b", "catalog"])
def test_a_server_that_is_silent_from_the_start(
    nodes: TwoNodes, proxies: dict[str, Proxy], folder: Path, silent: str
) -> None:
    assert ended(started(nodes, proxies, folder, "migrate", "up"))[0] == 0
    proxies[silent].swallow()
    # Side by side: what each takes is its wait.
    running = [(words, started(nodes, proxies, folder, *words)) for words in COMMANDS]
    try:
        told = [(words, *ended(process)) for words, process in running]
    finally:
        for _, process in running:
            process.kill()

    what = "the catalog" if silent == "catalog" else 'node "b"'
    for words, code, said in told:
        assert code in (1, 3), (words, said)
        assert f"{what} can't be reached at" in said or "node-unreachable" in said, (words, said)
        # No password helps against silence.
        assert "--store-password" not in said, (words, said)


def test_a_server_that_falls_silent_during_a_migration(
    nodes: TwoNodes, proxies: dict[str, Proxy], folder: Path
) -> None:
    add(folder, "two", "one", "op.execute('select pg_sleep(120)')")
    with nodes.connected("b") as there:
        running = started(nodes, proxies, folder, "migrate", "up", "--shards", "3", "--retries", "0")
        sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'"
        try:
            wait_for(lambda: there.execute(sleeping).fetchone() == (1,), "the statement is running")
            proxies["b"].swallow()
        except BaseException:
            running.kill()
            raise
        code, said = ended(running)
        assert code == 1
        assert 'node "b" can\'t be reached' in said
        there.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where wait_event = 'PgSleep'"
        )


def test_a_long_statement_of_a_migration_is_not_cut(
    nodes: TwoNodes, proxies: dict[str, Proxy], folder: Path
) -> None:
    add(folder, "two", "one", f"op.execute('select pg_sleep({LONG_STATEMENT_S})')")
    began = time.monotonic()
    code, said = ended(
        started(nodes, proxies, folder, "migrate", "up", "--shards", "2", "--statement-timeout", "0")
    )
    assert (code, time.monotonic() - began > LONG_STATEMENT_S) == (0, True), said


@pytest.mark.parametrize("silent", ["old", "new", "catalog"])
def test_a_failover_over_a_silent_network(
    nodes: TwoNodes, proxies: dict[str, Proxy], folder: Path, silent: str
) -> None:
    """The node's own server is the new one, by another way to it; a silent old server counts as gone."""
    with Proxy(nodes.servers["b"].port) as way:
        {"old": proxies["b"], "new": way, "catalog": proxies["catalog"]}[silent].swallow()
        if silent != "old":
            proxies["b"].swallow()
        url = make_url(nodes.servers["b"].url()).set(host="127.0.0.1", port=way.port)
        words = ("node", "replace", "b", "--url", url.render_as_string(hide_password=False))
        code, said = ended(started(nodes, proxies, folder, *words))
        if silent == "old":
            assert (code, nodes.catalog.nodes()["b"].url.count(str(way.port))) == (0, 1), said
        else:
            what = "the catalog" if silent == "catalog" else 'node "b"'
            assert code == 1
            assert f"{what} can't be reached at" in said
            assert str(way.port) not in nodes.catalog.nodes()["b"].url
