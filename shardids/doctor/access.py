"""Checks of who may do what, and of where unqualified names lead."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardids.catalog.notation import named_shards, shown_shards
from shardids.catalog.topology import schema_name
from shardids.doctor.facts import ClusterFacts
from shardids.doctor.findings import Found, Severity, check, grouped

Thing = tuple[str, str]
"""Kind and name of an object, the same in all shards."""
Privileges = frozenset[str]

_OWNER = "OWNER"
_GENERATOR = {
    ("schema", ""),
    ("function", "next_id()"),
    ("function", "next_ids(n integer)"),
    ("sequence", "id_counter"),
    ("sequence", "id_offset"),
    ("engine schema", "shardids"),
    ("engine table", "shardids.node"),
    ("engine table", "shardids.shard"),
}
"""What ``shardids grant`` grants."""


@check("role-rights", Severity.WARNING, remedy="Grant the same in all shards: `shardids grant`, or GRANT.")
def role_rights(facts: ClusterFacts) -> Iterator[Found]:
    """A role may do something in some shards and not in others that have the same object."""
    held = _privileges(facts)
    roles = sorted({role for _, role in held if role})
    for role in roles:
        by_shard: dict[int, set[tuple[Thing, Privileges]]] = {}
        for (thing, owner), there in held.items():
            if owner != role:
                continue
            wanted = frozenset[str]().union(*there.values()) - {_OWNER}
            for shard in held[thing, None]:
                has = there.get(shard, frozenset())
                if _OWNER not in has and (missing := wanted - has):
                    by_shard.setdefault(shard, set()).add((thing, missing))
        alike = grouped((frozenset(missing), shard) for shard, missing in by_shard.items())
        for lacking, shards in alike.items():
            yield Found(
                what=f'role "{role}" may not do in {named_shards(shards)} what it may elsewhere: '
                + ", ".join(
                    f"{_verb(privileges)} {_shown(thing)}"
                    for thing, privileges in sorted(lacking, key=_by_name)
                ),
                to_do=_remedy(facts, role, lacking, shards),
                nodes=tuple(sorted({facts.placed[shard].node for shard in shards})),
                shards=shards,
                thing=role,
            )


def _privileges(facts: ClusterFacts) -> dict[tuple[Thing, str | None], dict[int, Privileges]]:
    """By object and role, what it may do in which shard; with ``None`` for a role, where the object is."""
    held: dict[tuple[Thing, str | None], dict[int, Privileges]] = {}
    for name, node in facts.nodes.items():
        for grant in node.grants:
            there = held.setdefault(((grant.kind, grant.name), grant.role), {})
            for shard in grant.shards:
                if facts.is_settled(shard, name):
                    there[shard] = there.get(shard, frozenset()) | frozenset(grant.privileges)
    return held


def _by_name(lacking: tuple[Thing, Privileges]) -> Thing:
    return lacking[0]


def _verb(privileges: Privileges) -> str:
    return "/".join(sorted(privileges)).lower()


def _shown(thing: Thing) -> str:
    kind, name = thing
    return name or f"the {kind}"


def _remedy(
    facts: ClusterFacts, role: str, missing: Collection[tuple[Thing, Privileges]], shards: Collection[int]
) -> str:
    lines = []
    if any(thing in _GENERATOR for thing, _ in missing):
        lines.append(f"shardids grant {role} --shards {shown_shards(shards)}")
    prefix = facts.description.schema_prefix
    for (kind, name), privileges in sorted(missing, key=_by_name):
        if (kind, name) not in _GENERATOR:
            objects = ", ".join(f"{schema_name(prefix, shard)}.{name}" for shard in shards)
            lines.append(f'grant {", ".join(sorted(privileges)).lower()} on {kind} {objects} to "{role}";')
    return "\n".join(lines)


@check("search-path", Severity.WARNING, remedy="Take the setting back, or name the schema.")
def search_path(facts: ClusterFacts) -> Iterator[Found]:
    """A role's or the database's `search_path` leads into one shard, whichever shard is meant."""
    for name, node in facts.nodes.items():
        for trap in node.path_traps:
            if trap.kind == "setting":
                whose = f'role "{trap.name}"' if trap.name else "the database"
                yield Found(
                    what=f'search_path of {whose} on node "{name}" is {trap.path}: every name without a'
                    " schema is"
                    f" taken from {named_shards(trap.shards)}",
                    to_do=f'alter role "{trap.name}" reset search_path; (or: alter role … in database …'
                    " reset)"
                    if trap.name
                    else "alter database … reset search_path;",
                    nodes=(name,),
                    shards=tuple(trap.shards),
                    thing=trap.name,
                )


@check("shadowed-name", Severity.WARNING, remedy="Rename or drop it.")
def shadowed_name(facts: ClusterFacts) -> Iterator[Found]:
    """A table or `next_id()` in `public`, or in a schema on a search_path, that hides those of the shards."""
    for name, node in facts.nodes.items():
        for trap in node.path_traps:
            if trap.kind != "setting":
                yield Found(
                    what=f'{trap.kind} {trap.name} on node "{name}" has the name of one in the shards: a'
                    " session that"
                    " forgets the schema uses it, and no error is raised",
                    to_do=f"alter {trap.kind} {trap.name} rename to …; or drop {trap.kind} {trap.name};",
                    nodes=(name,),
                    shards=tuple(trap.shards),
                    thing=trap.name,
                )


CHECKS = (role_rights, search_path, shadowed_name)
"""All checks of this module."""
