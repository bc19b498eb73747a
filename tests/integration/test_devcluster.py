"""Clusters of embedded servers: one to play with, which stays, and the demo, which leaves nothing."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from shardids import Cluster
from shardids.errors import BadArgument, ClusterConflict
from shardids.pg.embedded import EmbeddedServer
from shardids.pg.embedded.data import free_port
from shardids.testing import devcluster
from tests.support.clusters import command_here, environment, processes_in
from tests.support.waiting import wait_for


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder that everybody may pass through, unlike pytest's own, and that is empty at the end."""
    folder = Path(tempfile.gettempdir()).resolve() / f"test-shardids-{secrets.token_hex(6)}"
    folder.mkdir()
    folder.chmod(0o755)
    try:
        yield folder
        assert processes_in(folder) == []
        assert list(folder.iterdir()) == []
    finally:
        for state in list(folder.rglob("server.json")):
            EmbeddedServer.open(state.parent).remove()
        shutil.rmtree(folder)


@pytest.mark.long
def test_a_cluster_that_stays(folder: Path) -> None:
    home = folder / "cluster"
    servers = devcluster.up(home, 2, 4)
    assert list(servers) == ["a", "b"]
    catalog = servers["a"].url()
    pids = [server.pid for server in servers.values()]
    with Cluster.connect(catalog) as cluster:
        assert cluster.placement.node_of == {0: "a", 1: "a", 2: "b", 3: "b"}

    # Up again: nothing changes.
    again = devcluster.up(home, 2, 4)
    assert [server.pid for server in again.values()] == pids
    # So with no size at all: that of the cluster is taken.
    assert [server.pid for server in devcluster.up(home).values()] == pids
    assert again["a"].url() == catalog

    # Another size is another cluster.
    for nodes, shards, words in ((3, 4, "2 nodes, not 3"), (2, 8, "4 shards, not 8")):
        with pytest.raises(ClusterConflict, match=words) as refused:
            devcluster.up(home, nodes, shards)
        assert f"shardids dev down --dir {home} --remove" in refused.value.hint
        with pytest.raises(ClusterConflict, match=words):
            devcluster.checked_count(home, nodes, shards)

    assert [server.is_running for server in devcluster.servers_in(home).values()] == [True, True]
    drawn = command_here("id", "next", "--shard", "3", "-n", "2", "--catalog", catalog)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    first = [int(line) for line in drawn.stdout.split()]
    assert len(first) == 2

    # What is nobody's stays, here and where there is no cluster at all.
    precious = home / "c"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")

    # Down, and up with all that was there.
    assert devcluster.down(home, remove=False) == ["a", "b"]
    assert [server.is_running for server in devcluster.servers_in(home).values()] == [False, False]
    assert command_here("dev", "status", "--dir", str(home)).returncode == 3
    assert devcluster.down(home, remove=False) == ["a", "b"]
    back = devcluster.up(home, 2, 4)
    assert back["a"].url() == catalog
    with Cluster.connect(catalog) as cluster:
        (later,) = cluster.at(shard=3).reserve(1)
        assert later > max(first)
        assert cluster.shard_of(later) == 3

    data = [server.data_directory for server in back.values()]
    for words, said in (
        (["up"], ['Node "a" runs', 'Node "b" runs']),
        (["down", "--remove"], ['Would remove node "a"', 'Would remove node "b"']),
        (["down"], ['Would stop node "a"', 'Would stop node "b"']),
        (["up", "--dir", str(folder / "new")], [f"Would make 2 servers with 64 shards in {folder / 'new'}"]),
    ):
        tried = command_here("dev", words[0], "--dir", str(home), "--dry-run", *words[1:])
        assert (tried.returncode, tried.stdout.splitlines()) == (0, said)
    assert not (folder / "new").exists()
    assert all(server.is_running for server in devcluster.servers_in(home).values())
    refused = command_here("dev", "down", "--dir", str(home), "--remove")
    assert (refused.returncode, "no terminal to ask at" in refused.stderr) == (2, True)
    assert all(server.is_running for server in devcluster.servers_in(home).values())
    removed = command_here("dev", "down", "--dir", str(home), "--remove", "--yes")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert removed.stdout.splitlines() == ['Removed node "a"', 'Removed node "b"']
    assert devcluster.down(home, remove=True) == []
    assert [path.name for path in home.rglob("*")] == ["c", "thesis.txt"]
    shutil.rmtree(home)
    assert not any(path.exists() for path in data)


