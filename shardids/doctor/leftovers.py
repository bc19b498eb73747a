"""Checks for what interrupted moves leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.catalog.notation import named_shards
from shardids.doctor.facts import ClusterFacts, Leftover
from shardids.doctor.findings import Found, Severity, check

_MIB = 1 << 20


@check("move-interrupted", Severity.ERROR, remedy="`shardids shard move --resume` or `--abort`.")
def move_interrupted(facts: ClusterFacts) -> Iterator[Found]:
    """An open move that no process is working on: it was interrupted."""
    for move in facts.moves:
        if not move.is_running:
            yield Found(
                what=f'the move of shard {move.shard} from node "{move.source}" to node "{move.target}"'
                f' was interrupted in step "{move.step}"',
                to_do=f"shardids shard move {move.shard} --resume\nOr: shardids shard move {move.shard}"
                " --abort",
                nodes=(move.source, move.target),
                shards=(move.shard,),
            )


def _left_behind(facts: ClusterFacts, kind: str) -> Iterator[tuple[str, Leftover]]:
    """What belongs to no open move from or to the node."""
    busy = {name for move in facts.moves for name in (move.source, move.target)}
    for name, node in facts.nodes.items():
        for leftover in node.leftovers:
            if leftover.kind == kind and name not in busy:
                yield name, leftover


@check("leftover-slot", Severity.WARNING, remedy="Drop it: it keeps WAL until the disk is full.")
def leftover_slot(facts: ClusterFacts) -> Iterator[Found]:
    """A replication slot of a move that has ended."""
    for name, slot in _left_behind(facts, "slot"):
        kept = f"; it keeps {slot.kept_bytes / _MIB:,.1f} MiB of WAL" if slot.kept_bytes is not None else ""
        yield Found(
            what=f'replication slot {slot.name} of node "{name}" belongs to no open move{kept}',
            to_do=f"select pg_drop_replication_slot('{slot.name}');",
            nodes=(name,),
            thing=slot.name,
        )


@check("leftover-publication", Severity.WARNING, remedy="Drop it.")
def leftover_publication(facts: ClusterFacts) -> Iterator[Found]:
    """A publication of a move that has ended."""
    for name, publication in _left_behind(facts, "publication"):
        yield Found(
            what=f'publication {publication.name} of node "{name}" belongs to no open move',
            to_do=f'drop publication "{publication.name}";',
            nodes=(name,),
            thing=publication.name,
        )


@check("leftover-subscription", Severity.WARNING, remedy="Drop it: it may overwrite rows of the shard.")
def leftover_subscription(facts: ClusterFacts) -> Iterator[Found]:
    """A subscription of a move that has ended."""
    for name, subscription in _left_behind(facts, "subscription"):
        quoted = f'"{subscription.name}"'
        yield Found(
            what=f'subscription {subscription.name} of node "{name}" belongs to no open move',
            to_do=f"alter subscription {quoted} disable;\nalter subscription {quoted} set (slot_name ="
            f" none);\ndrop subscription {quoted};",
            nodes=(name,),
            thing=subscription.name,
        )


@check("writes-rejected", Severity.ERROR, remedy="Take the gate away: `shardids.drop_barriers(shard)`.")
def writes_rejected(facts: ClusterFacts) -> Iterator[Found]:
    """A table of an active shard still has a move's gate: it refuses writes, or (a warning) slows them."""
    for name, node in facts.nodes.items():
        for kind, severity, does in (
            ("shut gate", Severity.ERROR, "refuse writes, though the shard is active here"),
            ("gate", Severity.WARNING, "have the gate of a move still, which costs a lock at every write"),
        ):
            gates = [
                gate.shard
                for gate in node.leftovers
                if gate.kind == kind and gate.shard is not None and facts.is_settled(gate.shard, name)
            ]
            if gates:
                shards = tuple(sorted(set(gates)))
                yield Found(
                    what=f'{len(gates)} tables in {named_shards(shards)} of node "{name}" {does}',
                    to_do="\n".join(f"select shardids.drop_barriers({shard});" for shard in shards),
                    nodes=(name,),
                    shards=shards,
                    severity=severity,
                )


CHECKS = (move_interrupted, leftover_slot, leftover_publication, leftover_subscription, writes_rejected)
"""All checks of this module."""
