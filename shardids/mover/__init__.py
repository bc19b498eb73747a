"""Moves shards between nodes while they are written to."""

from shardids.mover.checks import Plan
from shardids.mover.events import Copying, Event, Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.journal import Move, all_moves, open_moves
from shardids.mover.moves import MAX_PAUSE_S, Options, abort, former_node, move, plan_move, resume

__all__ = [
    "MAX_PAUSE_S",
    "Copying",
    "Event",
    "Lagging",
    "Move",
    "OnEvent",
    "Options",
    "Plan",
    "Result",
    "StepBegun",
    "StepDone",
    "Waiting",
    "abort",
    "all_moves",
    "former_node",
    "move",
    "open_moves",
    "plan_move",
    "resume",
]
