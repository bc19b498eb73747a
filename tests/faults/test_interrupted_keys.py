"""Keys that are changed where they are by a process that is killed: no row is lost or doubled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.engine import URL

from shardids.adopt.inplace.keys import change_key, finish, status, take_back
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict
from shardids.ids.layout import DEFAULT
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.keys import Clients, assert_consistent, dumped, fill_shop, one

ORDERS = "public.orders"

_DYING = """
import os, threading, time
from shardids.adopt.inplace.keys import change_key, finish, take_back
from shardids.adopt.inplace.changing import How
from shardids.catalog.rows import Catalog
from tests.support.keys import on_steps
seen = []
def die():
    print("dying", flush=True)
    os.kill(os.getpid(), 9)
def step(name):
    seen.append(name)
    if len(seen) > {place}:
        die()
if {delay_s}:
    threading.Timer({delay_s}, die).start()
catalog = Catalog({url!r})
how = How(on_event=on_steps(step), batch=200)
for work in ({works}):
    work(catalog, "public.orders", 0, how)
time.sleep({delay_s} and 60)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("from shardids.adopt.inplace import keys")
    yield nursery
    nursery.close()


@pytest.fixture
def shop(blank_database: Callable[[], URL]) -> Iterator[tuple[URL, Catalog]]:
    url = blank_database()
    fill_shop(url)
    catalog = Catalog(url)
    yield url, catalog
    catalog.close()


def killed(
    nursery: Nursery, url: URL, works: str = "change_key, finish", *, place: int = 1000, delay_s: float = 0.0
) -> str:
    """Begins a change and kills its process where a step would begin, or after a time."""
    text = url.render_as_string(hide_password=False)
    nursery.start(_DYING.format(url=text, works=works + ",", place=place, delay_s=delay_s))
    return nursery.line()


def patiently(work: Callable[[], object]) -> None:
    """Repeats what is refused as long as the server has not noticed that the process is dead."""
    deadline = time.monotonic() + 60
    while True:
        try:
            work()
        except ClusterConflict as conflict:
            if "another process" not in conflict.message or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def complete(catalog: Catalog) -> None:
    """Brings an interrupted change to its end, whichever way it was going."""
    state = status(catalog, ORDERS, 0).state
    if state == "returning":
        patiently(lambda: take_back(catalog, ORDERS, 0))
    if state in ("widening", "swapped"):
        patiently(lambda: change_key(catalog, ORDERS, 0))
        patiently(lambda: finish(catalog, ORDERS, 0))


@pytest.mark.parametrize("place", scaled([0, 3, 11, 15, 16], list(range(18))))
def test_killed_at_a_step_and_gone_on(shop: tuple[URL, Catalog], nursery: Nursery, place: int) -> None:
    url, catalog = shop
    with Clients(url) as clients:
        assert killed(nursery, url, place=place) in ("dying", "done")
        complete(catalog)
    assert_consistent(url, clients)
    assert one(url, "insert into orders (customer_id) values (1) returning shardids.shard_of(id)") == 0
    assert status(catalog, ORDERS, 0).state is None


@pytest.mark.parametrize("place", scaled([1, 8, 15, 20, 26], list(range(0, 34))))
def test_killed_on_the_way_back(shop: tuple[URL, Catalog], nursery: Nursery, place: int) -> None:
    url, catalog = shop
    before = dumped(url)
    with Clients(url) as clients:
        assert killed(nursery, url, "change_key, take_back", place=place) in ("dying", "done")
        if status(catalog, ORDERS, 0).state is not None:
            patiently(lambda: take_back(catalog, ORDERS, 0))
    assert_consistent(url, clients)
    assert dumped(url) == before


def test_killed_at_any_moment(shop: tuple[URL, Catalog], nursery: Nursery) -> None:
    url, catalog = shop
    chance = random.Random(20261122)
    before = dumped(url)
    with Clients(url) as clients:
        for _ in range(scaled(4, 30)):
            killed(nursery, url, "change_key, take_back", delay_s=chance.uniform(0.05, 2.5))
        if status(catalog, ORDERS, 0).state is not None:
            patiently(lambda: take_back(catalog, ORDERS, 0))
        assert dumped(url) == before
        patiently(lambda: change_key(catalog, ORDERS, 0))
        patiently(lambda: finish(catalog, ORDERS, 0))
    assert_consistent(url, clients)
    new = [id_ for id_ in clients.orders if id_ > 1 << 40]
    assert {DEFAULT.shard_of(id_) for id_ in new} == {0}
