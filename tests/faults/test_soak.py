"""An application at work while shards move, movers are killed, nodes restart and a standby is promoted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from shardids import Cluster, doctor, mover
from shardids.dev.embedded import temporary_servers
from shardids.errors import ClusterConflict, ConnectionFailed, MoveFailed, StatementFailed
from shardids.mover.steps import LIVE
from tests.faults.conftest import DURABLE, Report
from tests.support.application import TABLES, Application, assert_each_write_once
from tests.support.clusters import Nursery, command
from tests.support.faults import connect, scalar, scaled
from tests.support.moves import TwoNodes, finish, killed_move, schema, two_nodes
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

SECONDS = scaled(25, 300)
"""How long it goes on, at least; a round takes about 20 s."""
WRITERS = 16
SHARDS = 6
ANSWERS_S = 30.0

MOVE = """
from shardids import mover
from shardids.catalog.rows import Catalog
mover.move(Catalog({url!r}), {shard}, {to!r}, back=True)
"""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Node a, with the catalog, and node b; an application's tables in each shard."""
    with temporary_servers(2, settings=DURABLE) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(TABLES.replace("{s}", schema(shard)))
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


class Troubles:
    """What befalls a cluster. Each ends with all moves brought to their ends."""

    def __init__(self, nodes: TwoNodes, nursery: Nursery, kept: ExitStack) -> None:
        self._nodes, self._nursery, self._kept = nodes, nursery, kept
        self._chance = random.Random(20)
        self.counts: Counter[str] = Counter()

    def move(self) -> None:
        shard = self._any_shard()
        mover.move(self._nodes.catalog, shard, self._other_node(shard), back=True)
        self.counts["moves"] += 1

    def kill_a_mover(self) -> None:
        self._leave_a_move()
        self._settle()

    def restart(self, node: str) -> None:
        """Restarts a node, by a crash or not, while a shard moves."""
        shard = self._any_shard()
        self._nursery.start(MOVE.format(url=self._nodes.catalog_url, shard=shard, to=self._other_node(shard)))
        time.sleep(self._chance.uniform(0, 1))
        self._nodes.servers[node].restart(self._chance.choice(["fast", "immediate"]))
        self._nursery.line()
        self.counts["restarts"] += 1
        self._settle()

    def protect(self, node: str) -> None:
        """Gives a node a standby that has every transaction before it is acknowledged."""
        server = self._nodes.servers[node]
        self._standby = self._kept.enter_context(standby_of(server))
        with connect(server.url()) as primary:
            primary.execute("alter system set synchronous_standby_names = 'walreceiver'")
            primary.execute("select pg_reload_conf()")
            is_there = "select count(*) from pg_stat_replication where sync_state = 'sync'"
            wait_for(lambda: scalar(primary, is_there), "the standby is synchronous")

    def lose(self, node: str) -> None:
        """The server is gone in the midst of a move; its standby takes over."""
        self._leave_a_move()
        self._nodes.servers[node].kill()
        with connect(self._standby.url()) as standby:
            assert scalar(standby, "select pg_promote()")
        # By somebody who has the catalog's address and the standby's, and nothing else.
        catalog, url = self._nodes.catalog_url, self._standby.url()
        replaced = command("node", "replace", node, "--url", url, SHARDIDS_CATALOG=catalog)
        assert replaced.returncode == 0, replaced.stderr
        assert "Fenced" not in replaced.stderr
        self._nodes.servers[node] = self._standby
        self.counts["promotions"] += 1
        # The slot of a move away from the node went with the old server.
        self._settle(mover.abort)

    def _leave_a_move(self) -> None:
        """Kills a mover at some moment."""
        step, delay_s = (
            self._chance.choice(LIVE).name,
            self._chance.choice([0.0, self._chance.uniform(0, 0.2)]),
        )
        self.counts["movers killed"] += killed_move(
            self._nodes, self._nursery, self._any_shard(), step, delay_s=delay_s
        )

    def _settle(self, how: Callable[..., mover.Result] | None = None) -> None:
        """Resumes or aborts what was interrupted, as soon as the nodes answer."""
        until_s = time.monotonic() + ANSWERS_S
        while True:
            try:
                for move in mover.open_moves(self._nodes.catalog):
                    finish(self._nodes, move.shard, how or self._chance.choice([mover.resume, mover.abort]))
                return
            except ClusterConflict as conflict:
                # A mover that comes to its end between its last words and the signal.
                if "no move of shard" not in conflict.message:
                    raise
            except (ConnectionFailed, MoveFailed, StatementFailed):
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)

    def _any_shard(self) -> int:
        return self._chance.randrange(SHARDS)

    def _other_node(self, shard: int) -> str:
        return "b" if self._nodes.catalog.node_of(shard).name == "a" else "a"


def test_every_write_is_there_once_whatever_befalls(
    nodes: TwoNodes, nursery: Nursery, report: Report
) -> None:
    with ExitStack() as kept:
        troubles, began = Troubles(nodes, nursery, kept), time.monotonic()
        troubles.protect("b")
        cluster = kept.enter_context(Cluster.connect(nodes.catalog_url, pool_size=WRITERS))
        application = kept.enter_context(
            Application(cluster, range(SHARDS), writers=WRITERS, every_s=0.02, may_fail=True)
        )
        while True:
            for trouble in a_round(troubles):
                before = application.writes
                trouble()
                application.raise_failures()
                assert application.writes > before
            if time.monotonic() - began > SECONDS:
                break
            troubles.protect("b")
        wait_for(lambda: writes_go_well(application), "all writers write again")
        application.stop()
        rows = assert_each_write_once(nodes, range(SHARDS), application.authors, cluster)
        assert_well(nodes)
    uncertain = sum(len(author.uncertain) for author in application.authors)
    happened = ", ".join(f"{count} {what}" for what, count in troubles.counts.items())
    report(
        f"{happened} in {time.monotonic() - began:.0f} s; {application.writes:,} writes acknowledged,"
        f" {application.refused.total():,} refused, {uncertain} uncertain,"
        f" {application.repeated:,} run again; {rows:,} rows"
    )


def a_round(troubles: Troubles) -> Sequence[Callable[[], None]]:
    return [
        troubles.move,
        troubles.kill_a_mover,
        lambda: troubles.restart("a"),
        troubles.move,
        lambda: troubles.restart("b"),
        troubles.kill_a_mover,
        lambda: troubles.lose("b"),
        troubles.move,
        troubles.kill_a_mover,
        troubles.move,
    ]


def writes_go_well(application: Application) -> bool:
    """Whether each writer had something acknowledged since this was asked first."""
    application.raise_failures()
    counts = [len(author.acknowledged) for author in application.authors]
    time.sleep(0.2)
    return all(
        len(author.acknowledged) > count for author, count in zip(application.authors, counts, strict=True)
    )


def assert_well(nodes: TwoNodes) -> None:
    """One active copy of each shard, nothing left behind, and nothing that the doctor calls an error."""
    for shard in range(SHARDS):
        home = nodes.catalog.node_of(shard).name
        for node in nodes.servers:
            with nodes.connected(node) as connection:
                states = connection.execute(
                    "select state from shardids.shard where id = %s", [shard]
                ).fetchall()
            assert states == [("active",)] if node == home else states in ([], [("moved",)])
    assert nodes.leftovers() == []
    findings = doctor.examine(nodes.catalog).findings
    assert [finding for finding in findings if str(finding.severity) == "error"] == []
