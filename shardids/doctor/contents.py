"""Checks that rows are in the right shard, and that views read every shard from its owner."""

from __future__ import annotations

from collections.abc import Iterator

from shardids.catalog.notation import named_shards
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.facts import Sample
from shardids.doctor.findings import Found, Severity, check, grouped, in_shell
from shardids.views.state import stale_shards


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


@check("table-unread", Severity.INFO, remedy="Examine as a role with no more rights than its owner.")
def table_unread(facts: ClusterFacts) -> Iterator[Found]:
    """A table that was not read, because functions of other roles in its indexes or the like would run."""
    nodes = {name: dict(node.unread) for name, node in facts.nodes.items()}
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
                to_do="That would run as whoever reads the table: examine as a role with no more rights than"
                " its owner, or let the owner of schema shardids own the functions",
                nodes=(name,),
                shards=shards,
                thing=table,
            )


@check("view-stale", Severity.WARNING, remedy="`shardids view refresh`.")
def view_stale(facts: ClusterFacts) -> Iterator[Found]:
    """A view over all shards that is gone, or does not read every shard from its owner."""
    node_of = {shard: placed.node for shard, placed in facts.placed.items() if placed.state == "active"}
    nodes = {name: node.node for name, node in facts.nodes.items()}
    for one in facts.views:
        view = one.view
        node = facts.nodes[view.node] if view.node else None
        error = node.error if node else one.error
        refresh = in_shell(f"shardids view refresh {view.name}")
        if error is not None:
            if node is None:
                what = f'view "{view.name}" can\'t be read: {error.message}'
                yield Found(what=what, to_do=error.hint or "Correct its URL", thing=view.name)
            continue
        sources = node.view_sources if node else one.sources
        stale = stale_shards(view, sources, node_of, nodes)
        if stale:
            yield Found(
                what=f'view "{view.name}" on {view.where} does not read {named_shards(stale)} from their'
                " owners",
                to_do="Refresh it",
                commands=refresh,
                nodes=(view.node,) if view.node else (),
                shards=tuple(stale),
                thing=view.name,
            )


CHECKS = (row_in_wrong_shard, key_in_wrong_shard, table_unread, view_stale)
"""All checks of this module."""
