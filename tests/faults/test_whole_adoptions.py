"""An adoption that returns and another that stays, killed at random: no acknowledged write is lost.

While clients write, the process that works dies, or a node's server, or that of the catalog (which is a
node's, too), at random steps: from the first copy of rows over the switch that keeps a way back, and the
return, to the second adoption's end.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from shardids.adopt import adoption
from shardids.adopt.plan.document import plan_text
from shardids.adopt.run.journal import FOLLOW, KEPT, RETURNED, open_adoption
from shardids.adopt.steps import AFTER, AFTER_BACK, BACK, END, RUN, SWITCH
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import ABORT, Event, OnEvent, StepBegun, StepDone, ignore
from tests.support.adoptions import Clients, Shop, assert_as_before, assert_in_shards, new_shop
from tests.support.clusters import Nursery
from tests.support.faults import scaled
from tests.support.returns import ShardClients, assert_at_source, same_everywhere

_logger = logging.getLogger(__name__)
KILLS = scaled(3, 20)
_PATIENCE_S = 90
_DYING = """
import os
from shardids.adopt.plan.document import parse_plan
from shardids.catalog.rows import Catalog
from shardids.replication import steps
from tests.faults.test_whole_adoptions import proceed
def watch(event):
    if event == steps.{kind}(step={step!r}):
        print("dying", flush=True)
        os.kill(os.getpid(), 9)
proceed(Catalog({url!r}), parse_plan({plan!r}, "plan"), {phase!r}, watch)
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
    nursery = Nursery("from shardids.adopt import adoption\nimport tests.faults.test_whole_adoptions")
    yield nursery
    nursery.close()


def proceed(catalog: object, plan: object, phase: str, on_event: OnEvent) -> None:
    """Take the command that brings an adoption on in its phase, or resumes it."""
    its = open_adoption(catalog)  # type: ignore[arg-type] -- a child's script has no types
    first = {
        "run": lambda: adoption.run(catalog, plan, on_event=on_event),  # type: ignore[arg-type] -- as above
        "switch": lambda: adoption.switch(catalog, keep_back=True, on_event=on_event),  # type: ignore[arg-type] -- as above
        "back": lambda: adoption.back(catalog, on_event=on_event),  # type: ignore[arg-type] -- as above
        "abort": lambda: adoption.abort(catalog, on_event=on_event),  # type: ignore[arg-type] -- as above
        "finish": lambda: adoption.finish(catalog, on_event=on_event),  # type: ignore[arg-type] -- as above
    }[phase]
    begins_at = {"run": None, "switch": FOLLOW, "back": KEPT, "abort": RETURNED, "finish": KEPT}[phase]
    if (its.step if its else None) == begins_at:
        first()
    else:
        adoption.resume(catalog, on_event=on_event)  # type: ignore[arg-type] -- as above


@dataclass(frozen=True)
class Kill:
    phase: str
    event: Event
    what: str


PHASES = (
    ("run", "switch", "back", "abort"),
    ("run", "switch", "finish"),
)
STEPS = {
    "run": [step.name for step in RUN],
    "switch": [step.name for step in (*SWITCH, *AFTER)],
    "back": [step.name for step in (*BACK, *AFTER_BACK)],
    "abort": [ABORT],
    "finish": [step.name for step in END],
}


def choose(chance: random.Random) -> list[list[Kill]]:
    """The kills of both adoptions, in the order of their steps: of processes while clients use shards."""
    places = [
        (number, phase, kind(step=step))
        for number, phases in enumerate(PHASES)
        for phase in phases
        for step in STEPS[phase]
        for kind in (StepBegun, StepDone)
    ]
    chosen = sorted(chance.sample(range(len(places)), KILLS))
    kills: list[list[Kill]] = [[] for _ in PHASES]
    for place in chosen:
        number, phase, event = places[place]
        what = "process" if phase == "back" else chance.choice(["process", "process", "b", "a"])
        kills[number].append(Kill(phase, event, what))
    return kills


