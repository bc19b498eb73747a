"""Checks of who may do what, and of where unqualified names lead."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from shardids.catalog.notation import named_shards, shown_shards
from shardids.catalog.schemas import Stranger
from shardids.catalog.topology import schema_name
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.facts import NodeFacts, PathTrap, Strangers
from shardids.doctor.findings import (
    Command,
    Found,
    Severity,
    check,
    grouped,
    in_shell,
    on_catalog,
    on_node,
    quoted,
)

Thing = tuple[str, str]
"""Kind and name of an object, the same in all shards."""
Privileges = frozenset[str]

_OWNER = "OWNER"
_SHOWN = 5
_SCHEMA = ("schema", "")
_GENERATOR = {
    _SCHEMA,
    ("function", "next_id()"),
    ("function", "next_ids(n integer)"),
    ("function", "late_id(id_offset regclass)"),
    (
        "function",
        "set_aside(id_offset regclass, n integer, past_tick bigint,"
        " OUT first_tick bigint, OUT last_tick bigint)",
    ),
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
                to_do="Grant the same in all shards, or revoke it from the others",
                commands=_grants(facts, role, lacking, shards),
                nodes=tuple(sorted({facts.placed[shard].node for shard in shards})),
                shards=shards,
                thing=role,
            )


def _privileges(facts: ClusterFacts) -> dict[tuple[Thing, str | None], dict[int, Privileges]]:
    """Returns, by object and role, what the role may do in which shard; by ``None``, where the object is."""
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


def _grants(
    facts: ClusterFacts, role: str, missing: Collection[tuple[Thing, Privileges]], shards: Collection[int]
) -> tuple[Command, ...]:
    """Returns the commands that grant the role what it lacks: on each node, those for its shards."""
    to = "public" if role == "public" else quoted(role)
    commands: list[Command] = []
    generator = _GENERATOR if any(thing in _GENERATOR - {_SCHEMA} for thing, _ in missing) else set()
    if generator:
        commands += in_shell(f"shardids grant {shlex.quote(role)} --shards {shown_shards(shards)}")
    prefix = facts.description.schema_prefix
    for node in sorted({facts.placed[shard].node for shard in shards}):
        schemas = [schema_name(prefix, shard) for shard in shards if facts.owns(node, shard)]
        for (kind, name), privileges in sorted(missing, key=_by_name):
            if (kind, name) not in generator:
                objects = ", ".join(_qualified(schema, kind, name) for schema in schemas)
                verbs = ", ".join(sorted(privileges)).lower()
                commands += on_node(node, f"grant {verbs} on {kind} {objects} to {to};")
    return tuple(commands)


def _qualified(schema: str, kind: str, name: str) -> str:
    """Returns an object's name; a function's is quoted already, with its arguments."""
    if kind == "schema":
        return quoted(schema)
    return f"{quoted(schema)}.{name if kind == 'function' else quoted(name)}"


@check("schema-owner", Severity.ERROR, remedy="Give schemas back; drop the objects that it names.")
def schema_owner(facts: ClusterFacts) -> Iterator[Found]:
    """Another role than the engine's owns a schema or an object of shardids, or may create objects there."""
    if facts.catalog_strangers is not None:
        yield from _strangers(facts.catalog_strangers, "in the catalog's database", (), on_catalog)
    for name, node in facts.nodes.items():
        if node.strangers is not None:
            others = replace(node.strangers, found=_without_sequences(node, node.strangers.found))
            yield from _strangers(others, f'on node "{name}"', (name,), partial(on_node, name))


def _without_sequences(node: NodeFacts, found: Sequence[Stranger]) -> list[Stranger]:
    """Leaves out what generator-sequence gives back: a sequence that is dropped and made anew repeats IDs."""
    told = {(node.shards[one.shard].schema, one.name) for one in node.sequences if one.shard in node.shards}
    return [
        one
        for one in found
        if not (one.object.startswith("sequence ") and (one.schema, one.object.rpartition(".")[2]) in told)
    ]


