"""What the console's page may do where it may: each action planned, confirmed, done, and interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from shardids import mover
from shardids.pg.embedded import temporary_servers
from shardids.watch.console import acting
from tests.support.clusters import COMMAND, environment
from tests.support.consoles import ACTION, asked, browsing, ended_job, get, post, process, takes_writes, told
from tests.support.lengths import long
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 16)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def client(nodes: TwoNodes) -> Iterator[TestClient]:
    with browsing(nodes.catalog_url, allow_actions=True) as client:
        yield client


def done(client: TestClient, action: str, **given: Any) -> Any:
    """Plans and confirms; the job when it has ended."""
    confirm = asked(client, action, **given)["confirm"]
    job = asked(client, action, 202, confirm=confirm)
    assert job["state"] == "running"
    return ended_job(client)


def test_a_move_is_planned_confirmed_and_done(nodes: TwoNodes, client: TestClient) -> None:
    shard = nodes.new_shard()
    plan = asked(client, "move", shard=shard, to="b")
    assert f'Move shard {shard} from node "a" to node "b": 6 tables' in plan["plan"][0]
    assert nodes.catalog.node_of(shard).name == "a"
    other = nodes.new_shard()
    with nodes.connected("a") as connection, connection.transaction():
        # The move can't end before this transaction does.
        connection.execute(f"insert into {schema(shard)}.users (name) values ('ann')".encode())
        job = asked(client, "move", 202, confirm=plan["confirm"])
        assert f"shard {shard}" in job["title"]
        second = asked(client, "fence", shard=other)["confirm"]
        assert "another action is running" in asked(client, "fence", 409, confirm=second)["error"]
    job = ended_job(client)
    assert (job["state"], job["error"], job["progress"]) == ("done", None, None)
    assert f"shard {shard}: cutover" in job["lines"]
    assert 'moved to node "b"' in job["lines"][-1]
    assert nodes.catalog.node_of(shard).name == "b"
    assert_one_owner(nodes, shard)
    (move,) = told(client, f"/api/shards/{shard}")["moves"]
    assert (move["from"], move["to"], move["state"], move["do"]) == ("a", "b", "moved", None)
    assert told(client, "/api/moves")[0]["shard"] == shard
    # The ID was born on a, and lives on b, as the next reading finds.
    wait_for(lambda: told(client, f"/api/shards/{shard}")["node"] == "b", "the new owner")
    with nodes.connected("b") as connection:
        (id_,) = connection.execute(f"select min(id) from {schema(shard)}.users".encode()).fetchone() or (0,)
    (one,) = client.post("/api/inspect", json={"text": str(id_), "look": True}).json()["ids"]
    assert (one["born_on"], one["node"], one["origin_differs"]) == ("a", "b", True)
    assert (one["found"], one["table"]) == (True, "users")


def test_a_confirmation_is_for_one_plan_once_and_for_a_minute(
    nodes: TwoNodes, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = nodes.new_shard()
    confirm = asked(client, "fence", shard=shard)["confirm"]
    assert asked(client, "fence", 400, confirm=confirm + "x")["error"].startswith("this confirmation")
    asked(client, "fence", 202, confirm=confirm)
    ended_job(client)
    assert "was used" in asked(client, "fence", 400, confirm=confirm)["error"]
    late = asked(client, "unfence", shard=shard)["confirm"]
    monkeypatch.setattr(acting, "CONFIRM_S", 0.0)
    assert "has expired" in asked(client, "unfence", 400, confirm=late)["error"]
    monkeypatch.undo()
    assert done(client, "unfence", shard=shard)["state"] == "done"


def test_a_fence_and_its_end(nodes: TwoNodes, client: TestClient) -> None:
    shard = nodes.new_shard()
    assert done(client, "fence", shard=shard)["lines"] == [f'Shard {shard} on node "a" is fenced']
    with nodes.connected("a") as connection:
        query = f"select {schema(shard)}.next_id()".encode()
        with pytest.raises(psycopg.Error, match="fenced"):
            connection.execute(query)
        refused = asked(client, "fence", 409, shard=shard)
        assert "is fenced, not active" in refused["error"]
        assert done(client, "unfence", shard=shard)["lines"] == [f'Shard {shard} on node "a" is active']
        connection.execute(query)
    assert "is active, not fenced" in asked(client, "unfence", 409, shard=shard)["error"]


def test_a_rebalance(nodes: TwoNodes, client: TestClient) -> None:
    plan = mover.plan_balance(nodes.catalog, mover.By.ROWS)
    found = asked(client, "rebalance", by="rows")
    if plan.transfers:
        assert len(found["plan"]) == len(plan.transfers)
    else:
        assert (found["plan"], found["confirm"]) == (["Nothing to do"], None)


@pytest.mark.parametrize(
    ("action", "given", "status"),
    [
        ("move", {"shard": 1}, 400),
        ("move", {"shard": "1", "to": "b"}, 400),
        ("move", {"shard": True, "to": "b"}, 400),
        ("move", {"shard": 16, "to": "b"}, 400),
        ("move", {"shard": -1, "to": "b"}, 400),
        ("move", {"shard": 15, "to": "nowhere"}, 409),
        ("move", {"shard": 15, "to": "b"}, 409),
        ("move", {"shard": 15, "to": ["b"]}, 400),
        ("rebalance", {"by": "luck"}, 400),
        ("rebalance", {"by": ["size"]}, 400),
        ("fence", {}, 400),
        ("drop", {"shard": 1}, 400),
        ("fence", {"confirm": ["x"]}, 400),
    ],
)
def test_what_can_t_be_planned(client: TestClient, action: str, given: dict[str, Any], status: int) -> None:
    answer = asked(client, action, status, **given)
    assert answer["error"]


def test_an_action_has_to_say_so(client: TestClient) -> None:
    for headers in ({}, {"X-Shardids-Action": "0"}):
        answer = client.post("/api/actions/fence", json={"shard": 9}, headers=headers)
        assert answer.status_code == 403
    other = ACTION | {"Origin": "http://evil.example"}
    assert client.post("/api/actions/fence", json={"shard": 9}, headers=other).status_code == 403


def test_a_job_that_fails_says_why(nodes: TwoNodes, client: TestClient) -> None:
    shard = nodes.new_shard()
    confirm = asked(client, "move", shard=shard, to="b")["confirm"]
    # The plan is no promise: what has changed meanwhile is found when it is carried out.
    with nodes.connected("a") as connection:
        connection.execute(f"create table {schema(shard)}.keyless (n integer)".encode())
    asked(client, "move", 202, confirm=confirm)
    job = ended_job(client)
    assert job["state"] == "failed"
    assert "keyless" in job["error"]
    assert nodes.catalog.node_of(shard).name == "a"


@pytest.mark.long
@pytest.mark.parametrize("number", [long(signal.SIGTERM), signal.SIGKILL])
def test_a_console_that_ends_in_the_midst_of_a_move_leaves_one_to_resume(
    nodes: TwoNodes, number: int
) -> None:
    shard = nodes.new_shard()
    # A transaction that is open keeps the move from its cutover.
    with nodes.connected("a") as other:
        other.execute("begin")
        other.execute(f"insert into {schema(shard)}.users (name) values ('ann')".encode())
        with process(nodes.catalog_url, "--allow-actions", "--interval", "1") as (running, address):
            plan = post(address, "/api/actions/move", shard=shard, to="b")
            post(address, "/api/actions/move", confirm=plan["confirm"])
            wait_for(
                lambda: (
                    get(address, "/api/job")["progress"]
                    or any("put off" in line for line in get(address, "/api/job")["lines"])
                ),
                "the move under way",
            )
            running.send_signal(number)
            if number == signal.SIGTERM:
                # The move goes on to its next step, and is told there.
                other.execute("commit")
            _, said = running.communicate(timeout=PATIENCE_S)
        if number == signal.SIGTERM:
            assert "shardids shard move --resume" in said
        else:
            other.execute("commit")
        (move,) = mover.open_moves(nodes.catalog, [shard])
        # Whatever it had stopped, the source takes writes again.
        wait_for(lambda: takes_writes(nodes, shard), "that the shard takes writes")
    with browsing(nodes.catalog_url) as client:

        def is_shown() -> bool:
            shown = [one for one in told(client, "/api/moves") if one["id"] == move.id]
            return [one["state"] for one in shown] == ["interrupted"]

        wait_for(is_shown, "the move as interrupted")
        shown = told(client, "/api/moves")[0]
        assert shown["do"] == f"shardids shard move {shard} --resume"
    resumed = subprocess.run(
        [sys.executable, "-c", COMMAND, "shard", "move", str(shard), "--resume"],
        env=environment(SHARDIDS_CATALOG=nodes.catalog_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert_one_owner(nodes, shard)
    assert nodes.catalog.node_of(shard).name == "b"
