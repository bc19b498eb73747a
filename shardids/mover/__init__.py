"""Moves shards between nodes while applications write to them, balances nodes, replaces a lost node.

``moves`` plans, runs, resumes and aborts moves. ``mover`` takes the steps of one move, which ``steps`` lists;
they work on both ``sides`` through ``replication`` (the copy), ``barrier`` and ``cutover`` (the pause) and
``programs`` (pg_dump). ``journal`` is the catalog's record of them. ``requirements`` and ``contents`` find
the reasons to refuse a move, ``purge`` drops old copies. ``balance`` decides what to move. ``failover``
replaces a lost node.
"""

from shardids.mover.balance import MARGIN, Balance, By, Transfer, balance, plan_balance, weigh
from shardids.mover.events import Copying, Event, Lagging, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.history import Move, all_moves, open_moves
from shardids.mover.moves import (
    MovePlan,
    abort,
    carry_out,
    each,
    former_node,
    move,
    plan_move,
    require_none_open,
    resume,
    resume_open,
)
from shardids.mover.options import MAX_PAUSE_S, Options
from shardids.mover.purge import OldCopy, old_copies, purge

__all__ = [
    "MARGIN",
    "MAX_PAUSE_S",
    "Balance",
    "By",
    "Copying",
    "Event",
    "Lagging",
    "Move",
    "MovePlan",
    "OldCopy",
    "OnEvent",
    "Options",
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
