"""What actions act on, and what an action is."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.migrations import App
from tests.support.soak.commands import Launcher, Ran, Running
from tests.support.soak.field import Field
from tests.support.soak.log import Log

COMMAND_S = 200.0
"""How long a command may take before it has to end or to say why not. Its own longest patience is 300 s
without any progress, but nothing here keeps a mover waiting for so long."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """The cluster, and what is under way in it.

    Attributes:
        asleep: commands that were stopped, to be woken later.
        ends: set when the round is over: an action begins nothing long any more.
    """

    field: Field
    launcher: Launcher
    log: Log
    app: App
    asleep: list[Running] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)

    def ran(self, lane: str, running: Running) -> Ran:
        """What a command ended with, once it has."""
        return self.judged(lane, running.wait(COMMAND_S))

    def judged(self, lane: str, ran: Ran) -> Ran:
        """Writes down what a command ended with; only a success or a refusal with its reason is right.

        Drift (3) is what the doctor may find at such times.
        """
        self.log.write(lane, str(ran))
        assert ran.code in (None, 0, 1, 3), f"{ran}\n{ran.out}{ran.err}"
        if ran.code == 1:
            self.log.reason(f"{' '.join(ran.words[:2])}: {alike(ran.reason)}")
        return ran


def alike(reason: str) -> str:
    """The reason without addresses and numbers, to be counted."""
    return re.sub(r"\d+", "N", re.sub(r"postgresql://\S+", "URL", reason))[:160]


Act = Callable[[Scene, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that is done to the cluster; ``weight`` is how often, among its lane's."""

    name: str
    weight: int
    act: Act
