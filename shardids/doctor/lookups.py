"""Checks that every row of a look-up has a claim, and every claim a row."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.findings import Found, Severity, check, in_shell


@check("lookup-unfit", Severity.ERROR, remedy="What the finding says, in every shard.")
def lookup_unfit(facts: ClusterFacts) -> Iterator[Found]:
    """A look-up that can't be read, or whose column, index, claims or privileges don't fit any more."""
    for one in facts.lookups:
        if one.error is not None:
            yield Found(what=f"look-up {one.name}: {one.error.message}", to_do=one.error.hint, thing=one.name)


@check("row-without-claim", Severity.ERROR, remedy="`shardids lookup backfill`.")
def row_without_claim(facts: ClusterFacts) -> Iterator[Found]:
    """Rows whose look-up key is not claimed (sampled): another shard can get the same value."""
    for one in facts.lookups:
        if one.is_ready and one.without_claim:
            yield Found(
                what=f"look-up {one.name}: {one.without_claim} of {one.rows} rows read have no claim, for"
                f" example {one.example}: SQL wrote them, or claims were lost with a server",
                to_do="Claim them",
                commands=in_shell(f"shardids lookup backfill {one.name}"),
                thing=one.name,
            )


@check("claim-without-row", Severity.INFO, remedy="`shardids lookup sweep`.")
def claim_without_row(facts: ClusterFacts) -> Iterator[Found]:
    """Claims of rows that were deleted or never came (sampled): they take room, and nothing else."""
    for one in facts.lookups:
        if one.without_row:
            yield Found(
                what=f"look-up {one.name}: {one.without_row} of {one.claims} claims read have no row",
                to_do="Now and then",
                commands=in_shell(f"shardids lookup sweep {one.name}"),
                thing=one.name,
            )


@check("lookup-not-ready", Severity.INFO, remedy="`shardids lookup backfill`.")
def lookup_not_ready(facts: ClusterFacts) -> Iterator[Found]:
    """A look-up whose rows are not all claimed yet: their values may come twice, and don't find them."""
    for one in facts.lookups:
        if one.error is None and not one.is_ready:
            yield Found(
                what=f"look-up {one.name} is not ready",
                to_do="When all applications have the model with lookup_key()",
                commands=in_shell(f"shardids lookup backfill {one.name}"),
                thing=one.name,
            )


CHECKS = (lookup_unfit, row_without_claim, claim_without_row, lookup_not_ready)
"""All checks of this module."""
