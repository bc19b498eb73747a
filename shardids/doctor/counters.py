"""Checks that all shards count numbers for people alike."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from shardids.catalog.notation import named_shards
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.counter_facts import KindOfShard
from shardids.doctor.findings import Found, Severity, check, grouped, in_shell, literal, on_node

_FIXED = ("per", "lanes")
"""What can't be changed of a kind."""
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
    """Returns what a shard defines in another way; nothing if it does not define it at all."""
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
                to_do="Give it one zone in all of them, this one or the other",
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
    """Returns the shards that can be compared, each with its node; none while a migration runs."""
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


CHECKS = (counter_kind_differs, counter_zone_differs)
"""All checks of this module."""