def _strangers(
    strangers: Strangers, where: str, nodes: tuple[str, ...], commands: Callable[..., tuple[Command, ...]]
) -> Iterator[Found]:
    by_role: dict[tuple[str, str], list[Stranger]] = {}
    for one in strangers.found:
        kind = one.kind if one.kind in ("schema", "create") else "object"
        by_role.setdefault((kind, one.role), []).append(one)
    for (kind, role), found in by_role.items():
        schemas = [one.schema for one in found]
        shards = tuple(strangers.shards[one] for one in schemas if one in strangers.shards)
        if kind == "schema":
            whose = [f"schema {one}" for one in schemas if one not in strangers.shards]
            if shards:
                whose.append(f"the schema of {named_shards(shards)}")
            yield Found(
                what=f'{" and ".join(whose)} {where}: owned by role "{role}", which can drop and'
                f' replace what is in it; the engine is owned by "{strangers.owner}"',
                to_do="See what the role has changed there, and give the schema back",
                commands=commands(
                    *(f"alter schema {quoted(one)} owner to {quoted(strangers.owner)};" for one in schemas)
                ),
                nodes=nodes,
                shards=shards,
                thing=role,
            )
        elif kind == "create":
            grantee = "public" if role == "public" else quoted(role)
            yield Found(
                what=f'role "{role}" may create objects in {_listed(found)} {where}',
                to_do="Revoke it, and examine the objects of the role there",
                commands=commands(
                    *(f"revoke create on schema {quoted(one)} from {grantee};" for one in schemas)
                ),
                nodes=nodes,
                thing=role,
            )
        else:
            yield Found(
                what=f'role "{role}" owns {_listed(found)} {where}; the engine is owned by'
                f' "{strangers.owner}", and commands may run the code of these with its rights',
                to_do="Read their code, drop them, and repeat the command that makes those that are needed",
                nodes=nodes,
                shards=tuple(sorted(set(shards))),
                thing=role,
            )


def _listed(found: Sequence[Stranger]) -> str:
    shown = ", ".join(one.object for one in found[:_SHOWN])
    return shown + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


@check("search-path", Severity.WARNING, remedy="Reset the setting, or name the schema.")
def search_path(facts: ClusterFacts) -> Iterator[Found]:
    """A role's or the database's `search_path` leads into one shard, whichever shard is meant."""
    for name, node in facts.nodes.items():
        for trap in node.path_traps:
            if trap.kind == "setting":
                whose = f'role "{trap.name}"' if trap.name else "the database"
                yield Found(
                    what=f'search_path of {whose} on node "{name}" is {trap.path}: every name without a'
                    f" schema is taken from {named_shards(trap.shards)}",
                    to_do="Reset it; sessions that are connected keep it until they reconnect",
                    commands=on_node(name, _reset(trap)),
                    nodes=(name,),
                    shards=tuple(trap.shards),
                    thing=trap.name,
                )


def _reset(trap: PathTrap) -> str:
    """Returns the ALTER ROLE or ALTER DATABASE that resets the setting exactly where it is set."""
    if not trap.name:
        whom = f"database {quoted(trap.database)}" if trap.database else "role all"
    else:
        whom = f"role {quoted(trap.name)}" + (
            f" in database {quoted(trap.database)}" if trap.database else ""
        )
    return f"alter {whom} reset search_path;"


@check("shadowed-name", Severity.WARNING, remedy="Rename or drop it.")
def shadowed_name(facts: ClusterFacts) -> Iterator[Found]:
    """A table or `next_id()` in `public`, or in a schema on a search_path, that hides those of the shards."""
    for name, node in facts.nodes.items():
        for trap in node.path_traps:
            if trap.kind != "setting":
                yield Found(
                    what=f'{trap.kind} {trap.name} on node "{name}" has the name of one in the shards: a'
                    " session that omits the schema uses it, and no error is raised",
                    to_do=f"Rename the {trap.kind}, or drop it if it is not needed",
                    nodes=(name,),
                    shards=tuple(trap.shards),
                    thing=trap.name,
                )


CHECKS = (role_rights, schema_owner, search_path, shadowed_name)
"""All checks of this module."""
