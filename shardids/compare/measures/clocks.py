"""Servers and clients under clocks that can be stepped, one a node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from shardids.compare.measures.measuring import FAILURES, NODES, Measuring, connected
from shardids.compare.testbed.clients import client_processes
from shardids.compare.testbed.faketime import FakedClock, faked_clock
from shardids.compare.testbed.stage import stage_for
from shardids.errors import UnsupportedServer

CLIENTS: Final = 4
"""How many clients there are under each clock in turn."""
_PROOF_S: Final = 10.0


@contextlib.contextmanager
def faked_clocks(run: Measuring) -> Iterator[tuple[Measuring, Sequence[FakedClock]]]:
    """Starts other servers and clients, under a clock for each node, and installs the schemes there.

    Raises:
        MissingLibrary: libfaketime is not installed.
        UnsupportedServer: libfaketime has no effect here.
        ServerStartFailed: a server does not start under it.
    """
    run.say("clocks: starting servers")
    with contextlib.ExitStack() as stack:
        clocks = [stack.enter_context(faked_clock()) for _ in range(NODES)]
        envs = [clock.env for clock in clocks]
        stage = stack.enter_context(stage_for(list(run.schemes.values()), envs=envs))
        clients = stack.enter_context(client_processes(CLIENTS, envs))
        faked = replace(run, servers=stage.servers, clients=clients)
        _prove(clocks, faked)
        for name, scheme in run.schemes.items():
            try:
                scheme.install(stage.servers)
            except FAILURES as error:
                for what in ("causality", "clock back"):
                    run.leave_out(name, what, error)
        yield faked, clocks


def _prove(clocks: Sequence[FakedClock], run: Measuring) -> None:
    """Steps the clocks, then asks all servers and a client of each for the time.

    Raises:
        UnsupportedServer: one of them does not see the step.
    """
    for clock in clocks:
        clock.step(-_PROOF_S)
    times = run.clients.run(_telling_the_time, [()] * NODES)
    for node in range(NODES):
        with connected(run.servers, node) as connection:
            query = "select date_part('epoch', clock_timestamp())"
            times += [float(row[0]) for row in connection.execute(query)]
    if max(times) > time.time() - _PROOF_S / 2:
        raise UnsupportedServer("libfaketime is installed, but has no effect on all servers and clients")


@contextlib.contextmanager
def _telling_the_time() -> Iterator[Callable[[], float]]:
    yield time.time
