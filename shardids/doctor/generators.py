"""Checks of the generator: the layout, the engine, clocks and ticks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from shardids.catalog.notation import named_shards
from shardids.doctor.facts import ChangedFunction, ClusterFacts, Draws
from shardids.doctor.findings import Found, Severity, check, grouped
from shardids.ids.layout import Layout
from shardids.install import trees

_MOST_APART_S = 1.0
_MOST_AHEAD_MS = 60_000
"""Ticks may run ahead this far, and by the node's safety margin, after a bulk load or a failover."""
_NEAR_THE_LIMIT = 0.8
_FEW_YEARS = 10
_DAYS_A_YEAR = 365.2425


@check(
    "layout-differs",
    Severity.ERROR,
    remedy="Take the node out of use at once; its engine must be installed anew.",
)
def layout_differs(facts: ClusterFacts) -> Iterator[Found]:
    """A node's layout or schema prefix is not the cluster's: its IDs mean something else."""
    layout = facts.description.layout
    wanted = [
        ("epoch_ms", layout.epoch_ms),
        ("time_bits", layout.time_bits),
        ("shard_bits", layout.shard_bits),
        ("sequence_bits", layout.sequence_bits),
        ("schema_prefix", facts.description.schema_prefix),
    ]
    for name, node in facts.nodes.items():
        for field, expected in wanted:
            if node.engine and (there := getattr(node.engine, field)) != expected:
                yield Found(
                    what=f'shardids.{field}() of node "{name}" is {there}; the cluster\'s is {expected}',
                    to_do=f'Fence the shards of node "{name}" until it is clear which IDs it issued: select'
                    " shardids.fence(id) from shardids.shard",
                    nodes=(name,),
                    thing=f"shardids.{field}()",
                )


@check("engine-revision", Severity.WARNING, remedy="Upgrade what is older: `shardids upgrade`.")
def engine_revision(facts: ClusterFacts) -> Iterator[Found]:
    """The catalog, a node or a shard is at another revision than this shardids would install."""
    if facts.catalog_revisions != (trees.head("catalog"),):
        yield _other_revision("the catalog", facts.catalog_revisions, "catalog")
    for name, node in facts.nodes.items():
        if node.engine and node.engine.revisions != [trees.head("node")]:
            yield _other_revision(f'node "{name}"', tuple(node.engine.revisions), "node", nodes=(name,))
        apart = (
            (there, shard)
            for shard, local in node.shards.items()
            if local.state == "active" and (there := node.revisions.get(shard, ())) != (trees.head("shard"),)
        )
        for there, shards in grouped(apart).items():
            where = f'{named_shards(shards)} of node "{name}"'
            yield _other_revision(where, there, "shard", nodes=(name,), shards=shards)


def _other_revision(
    where: str,
    revisions: tuple[str, ...],
    tree: trees.Tree,
    *,
    nodes: tuple[str, ...] = (),
    shards: tuple[int, ...] = (),
) -> Found:
    there = ", ".join(revisions) or "no revision"
    return Found(
        what=f"{where}: at {there}; this shardids installs {trees.head(tree)}",
        to_do="With the newest shardids of those that use the cluster: shardids upgrade",
        nodes=nodes,
        shards=shards,
    )


@check("engine-changed", Severity.ERROR, remedy="Restore it from `shardids sql show`.")
def engine_changed(facts: ClusterFacts) -> Iterator[Found]:
    """A function of schema shardids is missing, or not what shardids installs: changed by hand."""
    for name, node in facts.nodes.items():
        for what, functions in (
            ("missing", [f.function for f in node.changed_functions if not f.is_installed]),
            ("not what shardids installs", [f.function for f in node.changed_functions if _is_changed(f)]),
            ("not of shardids", [f.function for f in node.changed_functions if not f.is_wanted]),
        ):
            if functions:
                yield Found(
                    what=f'{what} in schema shardids of node "{name}": {", ".join(functions)}',
                    to_do="Create them anew from the files, see: shardids sql list"
                    if what != "not of shardids"
                    else "\n".join(f"drop function {function};" for function in functions),
                    nodes=(name,),
                    thing=functions[0] if len(functions) == 1 else "",
                )


def _is_changed(function: ChangedFunction) -> bool:
    return function.is_installed and function.is_wanted


@check("generator-changed", Severity.ERROR, remedy="Restore it from `shardids sql show engine/shard.v1`.")
def generator_changed(facts: ClusterFacts) -> Iterator[Found]:
    """A shard's own next_id() or next_ids() is missing, or not what shardids installs."""
    for name, node in facts.nodes.items():
        shards = [local for local in node.shards.values() if local.state == "active" and local.has_sequences]
        bodies = Counter(local.next_ids_body for local in shards if local.next_ids_body)
        usual = bodies.most_common(1)[0][0] if bodies else None
        for function, changed in (
            ("next_id()", [s.shard for s in shards if not s.next_id_is_ours]),
            ("next_ids(integer)", [s.shard for s in shards if s.next_ids_body != usual or usual is None]),
        ):
            if changed:
                yield Found(
                    what=f'{function} of {named_shards(changed)} on node "{name}" is not what shardids'
                    " installs",
                    to_do="Fence the shard, compare with: shardids sql show engine/shard.v1, and create the"
                    " function anew from there",
                    nodes=(name,),
                    shards=tuple(changed),
                    thing=function,
                )


