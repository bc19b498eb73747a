"""Checks of change capture: publications and slots on all nodes, or on none."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.watch.doctor.findings import Found, Severity, check
from shardids.watch.facts.cluster import ClusterFacts


@check(
    "capture-incomplete",
    Severity.ERROR,
    remedy="`shardids cdc create`; the consumer's option `origin = none`.",
)
def capture_incomplete(facts: ClusterFacts) -> Iterator[Found]:
    """Change capture that one node lacks, that has lost changes, or whose consumer reads copies."""
    captures = [node.capture for node in facts.nodes.values() if node.capture is not None]
    if any(one.published or one.there for one in captures):
        for one in captures:
            if one.fault:
                yield Found(what=one.fault, to_do=one.remedy, nodes=(one.node,), thing=one.slot)
