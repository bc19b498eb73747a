"""Adoptions through a relay that are killed at some step: no acknowledged write is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardids.adopt import adoption
from shardids.adopt.steps import AFTER, RUN, SWITCH
from tests.faults.test_interrupted_adoptions import complete, finish, killed
from tests.support.adoptions import schema
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.relays import Store, Traffic, assert_adopted, assert_as_before, begin_anew, store_of


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with store_of() as store:
        if store.plan.server_version < 150000:
            pytest.skip("PostgreSQL 14 can be neither relay nor node")
        yield store


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("from shardids.adopt import adoption")
    yield nursery
    nursery.close()


EVERY = [(step.name, kind) for step in (*RUN, *SWITCH, *AFTER) for kind in ("StepBegun", "StepDone")]
SOME = [
    ("copy to relay", "StepBegun"),
    ("place", "StepBegun"),
    ("place", "StepDone"),
    ("switch", "StepBegun"),
]


@pytest.mark.parametrize(("step", "kind"), scaled(SOME, EVERY))
def test_killed_at_a_step_and_resumed(store: Store, nursery: Nursery, step: str, kind: str) -> None:
    with Traffic(store):
        killed(store, nursery, step=step, kind=kind)
        complete(store)
    assert_adopted(store)
    begin_anew(store)
    assert store.leftovers() == store.before


@pytest.mark.parametrize(
    ("step", "kind"), scaled([("relay", "StepDone"), ("copy", "StepBegun")], EVERY[: 2 * len(RUN) + 5])
)
def test_killed_at_a_step_and_aborted(store: Store, nursery: Nursery, step: str, kind: str) -> None:
    with Traffic(store):
        killed(store, nursery, step=step, kind=kind)
        assert finish(store, adoption.abort).outcome == "aborted"
    assert_as_before(store)


@pytest.mark.parametrize("delay_s", scaled([2.0], [0.2 * n for n in range(1, 31)]))
def test_killed_at_a_moment_of_the_run(store: Store, nursery: Nursery, delay_s: float) -> None:
    with Traffic(store):
        killed(store, nursery, delay_s=delay_s)
        if adoption.status(store.catalog) is not None:
            complete(store)
    if any(store.rows("users", "1")):
        assert_adopted(store)
    begin_anew(store)


def test_clients_write_to_shards_before_their_tables_are_on_their_own(store: Store, nursery: Nursery) -> None:
    killed(store, nursery, step="old ids", kind="StepBegun")
    with store.connected("a") as node:
        shard = store.catalog.placement().by_node()["a"][0]
        for statement in (
            "insert into {s}.users (name) values ('new')",
            'insert into {s}."Orders" (user_id) select max(id) from {s}.users',
            'insert into {s}.items select max(id), 7 from {s}."Orders"',
            'insert into {s}.parts (order_id, item) select max(id), 7 from {s}."Orders"',
            "update {s}.items set number = 8 where number = 7",
        ):
            node.execute(statement.replace("{s}", schema(shard)))
        parts = f"select count(*) from {schema(shard)}.parts where item = 8"
        assert node.execute(parts).fetchone() == (1,)
        complete(store)
        assert node.execute(parts).fetchone() == (1,)
    begin_anew(store)
    assert store.leftovers() == store.before
