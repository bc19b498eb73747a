"""Adoptions that are killed at some step, or at any moment: no acknowledged write is lost or doubled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from shardids.adopt import adoption
from shardids.adopt.adoption import Result
from shardids.adopt.plan.document import plan_text
from shardids.adopt.run.journal import adoptions, open_adoption
from shardids.adopt.steps import AFTER, RUN, SWITCH
from shardids.errors import ClusterConflict
from shardids.pg.embedded import temporary_servers
from tests.support.adoptions import (
    Clients,
    Shop,
    assert_as_before,
    assert_in_shards,
    begin_anew,
    new_shop,
)
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.interrupts import interrupt_after

_DYING = """
import os, threading, time
from shardids.adopt import adoption
from shardids.replication import steps
from shardids.adopt.plan.document import parse_plan
from shardids.catalog.rows import Catalog
def die():
    print("dying", flush=True)
    os.kill(os.getpid(), 9)
def watch(event):
    if isinstance(event, steps.{kind}) and event.step == {step!r}:
        die()
if {delay_s}:
    threading.Timer({delay_s}, die).start()
catalog = Catalog({url!r})
adoption.run(catalog, parse_plan({plan!r}, "plan"), on_event=watch)
adoption.switch(catalog, on_event=watch)
time.sleep({delay_s} and 60)
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        if not shop.has_row_filters:
            pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
        yield shop
        shop.catalog.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("from shardids.adopt import adoption")
    yield nursery
    nursery.close()


def killed(
    shop: Shop, nursery: Nursery, *, step: str = "", kind: str = "StepDone", delay_s: float = 0.0
) -> None:
    """Begins an adoption, its switch included, and kills the process at a step or after a time."""
    nursery.start(
        _DYING.format(kind=kind, step=step, delay_s=delay_s, url=shop.catalog_url, plan=plan_text(shop.plan))
    )
    said = nursery.line()
    assert said == "dying", said


def finish(shop: Shop, how: Callable[..., Result]) -> Result:
    """Resumes or aborts as soon as the dead process' lock is gone."""
    deadline = time.monotonic() + 40
    while True:
        try:
            return how(shop.catalog)
        except ClusterConflict as conflict:
            if "another process" not in conflict.message or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def complete(shop: Shop) -> None:
    """Brings an interrupted adoption to its end."""
    done = finish(shop, adoption.resume)
    if done.outcome is None:
        assert adoption.switch(shop.catalog).outcome == "adopted"


EVERY = [(step.name, kind) for step in (*RUN, *SWITCH, *AFTER) for kind in ("StepBegun", "StepDone")]
SOME = [("stage", "StepBegun"), ("subscribe", "StepDone"), ("switch", "StepBegun"), ("switch", "StepDone")]


@pytest.mark.parametrize(("step", "kind"), scaled(SOME, EVERY))
def test_killed_at_a_step_and_resumed(shop: Shop, nursery: Nursery, step: str, kind: str) -> None:
    with Clients(shop) as clients:
        killed(shop, nursery, step=step, kind=kind)
        complete(shop)
    assert_in_shards(shop, clients)
    begin_anew(shop)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_interrupt_between_the_switch_and_its_answer(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The source stays closed: the shards have taken over, and will take writes."""
    with Clients(shop) as clients:
        adoption.run(shop.catalog, shop.plan)
        with monkeypatch.context() as patch:
            interrupt_after(
                patch,
                "select from shardids_catalog.adoption where ended_at is null and switched_at is not null",
                is_lost=is_lost,
            )
            with pytest.raises(KeyboardInterrupt):
                adoption.switch(shop.catalog)
        with shop.connected("source") as connection, pytest.raises(psycopg.Error) as refused:
            connection.execute("update users set name = name")
        assert refused.value.sqlstate == "SI003"
        complete(shop)
    assert_in_shards(shop, clients)
    begin_anew(shop)


@pytest.mark.parametrize(
    ("step", "kind"), scaled([("copy", "StepDone"), ("switch", "StepBegun")], EVERY[: 2 * len(RUN) + 5])
)
def test_killed_at_a_step_and_aborted(shop: Shop, nursery: Nursery, step: str, kind: str) -> None:
    with Clients(shop) as clients:
        killed(shop, nursery, step=step, kind=kind)
        assert finish(shop, adoption.abort).outcome == "aborted"
        before = clients.count
        time.sleep(0.1)
        assert clients.count > before
    assert_as_before(shop)


def test_after_the_switch_there_is_no_abort(shop: Shop, nursery: Nursery) -> None:
    killed(shop, nursery, step="switch")
    with pytest.raises(ClusterConflict, match="the shards have taken over"):
        finish(shop, adoption.abort)
    complete(shop)
    assert_in_shards(shop)
    begin_anew(shop)


def test_killed_at_any_moment(shop: Shop, nursery: Nursery) -> None:
    chance = random.Random(20261122)
    for _ in range(scaled(2, 30)):
        with Clients(shop) as clients:
            killed(shop, nursery, delay_s=chance.uniform(0.05, 3.5))
            if open_adoption(shop.catalog) is not None:
                complete(shop)
        if adoptions(shop.catalog):
            assert_in_shards(shop, clients)
        begin_anew(shop)
