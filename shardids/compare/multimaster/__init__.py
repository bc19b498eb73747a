"""Auto-increment offsets for several masters: k of them, each counting by k from its own offset.

On PostgreSQL :func:`read_masters` and :func:`make_plan` plan, :func:`carry_out` applies, :func:`verify` finds
faults. ``mariadb`` does the same for MariaDB, and
``fleet`` gives the commands one interface to both. To grow, plan for the old masters
and the new ones, which come last: the offsets of the others stay.
"""

from shardids.compare.multimaster.postgresql import (
    HEADROOM,
    Counter,
    Master,
    MasterState,
    OffsetFinding,
    OffsetPlan,
    OffsetProblem,
    OffsetStep,
    Phase,
    SequenceState,
    carry_out,
    make_plan,
    read_masters,
    verify,
)

__all__ = [
    "HEADROOM",
    "Counter",
    "Master",
    "MasterState",
    "OffsetFinding",
    "OffsetPlan",
    "OffsetProblem",
    "OffsetStep",
    "Phase",
    "SequenceState",
    "carry_out",
    "make_plan",
    "read_masters",
    "verify",
]
