"""Moves shards between nodes while they are written to."""

from shardids.mover.balance import MARGIN, Balance, By, Transfer, balance, plan_balance, weigh
from shardids.mover.checks import Plan
from shardids.mover.events import Copying, Event, Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.journal import Move, all_moves, open_moves
from shardids.mover.many import carry_out, each, require_none_open, resume_open
from shardids.mover.moves import abort, former_node, move, plan_move, resume
from shardids.mover.purge import OldCopy, old_copies, purge
from shardids.mover.steps import MAX_PAUSE_S, Options

__all__ = [
    "MARGIN",
    "MAX_PAUSE_S",
    "Balance",
    "By",
    "Copying",
    "Event",
    "Lagging",
    "Move",
    "OldCopy",
    "OnEvent",
    "Options",
    "Plan",
    "Result",
    "StepBegun",
    "StepDone",
    "Transfer",
    "Waiting",
    "abort",
    "all_moves",
    "balance",
    "carry_out",
    "each",
    "former_node",
    "move",
    "old_copies",
    "open_moves",
    "plan_balance",
    "plan_move",
    "purge",
    "require_none_open",
    "resume",
    "resume_open",
    "weigh",
]
