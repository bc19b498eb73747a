"""Adoptions that go back, killed at each step: no acknowledged write is lost or doubled."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shardids.adopt import adoption
from shardids.adopt.run.journal import KEPT
from shardids.adopt.steps import AFTER, AFTER_BACK, BACK, END, SWITCH
from shardids.pg.embedded import temporary_servers
from tests.faults.test_interrupted_adoptions import finish
from tests.support.adoptions import Clients, Shop, assert_as_before, assert_in_shards, begin_anew, new_shop
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.returns import ShardClients, assert_at_source, same_everywhere

_DYING = """
import os
from shardids.adopt import adoption
from shardids.replication import steps
from shardids.catalog.rows import Catalog
def watch(event):
    if isinstance(event, steps.{kind}) and event.step == {step!r}:
        print("dying", flush=True)
        os.kill(os.getpid(), 9)
{call}(Catalog({url!r}), on_event=watch{options})
print("not killed", flush=True)
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers, can_go_back=True)
        if not shop.has_row_filters:
            pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
        yield shop
        shop.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("from shardids.adopt import adoption")
    yield nursery
    nursery.close()


def killed(shop: Shop, nursery: Nursery, call: str, *, step: str, kind: str, options: str = "") -> None:
    nursery.start(_DYING.format(call=call, step=step, kind=kind, url=shop.catalog_url, options=options))
    said = nursery.line()
    assert said == "dying", said


def each(steps: object) -> list[tuple[str, str]]:
    return [(step.name, kind) for step in steps for kind in ("StepBegun", "StepDone")]  # type: ignore[attr-defined]  # steps


def written(shop: Shop) -> ShardClients:
    """Clients that write to the shards for a moment."""
    with ShardClients(shop, 8) as clients:
        while clients.count < 40:
            time.sleep(0.01)
    return clients


def return_and_empty(shop: Shop, clients: Clients, *in_shards: ShardClients) -> None:
    """Returns to the source, which has all that was acknowledged, and empties the shards."""
    if adoption.status(shop.catalog).adoption.step != "returned":  # type: ignore[union-attr]  # one is under way
        assert adoption.back(shop.catalog).step == "returned"
    for one in in_shards:
        assert_at_source(shop, clients, one)
    same_everywhere(shop)
    assert adoption.abort(shop.catalog).outcome == "returned"
    assert_as_before(shop)


EVERY_SWITCH = each((*SWITCH, *AFTER))
SOME_SWITCH = [("way back", "StepDone"), ("begin", "StepDone")]


@pytest.mark.parametrize(("step", "kind"), scaled(SOME_SWITCH, EVERY_SWITCH))
def test_a_switch_that_keeps_a_way_back(shop: Shop, nursery: Nursery, step: str, kind: str) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        killed(shop, nursery, "adoption.switch", step=step, kind=kind, options=", keep_back=True")
        assert finish(shop, adoption.resume).step == KEPT
    assert_in_shards(shop, clients)
    return_and_empty(shop, clients, written(shop))


@pytest.mark.parametrize("kind", scaled(["StepDone"], ["StepBegun", "StepDone"]))
def test_a_switch_that_was_to_keep_a_way_back_is_aborted(shop: Shop, nursery: Nursery, kind: str) -> None:
    with Clients(shop):
        adoption.run(shop.catalog, shop.plan)
        killed(shop, nursery, "adoption.switch", step="way back", kind=kind, options=", keep_back=True")
        assert finish(shop, adoption.abort).outcome == "aborted"
    assert_as_before(shop)


EVERY_BACK = each((*BACK, *AFTER_BACK))
SOME_BACK = [("hand back", "StepBegun"), ("hand back", "StepDone"), ("reopen", "StepDone")]


@pytest.mark.parametrize(("step", "kind"), scaled(SOME_BACK, EVERY_BACK))
def test_a_return(shop: Shop, nursery: Nursery, step: str, kind: str) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        adoption.switch(shop.catalog, keep_back=True)
    with ShardClients(shop, 8) as in_shards:
        killed(shop, nursery, "adoption.back", step=step, kind=kind)
        assert finish(shop, adoption.resume).step == "returned"
    assert all(one.refused for one in in_shards.written)
    return_and_empty(shop, clients, in_shards)


@pytest.mark.parametrize(("step", "kind"), scaled([("hand back", "StepBegun")], each(BACK)[:-1]))
def test_a_return_is_given_up(shop: Shop, nursery: Nursery, step: str, kind: str) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        adoption.switch(shop.catalog, keep_back=True)
    with ShardClients(shop, 8) as in_shards:
        killed(shop, nursery, "adoption.back", step=step, kind=kind)
        assert finish(shop, adoption.abort).step == KEPT
        before = in_shards.count
        while in_shards.count < before + 10:
            time.sleep(0.01)
    assert not any(one.refused for one in in_shards.written)
    return_and_empty(shop, clients, in_shards)


@pytest.mark.parametrize("kind", scaled(["StepDone"], ["StepBegun", "StepDone"]))
def test_an_end_of_the_way_back(shop: Shop, nursery: Nursery, kind: str) -> None:
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        adoption.switch(shop.catalog, keep_back=True)
    written(shop)
    killed(shop, nursery, "adoption.finish", step=END[0].name, kind=kind)
    assert finish(shop, adoption.resume).outcome == "adopted"
    assert_in_shards(shop, clients)
    assert [one for one in shop.leftovers() if not one.startswith("source")] == []
    begin_anew(shop)
