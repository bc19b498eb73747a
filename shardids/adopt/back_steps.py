"""The steps of the way back: what takes it, and what gives it up."""

from __future__ import annotations

from typing import Final

from shardids.adopt.journal import FINISH, HANDED_BACK
from shardids.adopt.steps import Step

BACK: Final = (
    Step(name="guard", act=lambda actions: actions.back.guard()),
    Step(name="draw near", act=lambda actions: actions.back.approach()),
    # By the journal's entry the source takes over again.
    Step(
        name="hand back",
        act=lambda actions: actions.back.hand_back(),
        undo=lambda actions: actions.back.stay(),
        stops_writes=True,
    ),
)
"""What makes the source take over again."""

AFTER_BACK: Final = (
    Step(name=HANDED_BACK, act=lambda actions: actions.back.set_sequences()),
    Step(name="reopen", act=lambda actions: actions.back.reopen_source()),
    Step(name="leave", act=lambda actions: actions.back.leave_shards()),
)
"""What is left once it has. Afterwards the shards are fenced, with their rows: step ``returned``."""

END: Final = (Step(name=FINISH, act=lambda actions: actions.back.finish()),)
"""What gives the way back up."""
