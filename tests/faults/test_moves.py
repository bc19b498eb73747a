"""A shard that moves back and forth under writers while its movers are killed: no write lost, no ID twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest

from shardids import mover
from shardids.errors import ClusterConflict
from shardids.mover.steps import LIVE
from shardids.pg.embedded import temporary_servers
from tests.faults.conftest import DURABLE, Report
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.killed_moves import finish, killed_move
from tests.support.moves import TwoNodes, Writers, assert_nothing_lost, assert_one_owner, two_nodes

MOVES = scaled(6, 200)
KILLS = scaled(3, 50)
WRITERS = 4


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2, settings=DURABLE) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def test_movers_killed_at_random_moments(nodes: TwoNodes, nursery: Nursery, report: Report) -> None:
    chance, shard = random.Random(7), nodes.new_shard()
    killed = set(chance.sample(range(MOVES), KILLS))
    kills = 0
    with Writers(nodes, shard, WRITERS, every_s=0.002) as writers:
        for number in range(MOVES):
            if number in killed:
                step, delay_s = (
                    chance.choice(LIVE[:-1]).name,
                    chance.choice([0.0, chance.uniform(0.001, 0.15)]),
                )
                kills += killed_move(nodes, nursery, shard, step, delay_s=delay_s)
                how = chance.choice([mover.resume, mover.abort])
                # A mover may come to its end between its last words and the signal.
                with suppress(ClusterConflict):
                    finish(nodes, shard, how)
            else:
                there = "b" if nodes.catalog.node_of(shard).name == "a" else "a"
                mover.move(nodes.catalog, shard, there, back=number > 0)
            assert_one_owner(nodes, shard)
    assert kills >= KILLS * 0.8
    assert_nothing_lost(nodes, shard, writers)
    report(f"{MOVES} moves, {kills} movers killed, {writers.rows:,} rows")


@pytest.mark.skipif(MOVES < 10, reason="the long form; test_interrupted_moves.py has the short one")
def test_movers_killed_at_every_step(nodes: TwoNodes, nursery: Nursery) -> None:
    shard = nodes.new_shard()
    with Writers(nodes, shard, WRITERS, every_s=0.005) as writers:
        for step, kind, how in product(LIVE, ("StepBegun", "StepDone"), (mover.resume, mover.abort)):
            assert killed_move(nodes, nursery, shard, step.name, kind=kind)
            finish(nodes, shard, how)
            assert_one_owner(nodes, shard)
    assert_nothing_lost(nodes, shard, writers)
