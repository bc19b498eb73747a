"""Checks of rows: in the right shard, claimed, counted alike, and shown by the query node."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final

from shardids.errors import ConnectionFailed
from shardids.pg.notation import named_shards
from shardids.pg.queries import quoted
from shardids.watch.doctor.findings import Found, Severity, check, grouped, in_shell, literal, on_node
from shardids.watch.facts.cluster import ClusterFacts, KindOfShard, Sample


def _misplaced(facts: ClusterFacts, said_by: str) -> Iterator[tuple[str, list[Sample]]]:
    """Yield the samples with wrong rows, by node and column."""
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
            " …; for an old ID, shardids id decode shows the shard",
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


@check("table-unread", Severity.INFO, remedy="Correct the cause that the reason names.")
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
                to_do="Correct the cause; the rows of the table were not checked",
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
    unreachable = {name for name, node in facts.nodes.items() if isinstance(node.error, ConnectionFailed)}
    for fault in state.faults:
        # A node that is down is a finding of its own.
        if fault.unreachable in unreachable:
            continue
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


@check("sequence-behind", Severity.ERROR, remedy="Set it past the column's highest value: `setval`.")
def sequence_behind(facts: ClusterFacts) -> Iterator[Found]:
    """A column has a value beyond those of the sequence that fills it (sampled): inserts will fail."""
    for name, node in facts.nodes.items():
        behind = [
            one
            for one in node.serials
            if one.highest is not None and one.highest > one.last_value and facts.is_settled(one.shard, name)
        ]
        alike = grouped(((one.table_name, one.column_name, one.sequence_name), one.shard) for one in behind)
        for (table, column, sequence), shards in sorted(alike.items()):
            schemas = [node.shards[shard].schema for shard in shards if shard in node.shards]
            yield Found(
                what=f'{table}.{column} in {named_shards(shards)} of node "{name}" has values above those of'
                f" its sequence, {sequence}: its next value exists already, and the INSERT will fail",
                to_do="Set the sequence past them",
                commands=on_node(
                    name,
                    *(
                        f"select setval({literal(quoted(schema, sequence))}, max({quoted(column)}))"
                        f" from {quoted(schema, table)};"
                        for schema in schemas
                    ),
                ),
                nodes=(name,),
                shards=shards,
                thing=f"{table}.{column}",
            )


OF_ROWS: Final = (
    "revisions-apart",
    "counter-kind-differs",
    "counter-zone-differs",
    "reference-differs",
    "sequence-behind",
    "row-in-wrong-shard",
    "key-in-wrong-shard",
    "row-without-claim",
    "claim-without-row",
)
"""Names of the checks that need rows."""


@check("lookup-unfit", Severity.ERROR, remedy="The steps of the finding, in every shard.")
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
                to_do="Delete them from time to time",
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


_FIXED = ("per", "lanes")
"""The attributes of a kind that can't be changed."""
_OTHER_KIND = (
    "When it begins again, and whether it has gaps, can't be changed: define another kind in all shards"
)
_PARTS = (*_FIXED, "zone", "prefix", "padding", "keep_days")


@check("counter-kind-differs", Severity.WARNING, remedy="Define the kind alike in all shards.")
def counter_kind_differs(facts: ClusterFacts) -> Iterator[Found]:
    """A kind of numbers that shards define differently, or some lack: draws fail, or look different."""
    at = _shards(facts)
    definitions: dict[str, dict[int, KindOfShard]] = {}
    for name, facts_of in facts.nodes.items():
        for one in facts_of.counters.kinds:
            if at.get(one.shard) == name:
                definitions.setdefault(one.kind, {})[one.shard] = one
    for kind, by_shard in sorted(definitions.items()):
        usual = Counter(map(_parts, (by_shard[shard] for shard in sorted(by_shard)))).most_common(1)[0][0]
        odd = grouped(
            ((node, _difference(by_shard.get(shard), usual)), shard)
            for shard, node in at.items()
            if shard not in by_shard or _parts(by_shard[shard]) != usual
        )
        for (node, difference), shards in odd.items():
            is_fixed = any(part in _FIXED for part, *_ in difference)
            shown = ", ".join(f"{part} is {own!r}, not {most!r}" for part, own, most in difference)
            yield Found(
                what=f'numbers of kind "{kind}" in {named_shards(shards)} of node "{node}": '
                + (shown or f"not defined, and {len(by_shard)} shards define them"),
                to_do=_OTHER_KIND if is_fixed else "Define it as most shards do, if they are right",
                commands=()
                if is_fixed
                else on_node(node, *(_define(shard, kind, dict(usual)) for shard in shards)),
                nodes=(node,),
                shards=shards,
                thing=kind,
            )


Parts = tuple[tuple[str, str | int], ...]


def _parts(definition: KindOfShard) -> Parts:
    values = asdict(definition)
    return tuple((part, values[part]) for part in _PARTS)


def _difference(own: KindOfShard | None, usual: Parts) -> tuple[tuple[str, str | int, str | int], ...]:
    """Return the attributes that a shard defines differently; none if it does not define the kind at all."""
    if own is None:
        return ()
    return tuple(
        (part, here, most) for (part, here), (_, most) in zip(_parts(own), usual, strict=True) if here != most
    )


def _define(shard: int, kind: str, parts: Mapping[str, str | int]) -> str:
    per, zone, prefix = (literal(str(parts[part])) for part in ("per", "zone", "prefix"))
    return (
        f"select shardids.define_counter({shard}, {literal(kind)}, {per}, {zone}, {prefix},"
        f" {parts['padding']}, {parts['lanes']}, {parts['keep_days']});"
    )


@check("counter-zone-differs", Severity.WARNING, remedy="`shardids counter zone TENANT ZONE --shard N`.")
def counter_zone_differs(facts: ClusterFacts) -> Iterator[Found]:
    """A tenant with one time zone in some shards and another in others: its days end at different hours."""
    at = _shards(facts)
    zones: dict[str, dict[int, str]] = {}
    for name, node in facts.nodes.items():
        for one in node.counters.zones:
            if at.get(one.shard) == name:
                zones.setdefault(one.tenant, {})[one.shard] = one.zone
    for tenant, by_shard in sorted(zones.items()):
        usual = Counter(by_shard[shard] for shard in sorted(by_shard)).most_common(1)[0][0]
        odd = grouped((zone, shard) for shard, zone in by_shard.items() if zone != usual)
        for zone, shards in odd.items():
            yield Found(
                what=f'the days of tenant "{tenant}" end in zone {zone} in {named_shards(shards)}, and in'
                f" {usual} in {named_shards([shard for shard in by_shard if by_shard[shard] == usual])}",
                to_do="Give it the same zone in all of them",
                commands=in_shell(
                    *(
                        f"shardids counter zone {shlex.quote(tenant)} {shlex.quote(usual)} --shard {shard}"
                        for shard in shards
                    )
                ),
                nodes=tuple(sorted({at[shard] for shard in shards})),
                shards=shards,
                thing=tenant,
            )


def _shards(facts: ClusterFacts) -> dict[int, str]:
    """Return the shards that can be compared, each with its node; none while a migration runs."""
    if facts.is_migrating:
        return {}
    return {
        shard: name
        for name, node in facts.nodes.items()
        if node.engine and not node.error
        for shard, local in node.shards.items()
        if local.state == "active" and local.has_schema
        if facts.is_settled(shard, name) and shard not in node.in_flux
    }
