"""``shard move``, ``purge``, ``moves``, ``rebalance``, ``rebalance --drain`` as they are typed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardids import mover
from shardids.cli import app, shards
from shardids.pg.embedded import temporary_servers
from shardids.replication import programs
from tests.support.clusters import Nursery
from tests.support.killed_moves import killed_move
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes

Run = Callable[..., Result]

SHARDS = 6


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def run(nodes: TwoNodes) -> Run:
    def run(*words: str) -> Result:
        environment = {"SHARDIDS_CATALOG": nodes.catalog_url, "COLUMNS": "200"}
        return CliRunner().invoke(app, [*words], env=environment, prog_name="shardids")

    return run


def test_a_shard_goes_there_is_purged_and_comes_back(nodes: TwoNodes, run: Run) -> None:
    shard = nodes.new_shard()
    planned = run("shard", "move", str(shard), "--to", "b", "--dry-run", "--json")
    (plan,) = json.loads(planned.stdout)
    assert plan | {"size_bytes": 0} == {
        "shard": shard, "from": "a", "to": "b", "tables": 6, "rows": plan["rows"], "size_bytes": 0,
        "sequences": 2,
    }  # fmt: skip
    assert nodes.catalog.node_of(shard).name == "a"
    moved = run("shard", "move", str(shard), "--to", "b", "--verify", "--json")
    (result,) = json.loads(moved.stdout)
    assert (result["from"], result["to"], result["outcome"]) == ("a", "b", "moved")
    assert result["rows_verified"] == 1064
    assert result["pause_ms"] < 2000
    assert f"shard {shard}: cutover" in moved.stderr
    assert_one_owner(nodes, shard)
    assert f'info old-copy  node "a", shard {shard}\n' in run("doctor").stdout
    assert json.loads(run("shard", "purge", str(shard), "--dry-run", "--json").stdout)[0]["node"] == "a"
    refused = run("shard", "purge", "all")
    assert (refused.exit_code, "no terminal to ask at" in refused.stderr) == (2, True)
    assert f"old copies of shard {shard}," in refused.stderr
    mistyped = run("shard", "purge", str(shard), "--node", "A", "--yes")
    assert (mistyped.exit_code, 'there is no node "A"' in mistyped.stderr) == (1, True)
    (purged,) = json.loads(run("shard", "purge", "all", "--yes", "--json").stdout)
    assert (purged["shard"], purged["node"], purged["schema"]) == (shard, "a", "old copy")
    assert_one_owner(nodes, shard)
    assert run("shard", "purge", str(shard)).stderr == "No old copy is left\n"
    back = run("shard", "move", str(shard), "--back", "--offline")
    assert back.exit_code == 0, back.stderr
    assert nodes.catalog.node_of(shard).name == "a"
    listed = json.loads(run("shard", "move", "--list", "--json").stdout)
    moves = [[row["from"], row["to"], row["how"], row["outcome"]] for row in listed if row["shard"] == shard]
    assert moves == [["a", "b", "live", "moved"], ["b", "a", "offline", "moved"]]


def test_a_broken_off_move_is_told_and_taken_up(nodes: TwoNodes, run: Run) -> None:
    shard, nursery = nodes.new_shard(), Nursery()
    assert killed_move(nodes, nursery, shard, "indexes")
    nursery.close()
    refused = run("shard", "move", str(shard), "--to", "b")
    assert refused.exit_code == 1
    assert f'a move of shard {shard} from node "a" to "b" was interrupted at step "indexes"' in refused.stderr
    assert f"shardids shard move {shard} --resume; to undo it: --abort" in refused.stderr
    assert run("rebalance").exit_code == 1
    assert f"{shard}" in run("shard", "move", "--resume", "--dry-run").stdout
    resumed = run("shard", "move", "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert_one_owner(nodes, shard)
    assert run("shard", "move", "--abort").stderr == "Nothing to do\n"


def test_an_interrupted_command_says_how_to_go_on(
    nodes: TwoNodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first test leaves this one on a, with a copy on b.
    shard, told = 0, shards._told
    assert run("shard", "purge", str(shard), "--yes").exit_code == 0

    def interrupting(event: mover.Event) -> tuple[str, float]:
        if event == mover.StepBegun(shard=shard, step="copy"):
            raise KeyboardInterrupt
        return told(event)

    monkeypatch.setattr(shards, "_told", interrupting)
    interrupted = run("shard", "move", str(shard), "--to", "b")
    move = f"shardids shard move {shard}"
    said = f'Interrupted at step "copy". Go on: {move} --resume; undo: {move} --abort'
    assert (interrupted.exit_code, interrupted.stderr.splitlines()[-1]) == (130, said)
    assert run("shard", "move", str(shard), "--abort").exit_code == 0
    assert_one_owner(nodes, shard)
    # Here the interrupt undoes the move.
    monkeypatch.setattr(shards, "_told", told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs.Programs, "copy_rows", interrupt)
        interrupted = run("shard", "move", str(shard), "--to", "b", "--offline")
    said = "Interrupted. Nothing is left to resume."
    assert (interrupted.exit_code, interrupted.stderr.splitlines()[-1]) == (130, said)
    assert run("shard", "move", "--resume").stderr == "Nothing to do\n"


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_locked_table_is_named(nodes: TwoNodes, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = nodes.new_shard("create table {s}.users (id bigint primary key)")
    monkeypatch.setattr(programs, "_LOCK_WAIT_MS", 300)
    with nodes.connected("a") as holder, holder.transaction():
        holder.execute(f"lock table {schema(shard)}.users in access exclusive mode".encode())
        pid = holder.info.backend_pid
        refused = run("shard", "move", str(shard), "--to", "b", "--dry-run")
    assert refused.exit_code == 1
    who = f'table users is locked by process {pid} of role "postgres" (in a transaction for'
    assert refused.stderr.startswith(f'Error: shard {shard}, node "a": {who}'), refused.stderr
    assert f"or end it: select pg_terminate_backend({pid})" in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["1"], 2, "say what to do: one of --to NODE, --back, --resume, --abort and --list"),
        (["1", "--to", "b", "--back"], 2, "one of --to NODE"),
        (["--to", "b"], 2, "which shards?"),
        (["99", "--to", "b"], 2, "'99' is not a range of shards of this cluster"),
        (["1", "--to", "z"], 1, 'there is no node "z"'),
        (["2", "--to", "a"], 1, 'shard 2 is on node "a" already'),
        (["5", "--back"], 1, "shard 5 was never moved"),
        (["5", "--resume"], 1, "no move of shard 5 is under way"),
        (["5", "--to", "b", "--max-pause", "soon"], 2, "'soon' is not a duration"),
        (["5", "--to", "b", "--max-pause", "500"], 2, "Write 500ms or 500s."),
    ],
)
def test_what_can_not_be(run: Run, words: list[str], code: int, message: str) -> None:
    ran = run("shard", "move", *words)
    assert message in ran.stderr
    assert ran.exit_code == code


@pytest.mark.long
def test_drain_and_rebalance(nodes: TwoNodes, run: Run) -> None:
    """What the tests before have left on node a goes to b; then the half of it comes back."""
    held = Counter(nodes.catalog.placement().node_of.values())["a"]
    assert "no node can take shards in" in run("rebalance", "--drain", "a", "--exclude", "b").stderr
    assert 'node "a":' in run("rebalance", "--drain", "a", "--dry-run").stdout
    done = run("rebalance", "--drain", "a", "--json")
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)) == held
    assert Counter(nodes.catalog.placement().node_of.values()) == {"b": SHARDS}
    kept = run("node", "remove", "a", "--dry-run")
    assert 'node "a" is the query node' in kept.stderr
    moved = run("query-node", "create", "--on", "b", "--store-password")
    assert moved.exit_code == 0, moved.stderr
    kept = run("node", "remove", "a", "--dry-run")
    assert kept.exit_code == 1
    assert 'node "a" has copies of shards ' in kept.stderr
    assert "shardids shard purge " in kept.stderr
    planned = json.loads(run("rebalance", "--dry-run", "--json").stdout)
    balanced = run("rebalance", "--json")
    assert balanced.exit_code == 0, balanced.stderr
    assert [row["shard"] for row in json.loads(balanced.stdout)] == [
        transfer["shard"] for transfer in planned["transfers"]
    ]
    mean = sum(planned["before"].values()) / 2
    assert planned["before"]["a"] == 0
    assert abs(planned["after"]["a"] - mean) <= 0.1 * mean
    assert nodes.leftovers() == []
    with nodes.connected("b") as connection:
        connection.execute("create database third")
    url = nodes.servers["b"].url("third")
    added = run("node", "add", "c", "--url", url, "--rebalance")
    assert added.exit_code == 0, added.stderr
    assert Counter(nodes.catalog.placement().node_of.values())["c"] > 0
