"""Moves, rebalance and drain keep a region's shards on its nodes, also when they are interrupted or raced."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL
from typer.testing import CliRunner

from shardids import mover
from shardids.catalog.region_changes import assign_nodes, create_region
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog
from shardids.cli import app
from shardids.errors import ClusterConflict
from shardids.mover.journal import Journal
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.watch import doctor
from tests.conftest import dsn, found_cluster
from tests.support.clusters import Nursery, catalog_at, command, environment
from tests.support.moves import url_of

Run = Callable[..., Result]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "regions.md"
EU = Region(name="eu", first_shard=0, last_shard=3)
TABLE = "create table {s}.users (id bigint primary key default {s}.next_id(), name text not null)"
REBALANCE_KILLED = """
import os
from shardids import mover
from shardids.catalog.rows import Catalog
catalog = Catalog({url!r})
def watch(event):
    if isinstance(event, mover.StepBegun) and event.step == {step!r}:
        print("dying", flush=True)
        os.kill(os.getpid(), 9)
found = mover.plan_balance(catalog, mover.By.SIZE)
mover.carry_out(catalog, found.transfers, mover.Options(), watch)
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[Sequence[EmbeddedServer]]:
    with temporary_servers(2) as started:
        yield started


_numbers = count()


def three_nodes(servers: Sequence[EmbeddedServer], names: Sequence[str]) -> dict[str, URL]:
    """Empty databases, one on the first server and two on the second."""
    number, found = next(_numbers), {}
    for name, server in zip(names, (servers[0], servers[1], servers[1]), strict=True):
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"create database {name}{number}".encode())
        found[name] = url_of(server).set(database=f"{name}{number}")
    return found


@pytest.fixture
def nodes(servers: Sequence[EmbeddedServer]) -> dict[str, URL]:
    """Node a on one server, b and c on another; of six shards each has two. The catalog is with a."""
    found = three_nodes(servers, "abc")
    placed = found_cluster(found["a"], found, 6)
    for shard, name in placed.items():
        with psycopg.connect(dsn(found[name]), autocommit=True) as connection:
            connection.execute(TABLE.replace("{s}", f"shard_{shard:04}").encode())
            connection.execute(f"insert into shard_{shard:04}.users (name) values ('ann')".encode())
    return found


@pytest.fixture
def catalog(nodes: dict[str, URL]) -> Iterator[Catalog]:
    with catalog_at(nodes["a"]) as catalog:
        yield catalog


@pytest.fixture
def run(nodes: dict[str, URL]) -> Run:
    def run(*words: str, code: int = 0) -> Result:
        environment = {"SHARDIDS_CATALOG": dsn(nodes["a"]), "COLUMNS": "200"}
        ran = CliRunner().invoke(app, [*words], env=environment, prog_name="shardids")
        assert ran.exit_code == code, ran.output
        return ran

    return run


def findings(catalog: Catalog) -> list[doctor.Finding]:
    return list(doctor.examine(catalog, ["shard-outside-region", "copy-outside-region", "old-copy"]).findings)