@check(
    "clocks-apart",
    Severity.WARNING,
    remedy="Synchronise them (NTP, chrony): IDs stay unique, but their times are off.",
)
def clocks_apart(facts: ClusterFacts) -> Iterator[Found]:
    """The clocks of two nodes are more than a second apart, measured over round trips."""
    clocks = [(name, node.clock) for name, node in facts.nodes.items() if node.clock]
    for (one, first), (other, second) in combinations(clocks, 2):
        apart_s, error_s = second.offset_s - first.offset_s, first.error_s + second.error_s
        if abs(apart_s) - error_s > _MOST_APART_S:
            ahead, behind = (other, one) if apart_s > 0 else (one, other)
            yield Found(
                what=f'the clock of node "{ahead}" is {abs(apart_s):.3f} s ± {error_s * 1000:.1f} ms ahead of'
                f' node "{behind}"\'s',
                to_do="Look at the synchronisation of both, for example: chronyc tracking",
                nodes=(ahead, behind),
            )


@check(
    "ticks-ahead",
    Severity.WARNING,
    remedy="Correct the clock, or slow the writer down: at `max_ahead` draws are refused.",
)
def ticks_ahead(facts: ClusterFacts) -> Iterator[Found]:
    """A shard's IDs are more than a minute and twice the safety margin ahead of its server's clock."""
    for name, node in facts.nodes.items():
        if node.engine is None:
            continue
        ahead = {
            shard: ahead_ms
            for shard, (_, last) in node.draws.items()
            if node.shards[shard].state == "active"
            and node.shards[shard].is_activated_here
            and (ahead_ms := _ahead_ms(last, facts.description.layout))
            > _MOST_AHEAD_MS + 2 * node.engine.safety_margin_ms
        }
        if ahead:
            most, limit_ms = max(ahead.values()), node.engine.max_ahead_ms
            yield Found(
                what=f'{named_shards(ahead)} of node "{name}": IDs are up to {most / 1000:.1f} s ahead of the'
                " clock; at"
                f" {limit_ms / 1000:.0f} s draws are refused",
                to_do="Was the clock set back? Look at it: select clock_timestamp(). Else more IDs are drawn"
                f" than the layout has ({facts.description.layout.sequence_limit * 1000} a second and shard)",
                nodes=(name,),
                shards=tuple(sorted(ahead)),
                severity=Severity.ERROR if most > limit_ms / 2 else None,
            )


def _ahead_ms(draws: Draws, layout: Layout) -> int:
    return draws.offset_ms + (draws.drawn >> layout.sequence_bits) - draws.clock_ms


@check("tick-rate", Severity.WARNING, remedy="Spread the writes over more shards.")
def tick_rate(facts: ClusterFacts) -> Iterator[Found]:
    """A shard draws more than four fifths of the IDs that its layout has a second."""
    layout = facts.description.layout
    limit = layout.sequence_limit * 1000
    for name, node in facts.nodes.items():
        for shard, (first, last) in sorted(node.draws.items()):
            seconds = (last.clock_ms - first.clock_ms) / 1000
            drawn = last.drawn - first.drawn
            if _ahead_ms(first, layout) > 0 and _ahead_ms(last, layout) > 0:
                # Ahead of the clock nothing raises the offset but reservations.
                drawn += (last.offset_ms - first.offset_ms) << layout.sequence_bits
            if seconds > 0 and drawn / seconds > _NEAR_THE_LIMIT * limit:
                yield Found(
                    what=f'shard {shard} of node "{name}" drew {drawn / seconds:,.0f} IDs a second in the'
                    " last"
                    f" {seconds:.1f} s; the layout has {limit:,}",
                    to_do="Spread its writes over more shards, or draw fewer IDs that are not used",
                    nodes=(name,),
                    shards=(shard,),
                )


@check("years-left", Severity.WARNING, remedy="Plan a new layout; an error within one year.")
def years_left(facts: ClusterFacts) -> Iterator[Found]:
    """The layout's time ends, or its IDs turn negative, within ten years."""
    layout = facts.description.layout
    for what, at in (
        ("no more IDs can be made", layout.last_time),
        ("IDs are negative and sort before the older ones", layout.negative_from),
    ):
        if at is None:
            continue
        years = (at - facts.at).days / _DAYS_A_YEAR
        if years < _FEW_YEARS and (years > 0 or at == layout.last_time):
            yield Found(
                what=f"from {at:%Y-%m-%d} on, in {years:.1f} years, {what} in layout {layout}",
                to_do="Plan the move to a cluster with another layout: shardids init --layout …",
                severity=Severity.ERROR if years < 1 else None,
            )


CHECKS = (
    layout_differs,
    engine_revision,
    engine_changed,
    generator_changed,
    clocks_apart,
    ticks_ahead,
    tick_rate,
    years_left,
)
"""All checks of this module."""
