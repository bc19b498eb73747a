"""Moves the rows of one key, a tenant, from its shard to another one while applications write to them.

``family`` finds the tables whose rows belong to the key, and says so in SQL. ``examining`` and
``unclear`` find the reasons to refuse a move, ``planning`` asks for them. ``leaving`` guards the key where it
leaves, ``arriving`` brings its rows, ``steps`` lists the steps, ``journal`` is the catalog's record;
``moving`` runs, resumes and undoes. ``rows`` counts a shard's rows by key, ``making`` makes a shard for one,
``entries`` changes claims and old IDs.
"""

from shardids.replication.steps import Event, Noted, OnEvent, StepBegun, StepDone, Waiting
from shardids.tenants.family import Choices
from shardids.tenants.journal import KeyMove, all_key_moves, open_key_moves
from shardids.tenants.making import NewShard
from shardids.tenants.moving import KeyResult, abort, move, resume
from shardids.tenants.planning import KeyPlan, plan
from shardids.tenants.steps import Options

__all__ = [
    "Choices",
    "Event",
    "KeyMove",
    "KeyPlan",
    "KeyResult",
    "NewShard",
    "Noted",
    "OnEvent",
    "Options",
    "StepBegun",
    "StepDone",
    "Waiting",
    "abort",
    "all_key_moves",
    "move",
    "open_key_moves",
    "plan",
    "resume",
]