@pytest.mark.long
def test_what_is_outside_is_found_and_comes_home(nodes: dict[str, URL], catalog: Catalog, run: Run) -> None:
    """Shards 0 and 1 are on a, 2 and 3 on b, 4 and 5 on c. Region eu has 0-3, and nodes a and c."""
    run("region", "create", "eu", "--shards", "0-3", "--node", "a", "--node", "c")
    outside = findings(catalog)
    assert sorted((one.check, one.shards, one.nodes) for one in outside) == [
        ("shard-outside-region", (2, 3), ("b",)),
        ("shard-outside-region", (4, 5), ("c",)),
    ]
    assert {remedy.text for one in outside for remedy in one.commands} == {"shardids rebalance"}
    for words, message in (
        (("0", "--to", "b"), 'shard 0 is of region "eu", and node "b" is of no region'),
        (("4", "--to", "a"), 'shard 4 is of no region, and node "a" is of region "eu"'),
    ):
        assert message in run("shard", "move", *words, code=1).stderr
        assert message in run("shard", "move", *words, "--dry-run", code=1).stderr
    planned = json.loads(run("rebalance", "--dry-run", "--json").stdout)
    assert {one["shard"]: one["target"] for one in planned["transfers"]}.items() >= {4: "b", 5: "b"}.items()
    run("rebalance")
    placement = catalog.placement()
    assert placement.outside() == {}
    assert Counter(placement.node_of.values()) == {"a": 2, "b": 2, "c": 2}
    # The rows are still in the old copies.
    copies = findings(catalog)
    assert sorted((one.check, one.shards, one.nodes) for one in copies) == [
        ("copy-outside-region", (2, 3), ("b",)),
        ("copy-outside-region", (4, 5), ("c",)),
    ]
    for one in copies:
        for remedy in one.commands:
            run(*remedy.text.removeprefix("shardids ").split(), "--yes")
    assert findings(catalog) == []


@pytest.mark.long
def test_a_rebalance_that_dies_is_resumed_and_keeps_to_the_region(
    nodes: dict[str, URL], catalog: Catalog, run: Run
) -> None:
    create_region(catalog, EU, ["a", "c"])
    nursery = Nursery()
    nursery.start(REBALANCE_KILLED.format(url=dsn(nodes["a"]), step="catch up"))
    assert nursery.line() == "dying"
    nursery.close()
    (move,) = mover.open_moves(catalog)
    assert catalog.placement().region_of(move.shard) == catalog.nodes()[move.target].region
    # Whoever changes regions under the move is told; so is who would go on without resuming it.
    with pytest.raises(
        ClusterConflict, match=f"shard {move.shard}, which would be .*, is being moved to node"
    ):
        assign_nodes(catalog, None if move.target != "b" else "eu", [move.target])
    assert "a move is not over" in run("rebalance", code=1).stderr
    deadline = time.monotonic() + 40
    while (
        ran := CliRunner().invoke(
            app, ["rebalance", "--resume"], env={"SHARDIDS_CATALOG": dsn(nodes["a"])}, prog_name="shardids"
        )
    ).exit_code and "by another process" in ran.output:
        assert time.monotonic() < deadline
    assert ran.exit_code == 0, ran.output
    assert catalog.placement().outside() == {}


def test_a_drained_node_gives_its_shards_to_its_region_alone(catalog: Catalog, run: Run) -> None:
    create_region(catalog, Region(name="eu", first_shard=0, last_shard=3), ["a", "b"])
    run("rebalance", "--drain", "b")
    assert catalog.placement().node_of == {0: "a", 1: "a", 2: "a", 3: "a", 4: "c", 5: "c"}
    refused = run("rebalance", "--drain", "c", code=1)
    assert "there is no node without a region to take shards 4-5" in refused.stderr
    refused = run("rebalance", "--drain", "a", "--exclude", "b", code=1)
    assert 'shards 0-3 can only go to a node of region "eu", and b is excluded' in refused.stderr
    assert "Leave b in." in refused.stderr
    run("region", "assign", "--none", "b")
    refused = run("rebalance", "--drain", "a", code=1)
    assert 'there is no node of region "eu" to take shards 0-3' in refused.stderr
    assert "--region eu; to assign one: shardids region assign eu NODE" in refused.stderr
    assert Counter(catalog.placement().node_of.values()) == {"a": 4, "c": 2}


