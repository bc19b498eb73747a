"""Auto-increment offsets for several PostgreSQL masters: k of them, each counting by k from its own offset.

``read_masters`` and ``make_plan`` plan; ``carry_out`` applies; ``verify`` finds what is wrong. To grow
from k masters to more, plan for all of them: the new ones come last, so that the offsets of the others stay.
"""

from shardids.baselines.multimaster.counters import (
    Counter,
    Master,
    MasterState,
    SequenceState,
    read_masters,
)
from shardids.baselines.multimaster.plan import HEADROOM, Plan, carry_out, make_plan
from shardids.baselines.multimaster.steps import Phase, Step
from shardids.baselines.multimaster.verify import Finding, Problem, verify

__all__ = [
    "HEADROOM",
    "Counter",
    "Finding",
    "Master",
    "MasterState",
    "Phase",
    "Plan",
    "Problem",
    "SequenceState",
    "Step",
    "carry_out",
    "make_plan",
    "read_masters",
    "verify",
]
