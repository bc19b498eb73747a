"""Clocks that were wrong: confirms a node's, and brings back a shard that one took into the future."""

from shardids.mover.clocks.confirming import Comparison, OtherClock, compare_clocks, confirm_clock
from shardids.mover.clocks.resetting import Plan, Reset, Work, reset_clock

__all__ = [
    "Comparison",
    "OtherClock",
    "Plan",
    "Reset",
    "Work",
    "compare_clocks",
    "confirm_clock",
    "reset_clock",
]
