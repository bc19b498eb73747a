"""Movers that are stopped, not ended, and wake up when another process has taken their move over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.mover.journal import Result
from shardids.mover.steps import LIVE, OFFLINE
from shardids.pg.embedded import temporary_servers
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.killed_moves import finish
from tests.support.moves import TwoNodes, Writers, assert_nothing_lost, assert_one_owner, two_nodes

_SLEEPING = """
import os, signal
from shardids import mover
from shardids.catalog import Catalog
from shardids.replication import barrier
barrier._BEAT_S, barrier._LOST_AFTER = 0.5, "2s"
def watch(event):
    if isinstance(event, mover.{kind}) and event.step == {step!r}:
        print("asleep", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
mover.move(Catalog({url!r}), {shard}, "b", options=mover.Options(offline={offline}), on_event=watch)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 128)
        yield nodes
        nodes.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


EVERY = [(step.name, kind) for step in LIVE for kind in ("StepBegun", "StepDone")]
SOME = [("subscribe", "StepBegun"), ("cutover", "StepBegun"), ("cutover", "StepDone"), ("place", "StepBegun")]


@pytest.mark.parametrize("how", [mover.resume, mover.abort])
@pytest.mark.parametrize(("step", "kind"), scaled(SOME, EVERY))
def test_a_mover_that_wakes_up_changes_nothing_more(
    nodes: TwoNodes, nursery: Nursery, step: str, kind: str, how: Callable[[Catalog, int], Result]
) -> None:
    wakes_up(nodes, nursery, step, kind, how, offline=False)


EVERY_OFFLINE = [(step.name, kind) for step in OFFLINE for kind in ("StepBegun", "StepDone")]


@pytest.mark.parametrize("how", [mover.resume, mover.abort])
@pytest.mark.parametrize(("step", "kind"), scaled([("activate", "StepDone")], EVERY_OFFLINE))
def test_an_offline_mover_that_wakes_up_changes_nothing_more(
    nodes: TwoNodes, nursery: Nursery, step: str, kind: str, how: Callable[[Catalog, int], Result]
) -> None:
    wakes_up(nodes, nursery, step, kind, how, offline=True)


def wakes_up(
    nodes: TwoNodes,
    nursery: Nursery,
    step: str,
    kind: str,
    how: Callable[[Catalog, int], Result],
    *,
    offline: bool,
) -> None:
    shard = nodes.new_shard()
    with Writers(nodes, shard, 2, every_s=0.005) as writers:
        process = nursery.start(
            _SLEEPING.format(kind=kind, step=step, url=nodes.catalog_url, shard=shard, offline=offline)
        )
        assert nursery.line() == "asleep"
        try:
            outcome = finish(nodes, shard, how).outcome
        finally:
            os.kill(process, signal.SIGCONT)
        said = nursery.line()
        assert said != "done", said
        before = writers.rows
        time.sleep(0.2)
        assert writers.rows > before
    assert nodes.catalog.node_of(shard).name == ("b" if outcome == "moved" else "a")
    assert_one_owner(nodes, shard)
    assert_nothing_lost(nodes, shard, writers)
