"""Keys that come twice while the clocks of servers and clients step back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from shardids.compare.clients import client_processes
from shardids.compare.duplicates import BATCH, Pace, counted, rushing
from shardids.compare.faketime import FakedClock, faked_clock
from shardids.compare.inserts import NODES, connected
from shardids.compare.measuring import FAILURES, Measuring
from shardids.compare.results import Duplicates
from shardids.compare.stage import stage_for
from shardids.errors import UnsupportedServer

_CLIENTS: Final = 4
_STEP_BACK_S: Final = 0.1
_STEP_EVERY_S: Final = 0.05
_PROOF_S: Final = 10.0


def measure_clocks(run: Measuring) -> dict[str, Duplicates]:
    """Four clients, half of them on each node; servers of their own, all under one clock.

    Raises:
        MissingLibrary: libfaketime is not installed.
        UnsupportedServer: it has no effect here.
        ServerStartFailed: a server does not start under it.
    """
    run.say("clock back: starting servers")
    with (
        faked_clock() as clock,
        stage_for(list(run.schemes.values()), env=clock.env) as stage,
        client_processes(_CLIENTS, clock.env) as clients,
    ):
        faked = replace(run, servers=stage.servers, clients=clients)
        _prove(clock, faked)
        for name, scheme in run.schemes.items():
            try:
                scheme.install(stage.servers)
            except FAILURES as error:
                run.leave_out(name, "clock back", error)
        return faked.each("clock back", lambda name: _while_it_steps_back(name, clock, faked))


def _while_it_steps_back(name: str, clock: FakedClock, run: Measuring) -> Duplicates:
    steps, most = run.sizes.steps, run.sizes.clock_keys
    seconds = (steps + 2) * _STEP_EVERY_S
    pace = Pace(seconds, most, batch_s=seconds * BATCH / most)
    jobs = [(name, run.servers, number % NODES, pace) for number in range(_CLIENTS)]
    wait = run.clients.begin(rushing, jobs)
    # Only back: what follows the steps would otherwise be later than all that was before.
    for _ in range(steps):
        time.sleep(_STEP_EVERY_S)
        clock.step(-_STEP_BACK_S)
    return counted("clock back", wait())


def _prove(clock: FakedClock, run: Measuring) -> None:
    """Steps the clock, and asks all servers and a client for the time.

    Raises:
        UnsupportedServer: one of them does not see the step.
    """
    clock.step(-_PROOF_S)
    times = run.clients.run(_telling_the_time, [()])
    for node in range(NODES):
        with connected(run.servers, node) as connection:
            query = "select date_part('epoch', clock_timestamp())"
            times += [float(row[0]) for row in connection.execute(query)]
    if max(times) > time.time() - _PROOF_S / 2:
        raise UnsupportedServer("libfaketime is installed, but has no effect on all servers and clients")


@contextlib.contextmanager
def _telling_the_time() -> Iterator[Callable[[], float]]:
    yield time.time
