"""Checks of a cluster on Citus: one issuer of IDs, and every table on a worker."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.pg.notation import named_shards
from shardids.watch.doctor.findings import Found, Severity, check
from shardids.watch.facts.cluster import ClusterFacts


@check(
    "citus-second-issuer",
    Severity.ERROR,
    remedy="Find who made the sequences there; only the coordinator may have them.",
)
def citus_second_issuer(facts: ClusterFacts) -> Iterator[Found]:
    """A worker of Citus that has the sequences of a shard, so that its next_id() would issue there too."""
    for name, node in facts.nodes.items():
        for worker, schemas in node.citus.issuers.items() if node.citus is not None else ():
            yield Found(
                what=f"worker {worker} has sequences id_counter or id_offset in {', '.join(schemas)}:"
                " IDs may come twice",
                to_do="Stop writers that connect to the worker, and find who made the sequences",
                nodes=(name,),
                thing=worker,
            )


@check(
    "citus-shard-local",
    Severity.ERROR,
    remedy="`select citus_schema_distribute('shard_0005')`; tables: create them again, by a revision.",
)
def citus_shard_local(facts: ClusterFacts) -> Iterator[Found]:
    """A shard, or a table of one, that Citus does not distribute: its rows stay on the coordinator."""
    for name, node in facts.nodes.items():
        if node.citus is None:
            continue
        if shards := node.citus.local_schemas:
            yield Found(
                what=f"{named_shards(shards)}: the schema is not distributed",
                to_do="Distribute it: select citus_schema_distribute(SCHEMA)",
                nodes=(name,),
                shards=shards,
            )
        for shard, tables in node.citus.local_tables.items():
            if shard not in shards:
                yield Found(
                    what=f"shard {shard}: on the coordinator only: {', '.join(tables)}",
                    to_do="A function or DO block made them, which Citus does not follow; create them by"
                    " statements of their own",
                    nodes=(name,),
                    shards=(shard,),
                )


@check(
    "citus-worker-away",
    Severity.WARNING,
    remedy="Start the worker, or `select citus_activate_node(host, port)`.",
)
def citus_worker_away(facts: ClusterFacts) -> Iterator[Found]:
    """A worker of Citus that does not answer, or that Citus does not use."""
    for name, node in facts.nodes.items():
        if node.citus is None:
            continue
        for worker, words in node.citus.unheard.items():
            yield Found(
                what=f"worker {worker} does not answer the coordinator: {words}",
                to_do="Start it, or look at the network between the two",
                nodes=(name,),
                thing=worker,
            )
        for worker in node.citus.inactive:
            yield Found(
                what=f"worker {worker} is not active",
                to_do="Activate it: select citus_activate_node(host, port)",
                nodes=(name,),
                thing=worker,
            )
