"""A rebalance from the console's page: carried out, and interrupted and resumed by the command."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardids import mover
from shardids.pg.embedded import temporary_servers
from tests.support.clusters import COMMAND, environment
from tests.support.consoles import asked, browsing, ended_job, get, post, process, takes_writes
from tests.support.lengths import long
from tests.support.moves import TwoNodes, assert_one_owner, schema, two_nodes
from tests.support.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.long

USERS = 500
"""How many each shard of node a has; nothing is on node b."""
SHARDS = range(4)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 2 * len(SHARDS))
        assert [nodes.new_shard() for _ in SHARDS] == list(SHARDS)
        with nodes.connected("a") as connection:
            connection.execute("analyze")
        yield nodes
        nodes.catalog.close()


def transfers(nodes: TwoNodes) -> tuple[mover.Transfer, ...]:
    return tuple(mover.plan_balance(nodes.catalog, mover.By.ROWS).transfers)


def assert_balanced(nodes: TwoNodes, moved: tuple[mover.Transfer, ...], users: dict[int, int]) -> None:
    """What was planned is where it was planned to be, with all rows, and nothing else has moved."""
    targets = {one.shard: one.target for one in moved}
    for shard in SHARDS:
        owner = nodes.catalog.node_of(shard).name
        assert owner == targets.get(shard, "a")
        assert_one_owner(nodes, shard)
        with nodes.connected(owner) as connection:
            count = connection.execute(f"select count(*) from {schema(shard)}.users".encode()).fetchone()
        assert count == (users.get(shard, USERS),)
    for node in nodes.servers:
        with nodes.connected(node) as connection:
            connection.execute("analyze")
    assert transfers(nodes) == ()


def test_a_rebalance_is_planned_confirmed_and_done(nodes: TwoNodes) -> None:
    planned = transfers(nodes)
    assert len(planned) == 2
    with browsing(nodes.catalog_url, allow_actions=True) as client:
        plan = asked(client, "rebalance", by="rows")
        assert plan["plan"] == [f'Move shard {one.shard} from node "a" to node "b"' for one in planned]
        assert transfers(nodes) == planned
        assert asked(client, "rebalance", 202, confirm=plan["confirm"])["title"] == (
            "Rebalance by rows: 2 moves"
        )
        job = ended_job(client)
        assert (job["state"], job["error"]) == ("done", None)
        for one in planned:
            assert any(f'shard {one.shard}: moved to node "b"' in line for line in job["lines"][-2:])
        assert_balanced(nodes, planned, {})
        assert asked(client, "rebalance", by="rows") == {"plan": ["Nothing to do"], "confirm": None}


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGKILL)])
def test_a_rebalance_that_the_console_s_end_interrupts_is_resumed(nodes: TwoNodes, number: int) -> None:
    planned = first, second = transfers(nodes)
    with nodes.connected("a") as other:
        with process(nodes.catalog_url, "--allow-actions", "--interval", "1") as (running, address):
            plan = post(address, "/api/actions/rebalance", by="rows")
            post(address, "/api/actions/rebalance", confirm=plan["confirm"])
            wait_for(lambda: nodes.catalog.node_of(first.shard).name == "b", "the end of the first move")
            # Open, it keeps the second from its cutover. Begun before, it would have kept the first, too.
            other.execute("begin")
            other.execute(f"insert into {schema(second.shard)}.users (name) values ('ann')".encode())

            def is_at_the_second() -> bool:
                job = get(address, "/api/job")
                assert job["state"] == "running", job
                return bool(job["progress"]) and job["progress"]["shard"] == second.shard

            wait_for(is_at_the_second, "the second move under way")
            running.send_signal(number)
            if number == signal.SIGTERM:
                # The move goes on to its next step, and is told there.
                other.execute("commit")
            _, said = running.communicate(timeout=PATIENCE_S)
        if number == signal.SIGTERM:
            assert "interrupted: Rebalance by rows: 2 moves" in said
            assert "to resume: shardids rebalance --by rows --resume" in said
        else:
            other.execute("commit")
    assert nodes.catalog.node_of(first.shard).name == "b"
    assert [move.shard for move in mover.open_moves(nodes.catalog)] == [second.shard]
    wait_for(lambda: takes_writes(nodes, second.shard), "that the shard takes writes")
    resumed = subprocess.run(
        [sys.executable, "-c", COMMAND, "rebalance", "--by", "rows", "--resume"],
        env=environment(SHARDIDS_CATALOG=nodes.catalog_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert resumed.returncode == 0, resumed.stderr
    with nodes.connected("b") as connection:
        query = f"select count(*) from {schema(second.shard)}.users where name in ('ann', 'bob')".encode()
        (written,) = connection.execute(query).fetchone() or (0,)
    assert written == 2
    assert_balanced(nodes, planned, {second.shard: USERS + written})
