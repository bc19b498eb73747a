"""Round by round: everything at random, then all brought to its end and examined."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from shardids import Cluster
from tests.support.soak import altering, checks, moving, troubles
from tests.support.soak.altering import Altering
from tests.support.soak.commands import Stuck
from tests.support.soak.loads import Loader, Preparer
from tests.support.soak.records import Expected
from tests.support.soak.scene import Action, Scene
from tests.support.soak.writers import Gate, Lingerer, Rows, Writer

SETTLE_S = 180.0
WRITES_AGAIN_S = 30.0
WRITERS: tuple[type[Writer], ...] = (Rows, Lingerer, Loader, Preparer)
SHARDS = 6
CALM = 0.4
"""How often a round is without one of the lanes other than moves: more moves come to their end then."""


class Soak:
    """A cluster, its writers, and lanes of actions, all drawn with one seed."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.seed = scene, seed
        self.expected = Expected()
        self.rounds = 0
        self.rows = 0
        self._altering = Altering()
        self._lanes: dict[str, tuple[random.Random, Sequence[Action]]] = {
            name: (random.Random(f"{seed} {name}"), actions)
            for name, actions in (
                (moving.LANE, moving.ACTIONS),
                (altering.LANE, self._altering.actions),
                (troubles.LANE, troubles.ACTIONS),
            )
        }
        self._chance = random.Random(f"{seed} rounds")
        self._failures: list[BaseException] = []
        self._gate = Gate()
        self.writers: list[Writer] = []

    def go(self, seconds: float, round_s: float) -> None:
        """Rounds until the time has passed, one at least.

        Raises:
            AssertionError: something does not hold; the message has the seed and the last of the log.
        """
        try:
            with ExitStack() as kept:
                self._start(kept)
                while True:
                    self._round(round_s)
                    if self.scene.log.seconds + round_s > seconds:
                        return
        except Exception as error:
            log = self.scene.log
            self.scene.field.keep_evidence(log.path.parent)
            raise AssertionError(
                f"seed {self.seed}, round {self.rounds}: {error}\nthe last of {log.path}:\n{log.tail()}"
            ) from error

    def _start(self, kept: ExitStack) -> None:
        field = self.scene.field
        self.scene.app.add("start", altering.START, "pass")
        started = self.scene.launcher.run("migrate", "up", deadline_s=60)
        assert started.code == 0, f"{started}\n{started.out}{started.err}"
        cluster = kept.enter_context(Cluster.connect(field.catalog_url, pool_size=len(WRITERS)))
        folder = self.scene.log.path.parent
        for number, kind in enumerate(WRITERS):
            writer = kind(
                number, field=field, cluster=cluster, gate=self._gate, folder=folder, seed=self.seed
            )
            self.writers.append(writer)
            kept.callback(writer.stop)
        kept.callback(self._gate.open)
        for writer in self.writers:
            writer.start()

    def _round(self, round_s: float) -> None:
        self.rounds += 1
        log, ends = self.scene.log, self.scene.ends
        names = [
            name
            for name in self._lanes
            if name == moving.LANE or self.rounds == 1 or self._chance.random() >= CALM
        ]
        log.write("round", f"{self.rounds} begins: {', '.join(names)}")
        ends.clear()
        lanes = [
            threading.Thread(target=self._follow, args=(name,), name=name, daemon=True) for name in names
        ]
        for lane in lanes:
            lane.start()
        until = time.monotonic() + round_s
        while time.monotonic() < until and not self._failures:
            for writer in self.writers:
                writer.raise_failure()
            time.sleep(0.2)
        ends.set()
        for lane in lanes:
            lane.join(SETTLE_S * 2)
            if lane.is_alive():
                raise Stuck(f"lane {lane.name} does not end")
        if self._failures:
            raise self._failures[0]
        self._settle()
        self._examine()
        log.write("round", f"{self.rounds} is well: {self.rows:,} rows")

    def _follow(self, name: str) -> None:
        """One action after another, until the round is over."""
        chance, actions = self._lanes[name]
        try:
            while not self.scene.ends.is_set():
                (action,) = chance.choices(actions, [action.weight for action in actions])
                self.scene.log.write(name, f"- {action.name}")
                action.act(self.scene, chance)
        except BaseException as failure:  # noqa: BLE001 -- raised again by the round
            self._failures.append(failure)

    def _settle(self) -> None:
        """Ends all that is under way."""
        chance, _ = self._lanes[moving.LANE]
        until = time.monotonic() + SETTLE_S
        moving.wake(self.scene)
        while moves := self.scene.field.open_moves():
            if time.monotonic() > until:
                raise Stuck(f"moves that neither --resume nor --abort ends: {moves}")
            for move in moves:
                moving.settle_one(self.scene, chance, [move.shard])
        moving.tidy(self.scene)
        self._await_writes()
        self._gate.close()
        for writer in self.writers:
            writer.await_idle()
            writer.raise_failure()
        self._altering.settle(self.scene)

    def _await_writes(self) -> None:
        """Each shard takes writes again."""
        before = self._written()
        until = time.monotonic() + WRITES_AGAIN_S
        while quiet := [shard for shard, count in self._written().items() if count <= before[shard]]:
            for writer in self.writers:
                writer.raise_failure()
            if time.monotonic() > until:
                raise Stuck(
                    f"shards {quiet} take no writes for {WRITES_AGAIN_S:g} s, and nothing is under way"
                )
            time.sleep(0.1)

    def _written(self) -> dict[int, int]:
        return {
            shard: sum(writer.written[shard] for writer in self.writers) for shard in self.scene.field.shards
        }

    def _examine(self) -> None:
        field = self.scene.field
        records = [writer.record.path for writer in self.writers]
        self.rows = checks.assert_rows(field, self.expected, records)
        checks.assert_one_owner(field)
        checks.assert_same_schema(field)
        checks.assert_well(self.scene)
        self._gate.open()
