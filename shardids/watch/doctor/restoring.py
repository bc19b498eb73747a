"""SQL that brings objects of shards back to the recorded state. It grants nothing, and drops nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from shardids.catalog.recorded import Objects, Thing
from shardids.catalog.topology import schema_name
from shardids.pg.queries import quoted
from shardids.watch.doctor.findings import Command, on_node
from shardids.watch.facts.cluster import ClusterFacts

Difference = tuple[Thing, str | None, str | None]
"""An object, its recorded definition, and that in these shards; ``None`` if it does not exist there."""

_REFERENCES: Final = re.compile(r"REFERENCES \{shard\}\.(\w+|\"[^\"]+\")")
_IDENTITY: Final = re.compile(r" ?replica identity (full|nothing|\{shard\}\.\S+)$")
_SECURED: Final = re.compile(r"(?<!force )row level security")


def remedies(
    facts: ClusterFacts, recorded: Objects, differences: Sequence[Difference], shards: Collection[int]
) -> tuple[Command, ...]:
    """Return the statements that restore the states of objects in shards, as far as statements can."""
    commands: list[Command] = []
    templates = list(dict.fromkeys(_statements(recorded, differences)))
    for node in sorted({facts.placed[shard].node for shard in shards}):
        for shard in sorted(shards):
            if facts.owns(node, shard):
                schema = quoted(schema_name(facts.description.schema_prefix, shard))
                commands += on_node(node, *(one.replace("{shard}", schema) + ";" for one in templates))
    return tuple(commands)


def _statements(recorded: Objects, differences: Sequence[Difference]) -> Iterator[str]:
    ordered = sorted(differences, key=lambda one: (_rank(recorded, one[0]), one[0]))
    for (kind, name), wanted, found in ordered:
        table, part = _parts(recorded, name)
        if kind == "table" and wanted is not None and found is not None:
            yield from _of_table(f"{{shard}}.{quoted(name)}", wanted, found)
        elif kind == "trigger" and part:
            yield from _of_trigger(recorded, table, part, wanted, found)
        elif kind == "constraint" and part and wanted is not None and found == f"{wanted} NOT VALID":
            yield f"alter table {{shard}}.{quoted(table)} validate constraint {quoted(part)}"
        elif kind == "index" and wanted is not None and found is None and "(clustered)" not in wanted:
            yield wanted


def _parts(recorded: Objects, name: str) -> tuple[str, str]:
    """Return the table and the part of it that a name is of; without a part if that is ambiguous."""
    tables = [table for kind, table in recorded if kind == "table" and name.startswith(f"{table}.")]
    return (tables[0], name.removeprefix(f"{tables[0]}.")) if len(tables) == 1 else (name, "")


def _rank(recorded: Objects, thing: Thing, seen: frozenset[str] = frozenset()) -> int:
    """Return how many tables stand between a table and one that refers to none: those are logged first."""
    kind, name = thing
    if kind != "table" or name in seen:
        return 0
    targets = [
        target.strip('"')
        for (one, constraint), definition in recorded.items()
        if one == "constraint" and constraint.partition(".")[0] == name
        for target in _REFERENCES.findall(definition.text)
    ]
    return max((1 + _rank(recorded, (kind, target), seen | {name}) for target in targets), default=0)


def _of_table(table: str, wanted: str, found: str) -> Iterator[str]:
    if found.startswith("unlogged") and not wanted.startswith("unlogged"):
        yield f"alter table {table} set logged"
    was, now = _IDENTITY.search(wanted), _IDENTITY.search(found)
    if (was and was[1]) != (now and now[1]):
        kind = was[1] if was else "default"
        index = kind.removeprefix("{shard}.")
        yield f"alter table {table} replica identity " + (kind if index == kind else f"using index {index}")
    if _SECURED.search(wanted) and not _SECURED.search(found):
        yield f"alter table {table} enable row level security"
    if "force row level security" in wanted and "force row level security" not in found:
        yield f"alter table {table} force row level security"


def _of_trigger(
    recorded: Objects, table: str, name: str, wanted: str | None, found: str | None
) -> Iterator[str]:
    there = f"{{shard}}.{quoted(table)}"
    if name.endswith(" (internal)"):
        # The names of a foreign key's triggers are the server's own. All others are set back afterwards.
        yield f"alter table {there} enable trigger all"
        for (kind, other), definition in sorted(recorded.items()):
            of, trigger = _parts(recorded, other)
            verb = _firing(definition.text)
            if kind == "trigger" and of == table and verb != "enable" and not trigger.endswith(" (internal)"):
                yield f"alter table {there} {verb} trigger {quoted(trigger)}"
    elif wanted is not None and found is not None and _bare(wanted) == _bare(found):
        yield f"alter table {there} {_firing(wanted)} trigger {quoted(name)}"
    elif wanted is not None and found is None:
        yield _bare(wanted)
        if _firing(wanted) != "enable":
            yield f"alter table {there} {_firing(wanted)} trigger {quoted(name)}"


_FIRING: Final = {
    " disabled": "disable",
    " enable replica": "enable replica",
    " enable always": "enable always",
}


def _firing(definition: str) -> str:
    return next((verb for end, verb in _FIRING.items() if definition.endswith(end)), "enable")


def _bare(definition: str) -> str:
    return next((definition.removesuffix(end) for end in _FIRING if definition.endswith(end)), definition)
