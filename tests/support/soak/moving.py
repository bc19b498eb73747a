"""Moves of shards, and their movers killed, stopped and woken."""

from __future__ import annotations

import json
import random
import shlex
import signal
import time
from collections.abc import Iterable

from shardids.mover.steps import LIVE
from tests.support.faults import connect
from tests.support.soak.commands import Running
from tests.support.soak.field import patiently
from tests.support.soak.scene import Action, Scene

LANE = "moves"
LEFT_BY_ABORT = ("leftover-slot", "leftover-publication", "leftover-subscription", "copy-unfinished")
SLEEPS_S = (2.0, 8.0, 30.0)
"""For how long a mover is stopped: the catalog gives its lock to others after 25 s."""


def move(scene: Scene, chance: random.Random) -> None:
    if (words := a_move(scene, chance)) is not None:
        ran = scene.ran(LANE, scene.launcher.start(*words))
        scene.log.count("moves" if ran.code == 0 else "moves refused or failed")


def move_several(scene: Scene, chance: random.Random) -> None:
    to = chance.choice("abc")
    shards = [shard for shard in scene.field.shards if scene.field.owner(shard) != to]
    chosen = sorted(map(str, chance.sample(shards, min(2, len(shards)))))
    if chosen:
        scene.ran(LANE, scene.launcher.start("shard", "purge", "--yes", *chosen))
        words = ("shard", "move", *chosen, "--to", to, "--jobs", "2")
        ran = scene.ran(LANE, scene.launcher.start(*words))
        scene.log.count("moves of two" if ran.code == 0 else "moves refused or failed")


def kill_a_mover(scene: Scene, chance: random.Random) -> None:
    if (words := a_move(scene, chance)) is None:
        return
    running = scene.launcher.start(*words)
    step = await_moment(scene, chance, running, int(words[2]))
    running.signal(signal.SIGKILL)
    ran = scene.ran(LANE, running)
    if ran.code is None:
        scene.log.write(LANE, f"the mover was killed at step {step!r}")
        scene.log.count("movers killed")
    if chance.random() < 0.7:
        settle_one(scene, chance)


def stop_a_mover(scene: Scene, chance: random.Random) -> None:
    """The mover is stopped for a while; meanwhile somebody else may take the move over."""
    if (words := a_move(scene, chance)) is None:
        return
    running = scene.launcher.start(*words)
    step = await_moment(scene, chance, running, int(words[2]))
    running.signal(signal.SIGSTOP)
    sleep_s = chance.choice(SLEEPS_S)
    scene.log.write(LANE, f"the mover of {' '.join(words)} is stopped at step {step!r}, for {sleep_s:g} s")
    scene.asleep.append(running)
    until = time.monotonic() + sleep_s
    while time.monotonic() < until and not scene.ends.is_set():
        time.sleep(min(1.0, sleep_s))
        if chance.random() < 0.2:
            settle_one(scene, chance, [int(words[2])])
    wake(scene)


def wake(scene: Scene) -> None:
    """Wakes all that were stopped, and waits until they have ended."""
    while scene.asleep:
        running = scene.asleep.pop()
        running.signal(signal.SIGCONT)
        scene.ran(LANE, running)
        scene.log.count("movers stopped and woken")


def settle_one(scene: Scene, chance: random.Random, shards: Iterable[int] | None = None) -> None:
    """Resumes or aborts a move that is not over, as an operator who may be too early."""
    moves = scene.field.open_moves(shards)
    if moves:
        how = chance.choice(["--resume", "--abort"])
        ran = scene.ran(LANE, scene.launcher.start("shard", "move", str(moves[0].shard), how))
        scene.log.count(f"moves ended by {how}" if ran.code == 0 else f"{how} refused or failed")