def test_a_region_can_not_be_made_under_a_move(nodes: dict[str, URL], catalog: Catalog) -> None:
    refused: list[str] = []

    def watch(event: mover.Event) -> None:
        if isinstance(event, mover.StepBegun) and event.step == "copy":
            with catalog_at(nodes["a"]) as other:
                with pytest.raises(ClusterConflict) as caught:
                    create_region(other, EU, ["a"])
                refused.append(caught.value.message)
                # What the move does not touch can be named meanwhile.
                create_region(other, Region(name="us", first_shard=5, last_shard=5), ["c"])

    mover.move(catalog, 0, "b", on_event=watch)
    assert refused == [
        'shard 0, which would be of region "eu", is being moved to node "b", which would be of no region'
    ]
    assert catalog.placement().node_of[0] == "b"
    create_region(catalog, EU, ["a"])
    assert catalog.placement().outside() == {0: "b", 2: "b", 3: "b", 4: "c"}


def test_a_move_that_was_planned_before_the_region_is_refused(catalog: Catalog) -> None:
    """Also when the region is made after the move was examined: the journal looks again."""
    with Journal.opened(catalog, 0) as journal:
        create_region(catalog, EU, ["a", "c"])
        with pytest.raises(ClusterConflict, match='shard 0 is of region "eu", and node "b" is of no region'):
            journal.enter("b", offline=False)
        assert not journal.is_open
    assert mover.all_moves(catalog) == []


@pytest.mark.long
def test_a_node_is_replaced_where_shards_live_outside_of_their_region(
    nodes: dict[str, URL], catalog: Catalog, run: Run
) -> None:
    """Shards 0 to 2 are on a, 3 on b, 4 and 5 on c. What is dropped is lost, as with a server."""
    mover.move(catalog, 2, "a")
    create_region(catalog, EU, ["a", "c"])
    outside = {3: "b", 4: "c", 5: "c"}
    for name, url in nodes.items():
        assert "region" not in run("node", "replace", name, "--url", dsn(url)).output
    assert catalog.placement().outside() == outside
    for shard, name in ((2, "a"), (4, "c")):
        with psycopg.connect(dsn(nodes[name]), autocommit=True) as connection:
            connection.execute(f"drop schema shard_{shard:04} cascade".encode())
    # Shard 2 has an old copy, outside; shard 4 has none, and is made again where it was.
    expected = {
        2: ("a", "b", 'shard 2 is of region "eu", and node "b", its home, is of no region'),
        4: ("c", "c", 'shard 4 is of no region, and node "c", its home, is of region "eu"'),
    }
    for shard, (name, home, message) in expected.items():
        replaced = ("node", "replace", name, "--url", dsn(nodes[name]))
        accepted = (*replaced, "--accept-loss", str(shard))
        for words, code in ((replaced, 3), ((*accepted, "--dry-run"), 0), ((*accepted, "--yes"), 0)):
            told = run(*words, code=code).stderr
            assert f"Warning: {message}. To bring it to a node of its own: shardids rebalance\n" in told
        assert catalog.placement().outside() == {**outside, shard: home}
        outside[shard] = home
    with psycopg.connect(dsn(nodes["c"]), autocommit=True) as connection:
        connection.execute(TABLE.replace("{s}", "shard_0004").encode())
    run("rebalance")
    assert catalog.placement().outside() == {}


@pytest.mark.long
def test_the_page(servers: Sequence[EmbeddedServer]) -> None:
    """docs/how-to/regions.md as it stands: its commands, and what its code prints."""
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    (code,) = [one.content for one in tokens if one.type == "fence" and one.info == "python"]
    (printed,) = [one.content for one in tokens if one.type == "fence" and one.info == "text"]
    lines = [line for one in tokens if one.type == "code_block" for line in one.content.splitlines()]
    found = three_nodes(servers, ("frankfurt", "paris", "ohio"))
    url = found["frankfurt"]
    assert {*found_cluster(url, found, 8).values()} == {*found}
    for line in lines:
        ran = command(*shlex.split(line)[1:], SHARDIDS_CATALOG=dsn(url))
        assert ran.returncode == 0, (line, ran)
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(SHARDIDS_CATALOG=dsn(url)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (shown.stdout, shown.stderr) == (printed, "")
