"""Checks that rows are in the right shard, and that the query node shows all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from shardids.catalog.notation import named_shards
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.facts import Sample
from shardids.doctor.findings import Found, Severity, check, grouped, in_shell


def _misplaced(facts: ClusterFacts, said_by: str) -> Iterator[tuple[str, list[Sample]]]:
    """Returns the samples with wrong rows, by node and column."""
    for name, node in facts.nodes.items():
        columns: dict[tuple[str, str], list[Sample]] = {}
        for sample in node.samples:
            if sample.said_by == said_by and sample.wrong and facts.is_settled(sample.shard, name):
                columns.setdefault((sample.table_name, sample.column_name), []).append(sample)
        for samples in columns.values():
            yield name, samples


def _found(node: str, samples: list[Sample], why: str, to_do: str) -> Found:
    first, shards = samples[0], tuple(sorted(sample.shard for sample in samples))
    column = f"{first.table_name}.{first.column_name}"
    says = "no directory has" if first.belongs_to is None else f"says shard {first.belongs_to}"
    wrong, looked_at = sum(s.wrong for s in samples), sum(s.rows for s in samples)
    return Found(
        what=f'{column}: {wrong} of {looked_at} rows read in {named_shards(shards)} of node "{node}"'
        f" {why}, for example {first.example} in shard {first.shard}, which {says}",
        to_do=to_do,
        nodes=(node,),
        shards=shards,
        thing=column,
    )


@check("row-in-wrong-shard", Severity.WARNING, remedy="Move the rows to the shard that their IDs name.")
def row_in_wrong_shard(facts: ClusterFacts) -> Iterator[Found]:
    """Rows whose ID was drawn in another shard (sampled): a session opened by the ID does not find them."""
    for node, samples in _misplaced(facts, "id"):
        table, column = samples[0].table_name, samples[0].column_name
        yield _found(
            node,
            samples,
            "have IDs of other shards",
            f"To see them, in each of the shards: select * from {table} where shardids.shard_of({column}) <>"
            " …; of an old ID, shardids id decode tells the shard",
        )


@check("key-in-wrong-shard", Severity.ERROR, remedy="Move the rows to the shard that their key hashes to.")
def key_in_wrong_shard(facts: ClusterFacts) -> Iterator[Found]:
    """Rows whose key hashes to another shard (with `--key` or `--models`): routing misses them."""
    for node, samples in _misplaced(facts, "key"):
        yield _found(
            node,
            samples,
            "have keys of other shards",
            "Move the rows; they were written without the key, or with another number of shards",
        )


@check("table-unread", Severity.INFO, remedy="See what the reason says.")
def table_unread(facts: ClusterFacts) -> Iterator[Found]:
    """A table that could not be read."""
    nodes = {
        name: {place: why for place, why in node.unread.items() if why != node.skips}
        for name, node in facts.nodes.items()
    }
    for one in facts.lookups:
        for (table, shard), code in one.unread.items():
            said = f"{code}; so look-up {one.name} was not compared"
            nodes.setdefault(facts.placed[shard].node, {})[table, shard] = said
    for name, error in facts.references.refused.items():
        yield Found(
            what=f'reference tables of node "{name}" were not compared: {error.message}',
            to_do=error.hint or "Examine as a member of the owner of schema shardids",
            nodes=(name,),
            thing="shardids_ref",
        )
    for name, unread in nodes.items():
        for table, shards in grouped(unread).items():
            yield Found(
                what=f'{table}: not looked at in {named_shards(shards)} of node "{name}":'
                f" {unread[table, shards[0]]}",
                to_do="Correct what the reason names; the rows of the table were not checked",
                nodes=(name,),
                shards=shards,
                thing=table,
            )


@check("query-node", Severity.WARNING, remedy="`shardids query-node refresh`, as its finding says.")
def query_node(facts: ClusterFacts) -> Iterator[Found]:
    """The query node can't be read, can't read the nodes, or shows other shards or tables than there are."""
    state = facts.query_node
    if state is None:
        return
    for fault in state.faults:
        if not (fault.is_passing and (facts.moves or facts.is_migrating)):
            yield Found(
                what=f"the query node, {state.there.where}: {fault.what}",
                to_do=fault.to_do,
                commands=in_shell(fault.commands) if fault.commands else (),
                nodes=(state.there.node,) if state.there.node else (),
                thing="query node",
            )


@check("reader-missing", Severity.WARNING, remedy="`shardids upgrade`, as a superuser.")
def reader_missing(facts: ClusterFacts) -> Iterator[Found]:
    """A node without a role that only reads, where others could run code as the doctor: no rows were read."""
    for name, node in facts.nodes.items():
        if node.skips is not None:
            yield Found(
                what=f'no rows were read on node "{name}": {node.skips}.'
                f" Checks that did not run: {', '.join(OF_ROWS)}",
                to_do="Upgrade as a superuser, or as the hint of shardids node add says",
                commands=in_shell("shardids upgrade"),
                nodes=(name,),
            )


OF_ROWS: Final = (
    "revisions-apart",
    "counter-kind-differs",
    "counter-zone-differs",
    "reference-differs",
    "row-in-wrong-shard",
    "key-in-wrong-shard",
    "row-without-claim",
    "claim-without-row",
)
"""Names of the checks that need rows."""
CHECKS = (row_in_wrong_shard, key_in_wrong_shard, table_unread, reader_missing, query_node)
"""All checks of this module."""
