"""The facts of a reading, as records for the checks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from shardids.catalog.rows import Description
from shardids.catalog.shards import Shard
from shardids.catalog.topology import Node, schema_name
from shardids.watch.facts.cluster import ClusterFacts, Glance, NodeFacts, Placed, ServerFacts, ShardState
from shardids.watch.facts.reading import CatalogState, NodeAnswer, Stopped


def at_a_glance(known: CatalogState, answers: Mapping[str, NodeAnswer], at: float) -> ClusterFacts:
    """Return the facts of a reading at a time, in seconds since 1970, for :data:`doctor.AT_A_GLANCE`."""
    return ClusterFacts(
        at=datetime.fromtimestamp(at, UTC),
        description=Description(
            cluster=known.cluster,
            layout=known.layout,
            shard_count=known.shard_count,
            schema_prefix=known.schema_prefix,
        ),
        catalog_revisions=(),
        placed={
            shard: Placed(node=node, state=state)
            for (node, state), shards in known.placed.items()
            for shard in shards
        },
        moves=known.moves,
        key_moves=known.key_moves,
        losses=known.losses,
        nodes={
            name: _node(Node(name=name, url=url, region=known.node_regions.get(name)), answers[name], known)
            for name, url in known.nodes.items()
            if name in answers
        },
        is_migrating=known.is_migrating,
        region_of={shard: name for name, shards in known.regions.items() for shard in shards},
    )


def _node(node: Node, answer: NodeAnswer, known: CatalogState) -> NodeFacts:
    state = answer.state
    if state is None or not answer.is_up:
        return NodeFacts(node=node, error=answer.error)
    stopped = {one.shard: one for one in answer.stopped}
    return NodeFacts(
        node=node,
        error=answer.error,
        clock=answer.clock,
        glance=Glance(
            server=ServerFacts(
                name=state.name,
                cluster=state.cluster,
                on_copy=state.on_copy,
                is_standby=state.is_standby,
                is_read_only=not state.is_writable and not state.is_standby,
                read_only_source=state.read_only_source,
                missing_standbys=0,
                database=state.database,
                role=state.role,
            ),
            shards={
                one.shard: _state(one, stopped.get(one.shard), known.schema_prefix)
                for one in answer.shards or ()
            },
            has_all=answer.has_all_shards,
        ),
    )


def _state(shard: Shard, stopped: Stopped | None, prefix: str) -> ShardState:
    return ShardState(
        shard=shard.shard,
        schema=schema_name(prefix, shard.shard),
        state={"arriving": "fenced", "fenced": "fenced", "moved": "moved"}.get(shard.state, "active"),
        moved_to=stopped.moved_to if stopped else None,
        is_activated_here=shard.state != "copy",
        has_schema=stopped.has_schema if stopped else True,
        has_sequences=shard.state != "broken",
    )
