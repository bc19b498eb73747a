"""Moves shards between nodes while applications write to them, balances nodes, replaces a lost node.

``moves`` plans, runs, resumes and aborts moves. ``steps`` lists the steps of one move, ``cutover`` is the
pause in it, ``journal`` the catalog's record. ``requirements`` finds the reasons to refuse a move, ``purge``
drops old copies. ``balance`` decides what to move, ``rebalance`` moves it, ``watching`` does both again
and again within limits, in a ``window``. ``failover`` replaces a lost node,
``homes`` gives a shard that was lost a home, ``activation`` activates a shard that is active nowhere else, or
records where it is active, ``clocks`` confirms and resets clocks.
"""

from shardids.catalog.moves import Move, all_moves, open_moves
from shardids.mover.activation import Activation, Placing, activate, place
from shardids.mover.balance import (
    MARGIN,
    OVER_S,
    Balance,
    By,
    Transfer,
    balance,
    measure,
    plan_balance,
    weigh,
)
from shardids.mover.journal import Result
from shardids.mover.moves import (
    MovePlan,
    abort,
    check_open,
    each,
    former_node,
    move,
    plan_move,
    resume,
)
from shardids.mover.purge import OldCopy, old_copies, purge
from shardids.mover.rebalance import NotMoved, carry_out, rebalancing, require_none_open, resume_open
from shardids.mover.steps import MAX_PAUSE_S, Options
from shardids.mover.watching import Decision, Terms, Watch
from shardids.mover.window import Window
from shardids.replication.steps import Event, Lagging, OnEvent, StepBegun, StepDone, Waiting
from shardids.replication.subscriptions import Copying

__all__ = [
    "MARGIN",
    "MAX_PAUSE_S",
    "OVER_S",
    "Activation",
    "Balance",
    "By",
    "Copying",
    "Decision",
    "Event",
    "Lagging",
    "Move",
    "MovePlan",
    "NotMoved",
    "OldCopy",
    "OnEvent",
    "Options",
    "Placing",
    "Result",
    "StepBegun",
    "StepDone",
    "Terms",
    "Transfer",
    "Waiting",
    "Watch",
    "Window",
    "abort",
    "activate",
    "all_moves",
    "balance",
    "carry_out",
    "check_open",
    "each",
    "former_node",
    "measure",
    "move",
    "old_copies",
    "open_moves",
    "place",
    "plan_balance",
    "plan_move",
    "purge",
    "rebalancing",
    "require_none_open",
    "resume",
    "resume_open",
    "weigh",
]
