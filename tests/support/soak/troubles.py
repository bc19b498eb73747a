"""What befalls servers and networks."""

from __future__ import annotations

import random
import time

from tests.support.soak.scene import Action, Scene

LANE = "troubles"
REPLACE_S = 60.0


def restart(scene: Scene, chance: random.Random) -> None:
    node, mode = chance.choice("abc"), chance.choice(["fast", "immediate"])
    scene.log.write(LANE, f"node {node} restarts, {mode}")
    scene.field.servers[node].restart(mode)  # type: ignore[arg-type]  # one of two literals
    scene.log.count("restarts")


def silence(scene: Scene, chance: random.Random) -> None:
    """The network to a node, or to the catalog, swallows packets, or delivers them late."""
    where, seconds = chance.choice(["a", "b", "c", "catalog"]), chance.choice([2.0, 8.0, 20.0, 28.0])
    proxy, is_late = scene.field.proxies[where], chance.random() < 0.5
    how = "delivers late" if is_late else "swallows"
    scene.log.write(LANE, f"the network to {where} {how} for {seconds:g} s")
    if is_late:
        proxy.hold()
    else:
        proxy.swallow()
    scene.ends.wait(seconds)
    proxy.forward()
    scene.log.write(LANE, f"the network to {where} is back")
    scene.log.count("dead networks" if not is_late else "late networks")


def fail_over(scene: Scene, chance: random.Random) -> None:
    """A node with a synchronous standby is lost for good, and the standby put in its place."""
    node = chance.choice("bc")
    if not scene.field.is_protected(node):
        scene.log.write(LANE, f"node {node} gets a standby")
        scene.field.protect(node)
        scene.ends.wait(chance.uniform(0, 5))
    scene.log.write(LANE, f"node {node} is lost")
    url = scene.field.lose(node)
    replace(scene, node, url)


def replace(scene: Scene, node: str, url: str) -> None:
    """``node replace``, again if the catalog or a server was not there."""
    until = time.monotonic() + REPLACE_S
    while True:
        ran = scene.ran(LANE, scene.launcher.start("node", "replace", node, "--url", url))
        if ran.code == 0:
            assert "Fenced" not in ran.err, ran.err
            scene.log.count("failovers")
            return
        assert time.monotonic() < until, f"{ran}\n{ran.out}{ran.err}"
        time.sleep(0.5)


def end_sessions(scene: Scene, chance: random.Random) -> None:
    """A DBA ends sessions on a node, whoever they are."""
    node = chance.choice("abc")
    with scene.field.connected(node) as admin:
        ended = admin.execute(
            """select count(pg_terminate_backend(pid)) from pg_stat_activity
               where pid <> pg_backend_pid() and random() < %s
                 and backend_type in ('client backend', 'walsender', 'logical replication apply worker')""",
            [chance.choice([0.2, 1.0])],
        ).fetchone()
    scene.log.write(LANE, f"{ended[0] if ended else 0} sessions on node {node} were ended")
    scene.log.count("times sessions were ended")


def rest(scene: Scene, chance: random.Random) -> None:
    scene.ends.wait(chance.uniform(3, 12))


ACTIONS = (
    Action(name="nothing", weight=8, act=rest),
    Action(name="restart", weight=2, act=restart),
    Action(name="silence", weight=3, act=silence),
    Action(name="fail over", weight=1, act=fail_over),
    Action(name="end sessions", weight=1, act=end_sessions),
)
