"""Moves whose process is killed at some step, and what ends them."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardids import mover
from shardids.errors import ClusterConflict
from tests.support.clusters import Nursery
from tests.support.moves import TwoNodes

KILLED = """
import os, threading, time
from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
def watch(event):
    if isinstance(event, mover.{kind}) and event.step == {step!r}:
        def die():
            print("dying", flush=True)
            os.kill(os.getpid(), 9)
        threading.Timer({delay_s}, die).start() if {delay_s} else die()
options = mover.Options(offline={offline})
mover.move(Catalog({url!r}), {shard}, {to!r}, back={back}, options=options, on_event=watch)
time.sleep({delay_s} and 60)  # It dies in any case, if perhaps after the move.
"""


def killed_move(
    nodes: TwoNodes,
    nursery: Nursery,
    shard: int,
    step: str,
    *,
    kind: str = "StepBegun",
    offline: bool = False,
    delay_s: float = 0.0,
) -> bool:
    """Moves a shard to the other node and kills the mover at a step or soon after; false if none came."""
    to = "b" if nodes.catalog.node_of(shard).name == "a" else "a"
    with nodes.connected(to) as connection:
        back = (
            connection.execute("select count(*) from shardids.shard where id = %s", [shard]).fetchone()[0] > 0
        )
    script = KILLED.format(
        kind=kind,
        step=step,
        delay_s=delay_s,
        url=nodes.catalog_url,
        shard=shard,
        to=to,
        back=back,
        offline=offline,
    )
    nursery.start(script)
    said = nursery.line()
    assert said in ("dying", "done"), said
    return said == "dying"


def finish(nodes: TwoNodes, shard: int, how: Callable[..., mover.Result]) -> mover.Result:
    """Resumes or aborts a move as soon as its mover's lock is gone."""
    deadline = time.monotonic() + 40
    while True:
        try:
            return how(nodes.catalog, shard)
        except ClusterConflict as conflict:
            if "by another process" not in conflict.message or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