class Driver:
    """Brings adoptions on while it is killed."""

    def __init__(self, shop: Shop, nursery: Nursery) -> None:
        self.shop, self._nursery, self.done = shop, nursery, list[Kill]()

    def take(self, phase: str, kills: list[Kill]) -> None:
        """Bring an adoption to the end of a phase, over all kills of it."""
        for kill in kills:
            if kill.phase == phase and not self._is_over(phase):
                if kill.what == "process":
                    self._kill_process(kill)
                else:
                    self._kill_server(kill)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_over(phase):
            try:
                proceed(self.shop.catalog, self.shop.plan, phase, ignore)
            except (ClusterConflict, ConnectionFailed):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _is_over(self, phase: str) -> bool:
        its = open_adoption(self.shop.catalog)
        if phase in ("abort", "finish"):
            return its is None
        return its is not None and its.step == {"run": FOLLOW, "switch": KEPT, "back": RETURNED}[phase]

    def _kill_process(self, kill: Kill) -> None:
        assert isinstance(kill.event, StepBegun | StepDone)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._nursery.start(
                _DYING.format(
                    kind=type(kill.event).__name__,
                    step=kill.event.step,
                    url=self.shop.catalog_url,
                    plan=plan_text(self.shop.plan),
                    phase=kill.phase,
                )
            )
            said = self._nursery.line()
            if said == "not killed":
                assert self._nursery.line() == "done"
            if said in ("dying", "not killed"):
                self._note(kill, is_done=said == "dying")
                return
            # The one before is dead, and the catalog has not seen it yet.
            assert "another process" in said or "ConnectionFailed" in said, said
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _kill_server(self, kill: Kill) -> None:
        server, is_done = self.shop.servers[kill.what], False

        def watch(event: Event) -> None:
            nonlocal is_done
            if event == kill.event and not is_done:
                is_done = True
                server.kill()
                server.start(attached=True)

        deadline = time.monotonic() + _PATIENCE_S
        while not (is_done or self._is_over(kill.phase)):
            with suppress(ShardidsError):
                proceed(self.shop.catalog, self.shop.plan, kill.phase, watch)
            assert time.monotonic() < deadline
        self.shop.catalog.engine.dispose()
        self._note(kill, is_done=is_done)

    def _note(self, kill: Kill, *, is_done: bool) -> None:
        if is_done:
            self.done.append(kill)


def written(shop: Shop, then: Callable[[], None] = lambda: None) -> ShardClients:
    """Clients of the shards that write for a moment, and on while something is done."""
    with ShardClients(shop, 8) as clients:
        while clients.count < 40:
            time.sleep(0.01)
        then()
    return clients


def test_a_return_and_a_second_adoption(shop: Shop, nursery: Nursery) -> None:
    seed = int(os.environ.get("SHARDIDS_SEED") or scaled(1, time.time_ns() % 10**6))
    _logger.warning("SHARDIDS_SEED=%s", seed)
    kills = choose(random.Random(seed))
    driver = Driver(shop, nursery)
    with Clients(shop) as clients:
        driver.take("run", kills[0])
        driver.take("switch", kills[0])
    assert_in_shards(shop, clients)
    in_shards = written(shop, lambda: driver.take("back", kills[0]))
    assert all(one.refused for one in in_shards.written)
    assert_at_source(shop, clients, in_shards)
    same_everywhere(shop)
    driver.take("abort", kills[0])
    assert_as_before(shop)

    with Clients(shop) as again:
        driver.take("run", kills[1])
        driver.take("switch", kills[1])
    assert_in_shards(shop, again)
    last = written(shop)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(AssertionError):
            assert_at_source(shop, again, last)
            break
        assert time.monotonic() < deadline, "the source does not follow"
        time.sleep(0.1)
    driver.take("finish", kills[1])
    same_everywhere(shop)
    _logger.warning("%s of %s kills: %s", len(driver.done), KILLS, driver.done)
    assert driver.done
