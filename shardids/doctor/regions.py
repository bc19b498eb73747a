"""Checks of what is outside of its region, and of the old copies that moves have left."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.catalog.notation import named_shards, shown_shards
from shardids.catalog.regions import in_region
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.findings import Found, Severity, check, grouped, in_shell


def _is_outside(facts: ClusterFacts, shard: int, node: str) -> bool:
    return facts.region_of.get(shard) != facts.nodes[node].node.region


@check("shard-outside-region", Severity.WARNING, remedy="`shardids rebalance`, which moves it there.")
def shard_outside_region(facts: ClusterFacts) -> Iterator[Found]:
    """A shard lives on a node that is not of its region."""
    outside = (
        ((placed.node, facts.region_of.get(shard)), shard)
        for shard, placed in facts.placed.items()
        if placed.state == "active" and shard not in facts.moving and _is_outside(facts, shard, placed.node)
    )
    for (name, region), shards in grouped(outside).items():
        has_node = any(node.node.region == region for node in facts.nodes.values())
        if has_node:
            to_do, commands = "Bring it home", in_shell("shardids rebalance")
        else:
            to_do, commands = f"No node is {in_region(region)}: add or assign one, then rebalance", ()
        yield Found(
            what=f'{named_shards(shards)}: {in_region(region)}, and lives on node "{name}", which is'
            f" {in_region(facts.nodes[name].node.region)}",
            to_do=to_do,
            commands=commands,
            nodes=(name,),
            shards=shards,
        )


def _old_copies(facts: ClusterFacts, *, outside: bool) -> Iterator[tuple[str, list[int]]]:
    """Yields the nodes that have stopped old copies, outside of their region or not, with the shards."""
    for name, node in facts.nodes.items():
        old = sorted(
            local.shard
            for local in node.shards.values()
            if local.state in ("fenced", "moved")
            and local.shard not in facts.moving
            and (placed := facts.placed.get(local.shard)) is not None
            and (placed.node != name and placed.state == "active")
            and _is_outside(facts, local.shard, name) == outside
        )
        if old:
            yield name, old


@check(
    "copy-outside-region", Severity.WARNING, remedy="`shardids shard purge`: its rows are there until then."
)
def copy_outside_region(facts: ClusterFacts) -> Iterator[Found]:
    """A moved shard's old copy, stopped, on a node that is not of its region."""
    for name, old in _old_copies(facts, outside=True):
        yield Found(
            what=f'{named_shards(old)}: node "{name}", which is not of its region, keeps a stopped old copy'
            " with its rows",
            to_do="Purge it",
            commands=in_shell(f"shardids shard purge {shown_shards(old)}"),
            nodes=(name,),
            shards=tuple(old),
        )


@check("old-copy", Severity.INFO, remedy="`shardids shard purge`, once it is not needed.")
def old_copy(facts: ClusterFacts) -> Iterator[Found]:
    """A moved shard's old copy, stopped, that was kept."""
    for name, old in _old_copies(facts, outside=False):
        yield Found(
            what=f'{named_shards(old)}: node "{name}" keeps a stopped old copy',
            to_do="When it is not needed any more, purge it",
            commands=in_shell(f"shardids shard purge {shown_shards(old)}"),
            nodes=(name,),
            shards=tuple(old),
        )


CHECKS = (shard_outside_region, copy_outside_region, old_copy)
"""All checks of this module."""