def tidy(scene: Scene) -> None:
    """Removes, as the doctor says, what aborted moves left on targets that did not answer."""
    for _ in range(2):
        ran = scene.judged(LANE, scene.launcher.run("doctor", "--json", deadline_s=60))
        found = [one for one in json.loads(ran.out)["findings"] if one["check"] in LEFT_BY_ABORT]
        for finding in found:
            for command in finding["commands"]:
                scene.log.write(LANE, f"doctor, {finding['check']}: {command}")
                paste(scene, command)
                scene.log.count("remedies of the doctor pasted")
        if not found:
            return


def paste(scene: Scene, command: dict[str, str]) -> None:
    """Does what the doctor says, to the letter."""
    if command["where"] == "node":
        with scene.field.connected(command["node"]) as connection:
            connection.execute(command["text"])
    elif command["where"] == "shell":
        words = shlex.split(command["text"])
        assert words[0] == "shardids", command
        ran = scene.judged(LANE, scene.launcher.run(*words[1:], deadline_s=60))
        assert ran.code == 0, f"{ran}\n{ran.out}{ran.err}"
    else:
        with patiently(lambda: connect(scene.field.catalog.url.render_as_string(False))) as connection:
            connection.execute(command["text"])


def rebalance(scene: Scene, chance: random.Random) -> None:
    words = ["rebalance", "--by", chance.choice(["size", "rows", "writes"])]
    words += chance.choice([[], ["--resume"], ["--verify"]])
    ran = scene.ran(LANE, scene.launcher.start(*words))
    scene.log.count("rebalances" if ran.code == 0 else "rebalances refused or failed")


def drain(scene: Scene, chance: random.Random) -> None:
    ran = scene.ran(LANE, scene.launcher.start("rebalance", "--drain", chance.choice("abc")))
    scene.log.count("nodes drained" if ran.code == 0 else "drains refused or failed")


def purge(scene: Scene, _chance: random.Random) -> None:
    ran = scene.ran(LANE, scene.launcher.start("shard", "purge", "all", "--yes"))
    scene.log.count("purges" if ran.code == 0 else "purges refused or failed")


def a_move(scene: Scene, chance: random.Random) -> tuple[str, ...] | None:
    """The command for a move of a shard that is not being moved; first an old copy is purged where one is."""
    busy = {move.shard for move in scene.field.open_moves()}
    free = [shard for shard in scene.field.shards if shard not in busy]
    if not free:
        settle_one(scene, chance)
        return None
    shard = chance.choice(free)
    target = chance.choice([node for node in "abc" if node != scene.field.owner(shard)])
    more = chance.choice([(), (), (), ("--verify",), ("--max-pause", "500ms"), ("--offline",)])
    if scene.field.former_node(shard) == target:
        return ("shard", "move", str(shard), "--back", *more)
    scene.ran(LANE, scene.launcher.start("shard", "purge", str(shard), "--yes"))
    return ("shard", "move", str(shard), "--to", target, *more)


def await_moment(scene: Scene, chance: random.Random, running: Running, shard: int) -> str:
    """Returns at some moment of a move, often at a certain step; the step that the journal is at."""
    wanted = chance.choice([*(step.name for step in LIVE), None, None, None])
    until, step = time.monotonic() + (20.0 if wanted else chance.uniform(0.3, 3.0)), "none"
    while running.is_alive() and time.monotonic() < until:
        found = scene.field.open_moves([shard])
        step = found[0].step if found else step
        if step == wanted:
            time.sleep(chance.choice([0.0, chance.uniform(0, 0.3)]))
            break
        time.sleep(0.01)
    return step


ACTIONS = (
    Action(name="move", weight=5, act=move),
    Action(name="move several", weight=2, act=move_several),
    Action(name="kill a mover", weight=4, act=kill_a_mover),
    Action(name="stop a mover", weight=2, act=stop_a_mover),
    Action(name="settle", weight=2, act=settle_one),
    Action(name="rebalance", weight=2, act=rebalance),
    Action(name="drain", weight=1, act=drain),
    Action(name="purge", weight=1, act=purge),
)
