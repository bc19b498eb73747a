"""Compares the application's objects in all shards, and names what differs from most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shardids.catalog.notation import named_nodes, named_shards
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.findings import Found, Severity, check, grouped

Thing = tuple[str, str]
"""Kind and name of an object."""
Peers = tuple[tuple[str, ...] | None, int]
"""What shards must have in common to be compared: the revision, and the server's major version."""
Difference = tuple[Thing, str | None, str | None]
"""An object, its definition in most shards, and in these; ``None`` where there is none."""

_SHOWN: Final = 5
_LONGEST: Final = 160
_LEFT_OUT: Final = frozenset({"grants"})
"""What another check reports."""
_RELATIONS: Final = frozenset({"table", "view", "materialized view", "foreign table", "sequence", "type"})
_INVALID: Final = "(invalid)"


@check("schema-differs", Severity.WARNING, remedy="Bring the shards to the same schema, in a migration.")
def schema_differs(facts: ClusterFacts) -> Iterator[Found]:
    """Tables, columns, constraints, indexes, policies, triggers, functions or owners of shards differ."""
    nodes_of = _compared(facts)
    for (revisions, _version), shards in grouped((peers, shard) for shard, peers in nodes_of.items()).items():
        differing: dict[int, list[Difference]] = {}
        for thing, variants in sorted(_variants(facts, frozenset(shards)).items()):
            usual = _usual(variants)
            for shard, definition in variants.items():
                if definition != usual:
                    differing.setdefault(shard, []).append((thing, usual, definition))
        alike = grouped((tuple(_essential(differences)), shard) for shard, differences in differing.items())
        for differences, odd in alike.items():
            names = tuple(sorted({facts.placed[shard].node for shard in odd}))
            at = ", ".join(revisions or ()) or "no revision"
            yield Found(
                what=f"{named_shards(odd)} on {named_nodes(names)} differ{'s' if len(odd) == 1 else ''}"
                f" from most of {len(shards)} at {at}: {_shown(differences)}",
                to_do="Bring them to the same schema, in a migration of these shards, or by hand",
                nodes=names,
                shards=odd,
                thing=" ".join(differences[0][0]).strip(),
            )


def _compared(facts: ClusterFacts) -> dict[int, Peers]:
    """Returns the shards whose schemas were read in full while nothing changed them."""
    compared: dict[int, Peers] = {}
    for name, node in facts.nodes.items():
        unfinished = {stray.shard for stray in node.strays if stray.kind == "revision"}
        for shard, local in node.shards.items():
            if (
                node.engine
                and node.objects
                and local.state == "active"
                and local.has_schema
                and facts.is_settled(shard, name)
                and shard not in node.in_flux | unfinished
            ):
                compared[shard] = node.application_revisions.get(shard), node.engine.server_version // 10000
    return compared


def _variants(facts: ClusterFacts, shards: frozenset[int]) -> dict[Thing, dict[int, str | None]]:
    """Returns the objects that differ between the shards, each with its definition in each shard."""
    variants: dict[Thing, dict[str, set[int]]] = {}
    for name, node in facts.nodes.items():
        for one in node.objects:
            there = {shard for shard in shards.intersection(one.shards) if facts.owns(name, shard)}
            if there and one.kind not in _LEFT_OUT:
                variants.setdefault((one.kind, one.name), {}).setdefault(one.definition, set()).update(there)
    found: dict[Thing, dict[int, str | None]] = {}
    for thing, definitions in variants.items():
        if len(definitions) == 1 and len(*definitions.values()) == len(shards):
            continue
        by_shard: dict[int, str | None] = dict.fromkeys(shards)
        for definition, there in definitions.items():
            by_shard |= dict.fromkeys(there, definition)
        if len(definitions) > 1:
            by_shard = _without_numbers(by_shard)
        # An index that is being built, or was not finished: another check looks at these.
        found[thing] = {
            shard: definition
            for shard, definition in by_shard.items()
            if not (thing[0] == "index" and definition and definition.endswith(_INVALID))
        }
    return found


def _without_numbers(definitions: Mapping[int, str | None]) -> dict[int, str | None]:
    """Returns the definitions without each shard's own number, where that makes them alike."""
    bare = {
        shard: definition and re.sub(rf"(?<![\w.]){shard}(?![\w.])", "{number}", definition)
        for shard, definition in definitions.items()
    }
    return bare if len(set(bare.values())) < len(set(definitions.values())) else dict(definitions)


def _usual(variants: Mapping[int, str | None]) -> str | None:
    """Returns what most shards have; of equally frequent ones, what the first of their shards has."""
    counts = Counter(variants[shard] for shard in sorted(variants))
    return counts.most_common(1)[0][0] if counts else None


def _essential(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Returns the differences without those that follow from others, as the columns of a missing table."""
    differences = sorted(differences, key=lambda one: (one[0][0] != "table", one[0]))
    things = {thing for thing, *_ in differences}
    gone = {
        name
        for (kind, name), usual, own in differences
        if kind in _RELATIONS and (usual is None or own is None)
    }
    constraints = {name for kind, name in things if kind == "constraint"}
    with_columns = {name.partition(".")[0] for kind, name in things if kind == "column"}
    for thing, usual, own in differences:
        kind, name = thing
        part_of_gone = name.partition(".")[0] in gone and "." in name
        described = kind in ("owner", "comment") and name.partition(" ")[2].partition(".")[0] in gone
        order_only = kind == "column order" and name in with_columns
        of_gone = kind in ("column order", "owned sequence", "publication") and name in gone
        if not (
            part_of_gone or described or order_only or of_gone or (kind == "index" and name in constraints)
        ):
            yield thing, usual, own


def _shown(differences: Sequence[Difference]) -> str:
    parts = []
    for (kind, name), usual, own in differences[:_SHOWN]:
        thing = f"{kind} {name}".strip()
        if own is None:
            parts.append(f"no {thing}")
        elif usual is None:
            parts.append(f"{thing} {_short(own)}".strip() + ", which the others lack")
        else:
            parts.append(f"{thing} is {_short(own) or 'plain'}, not {_short(usual) or 'plain'}")
    more = len(differences) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _short(definition: str) -> str:
    line = " ".join(definition.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


CHECKS = (schema_differs,)
"""All checks of this module."""