@pytest.mark.long
def test_a_cluster_with_reference_tables_starts_again(folder: Path) -> None:
    home = folder / "cluster"
    catalog = devcluster.up(home, 2, 4)["a"].url()
    with psycopg.connect(catalog, autocommit=True) as connection:
        connection.execute("create table shardids_ref.units (code text primary key)")
    made = command_here("reference", "create", "units", "--writer", "a", "--catalog", catalog)
    assert made.returncode == 0, made.stderr
    devcluster.down(home, remove=False)
    assert list(devcluster.up(home)) == ["a", "b"]
    devcluster.down(home, remove=True)


@pytest.mark.long
def test_a_cluster_that_cannot_be_made_leaves_nothing(folder: Path) -> None:
    home = folder / "cluster"
    for nodes in (0, 27):
        with pytest.raises(BadArgument, match=f"{nodes} nodes"):
            devcluster.up(home, nodes, 4)
    for shards in (0, 4097):
        with pytest.raises(BadArgument, match=f"{shards} shards"):
            devcluster.up(home, 2, shards)
    # Neither a folder nor a server that nobody asked for.
    assert list(folder.iterdir()) == []
    assert processes_in(folder) == []


def test_a_folder_without_a_cluster(folder: Path) -> None:
    home = folder / "cluster"
    assert devcluster.servers_in(home) == {}
    assert devcluster.down(home, remove=True) == []
    assert command_here("dev", "status", "--dir", str(home)).returncode == 3
    assert command_here("dev", "down", "--dir", str(home)).returncode == 1


def test_a_cluster_on_ports_of_its_own_choice(folder: Path) -> None:
    home = folder / "cluster"
    with pytest.raises(BadArgument, match="ports from 65535 on"):
        devcluster.up(home, 2, 4, port=65535)
    assert not home.exists()
    first = free_port()
    made: list[tuple[int, int]] = []
    servers = devcluster.up(
        home, 1, 4, port=first, on_progress=lambda done, total: made.append((done, total))
    )
    assert servers["a"].port == first
    assert made[-1] == (4, 4)
    devcluster.down(home, remove=False)
    with pytest.raises(ClusterConflict, match="holds a cluster of 4 shards, not 8"):
        devcluster.up(home, 1, 8)
    assert not devcluster.servers_in(home)["a"].is_running
    refused = command_here("dev", "up", "--dir", str(home), "--nodes", "3", "--dry-run")
    assert (refused.returncode, "1 node, not 3" in refused.stderr) == (1, True)
    devcluster.down(home, remove=True)


@pytest.mark.long
def test_what_a_killed_start_leaves_can_be_taken_down(folder: Path) -> None:
    # The folders are made before anything is in them.
    home = folder / "cluster"
    (home / "a").mkdir(parents=True)
    (home / "b").mkdir()
    assert devcluster.servers_in(home) == {}
    devcluster.up(home, 1, 2)
    shown = command_here("dev", "status", "--dir", str(home), "--json")
    assert [(row["node"], row["running"]) for row in json.loads(shown.stdout)] == [("a", "yes")]
    assert devcluster.down(home, remove=True) == ["a"]
    assert not home.exists()


def start_demo(
    folder: Path, script: str = "from shardids.cli import app; app(['demo'])"
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment(TMPDIR=str(folder), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_the_demo_proves_what_it_says(folder: Path) -> None:
    demo = start_demo(folder)
    told, errors = demo.communicate(timeout=120)
    assert demo.returncode == 0, errors
    for words in (
        "Two PostgreSQL",
        "64 logical shards",
        "6,000 IDs, 6,000 of them distinct",
        "0 out of order",
        "0 that name another shard",
        "nothing is left behind",
    ):
        assert words in told
    assert "Traceback" not in errors


INTERRUPTED = """
import os
from shardids.cli import app
from shardids.testing.demo import Demo

def interrupted_provision(self):
    os.kill(os.getpid(), {signum:d})
    provision(self)

def interrupted_write(self):
    for turn, rows in enumerate(write(self)):
        if turn == 2:
            os.kill(os.getpid(), {signum:d})
        yield rows

provision, write = Demo.provision, Demo.write
Demo.{moment} = interrupted_{moment}
app(["demo"])
"""


@pytest.mark.long
@pytest.mark.parametrize(("signum", "moment"), [(signal.SIGTERM, "provision"), (signal.SIGINT, "write")])
def test_an_interrupted_demo_leaves_nothing(folder: Path, signum: signal.Signals, moment: str) -> None:
    demo = start_demo(folder, INTERRUPTED.format(signum=signum, moment=moment))
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_in(folder) and not list(folder.iterdir()), "nothing is left")
