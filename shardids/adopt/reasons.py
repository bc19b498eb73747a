"""Why each table of a plan is planned as it is: the comments in its file."""

from __future__ import annotations

from collections.abc import Mapping

from shardids.adopt.facts import Facts, column_name, foreign_key_name
from shardids.adopt.paths import Way
from shardids.adopt.plan import Kind


def reasons(facts: Facts) -> dict[str, str]:
    """Returns why each table is planned as it is."""
    users: dict[str, str] = {}
    for key in facts.inventory.foreign_keys:
        if facts.sorted.kind(key.table) is not Kind.LOOSE:
            users.setdefault(key.referenced_table, key.table)
    return {name: _reason(facts, name, users) for name in facts.inventory.tables}


def _reason(facts: Facts, name: str, users: Mapping[str, str]) -> str:
    if way := facts.sorted.ways.get(name):
        return _split(facts, name, way)
    if facts.sorted.kind(name) is Kind.REFERENCE:
        why = "as wished" if name in facts.wishes.references else f"{users[name]} refers to it"
        return f"Reference: {why}. Every node gets all rows."
    why = (
        "as wished"
        if name in facts.wishes.loose
        else "no foreign key leads to the root, or from what is split"
    )
    return f"Loose: {why}. It stays at the source."


def _split(facts: Facts, name: str, way: Way) -> str:
    if way.kind is Kind.ROOT:
        return f"The root: its {way.key} decides the shard of every row that leads to it."
    if way.first is None:
        return f"Direct: as wished, {column_name(name, way.key)} holds the key."
    if way.kind is Kind.DIRECT:
        return f"Direct: {column_name(name, way.key)} holds the key, by foreign key {way.first.name}."
    hops = ", then ".join(key.referenced_table for key in way.path)
    return f"Derived: {foreign_key_name(way.first)} leads to the key by {hops}."
