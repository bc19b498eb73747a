"""Checks of privileges and owners, and of the objects that unqualified names find."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from shardids.catalog.objects import GENERATOR, GRANTS
from shardids.catalog.recorded import Objects
from shardids.catalog.topology import schema_name
from shardids.pg.notation import named_shards, shown_shards
from shardids.pg.queries import quoted
from shardids.pg.schemas import Stranger
from shardids.watch.doctor.findings import (
    Command,
    Found,
    Severity,
    check,
    grouped,
    in_shell,
    on_catalog,
    on_node,
)
from shardids.watch.doctor.tables import ACCEPT, compared_shards
from shardids.watch.facts.cluster import ClusterFacts, NodeFacts, PathTrap, Strangers

_SHOWN = 5
_GENERATOR = {
    "schema",
    "function next_id()",
    "function next_ids(n integer)",
    "function late_id(id_offset regclass)",
    "function set_aside(id_offset regclass, n integer, past_tick bigint,"
    " OUT first_tick bigint, OUT last_tick bigint)",
    "sequence id_counter",
    "sequence id_offset",
    "engine schema shardids",
    "engine table shardids.node",
    "engine table shardids.shard",
}
"""What ``shardids grant`` grants, by kind and name."""
_ENGINE_OWNER: Final = "{owner}"
"""The owner of schema ``shardids``, as the objects of shards name it."""
_ON: Final = {
    "table": "table",
    "view": "table",
    "materialized view": "table",
    "foreign table": "table",
    "engine table": "table",
    "engine schema": "schema",
    "sequence": "sequence",
    "function": "function",
    "aggregate": "function",
    "procedure": "procedure",
    "type": "type",
    "schema": "schema",
}
"""How GRANT and REVOKE call an object of each kind."""
_BY_DEFAULT: Final = {
    "function": ("EXECUTE",),
    "procedure": ("EXECUTE",),
    "aggregate": ("EXECUTE",),
    "type": ("USAGE",),
}
"""The rights of PUBLIC to an object as it is created."""


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """A right of a role to an object, given by kind and name, the same in all shards."""

    thing: str
    privilege: str
    role: str
    may_grant: bool = False


@check(
    "role-rights",
    Severity.WARNING,
    remedy="Revoke excess rights; grant missing ones, or record it: `shardids shard accept-schema`.",
)
def role_rights(facts: ClusterFacts) -> Iterator[Found]:
    """A role may do more or less in a shard than is recorded or, where nothing is, than in most shards."""
    rights = _Rights.of(facts)
    for key, shards in compared_shards(facts).items():
        there = frozenset(shards)
        recorded = facts.recorded.get(key)
        held = rights.held_in(there, recorded.objects if recorded else {})
        if recorded is not None:
            expected = _expected(recorded.objects, held)
        else:
            # Half is not most: rights are rather taken away than given.
            expected = {one for one in held if 2 * len(held[one]) > len(rights.having(one.thing, there))}
        more: list[tuple[Right, int]] = []
        less: list[tuple[Right, int]] = []
        for right in held.keys() | expected:
            if right.role == _ENGINE_OWNER:
                continue
            having = held.get(right, frozenset())
            if right not in expected:
                more += [(right, shard) for shard in having]
            else:
                lacking = rights.having(right.thing, there) - having
                lacking -= rights.owned.get((right.thing, right.role), frozenset())
                # Where the schema of the engine was given to the role, which is a finding of its own.
                lacking -= rights.given.get(replace(right, role=_ENGINE_OWNER), frozenset())
                less += [(right, shard) for shard in lacking]
        yield from _too_much(facts, more, is_recorded=recorded is not None)
        yield from _too_little(facts, less, is_recorded=recorded is not None)


def _too_much(facts: ClusterFacts, more: list[tuple[Right, int]], *, is_recorded: bool) -> Iterator[Found]:
    for (role, rights), odd in _by_role(more).items():
        yield Found(
            what=f'role "{role}" has rights in {named_shards(odd)} that'
            f" {'are not recorded' if is_recorded else 'it lacks in most'}: {_listed_rights(rights)}",
            to_do=f"Revoke them; if they are intended, grant them in all shards, and record that: {ACCEPT}",
            commands=_revokes(facts, rights, odd),
            nodes=tuple(sorted({facts.placed[shard].node for shard in odd})),
            shards=odd,
            thing=role,
        )


def _too_little(facts: ClusterFacts, less: list[tuple[Right, int]], *, is_recorded: bool) -> Iterator[Found]:
    for (role, rights), odd in _by_role(less).items():
        yield Found(
            what=f'role "{role}" lacks rights in {named_shards(odd)} that'
            f" {'are recorded' if is_recorded else 'it has in most'}: {_listed_rights(rights)}",
            to_do="If the role should have them, grant them there; else revoke them in all shards, and record"
            f" that: {ACCEPT}",
            commands=_grants(role, rights, odd),
            nodes=tuple(sorted({facts.placed[shard].node for shard in odd})),
            shards=odd,
            thing=role,
        )


def _listed_rights(rights: Sequence[Right]) -> str:
    """Return rights in words: those to one object together."""
    by_thing: dict[str, list[str]] = {}
    for right in rights:
        verb = right.privilege.lower()
        by_thing.setdefault(right.thing, []).append(f"grant {verb}" if right.may_grant else verb)
    return ", ".join(
        f"{'/'.join(verbs)} {thing.partition(' ')[2] or f'the {thing}'}" for thing, verbs in by_thing.items()
    )


@dataclass(frozen=True, slots=True)
class _Rights:
    """The shards where rights are given and, if they come with an object, where they are revoked.

    ``owned`` has the shards by object and owner, ``objects`` those that have an object.
    """

    given: Mapping[Right, frozenset[int]]
    revoked: Mapping[Right, frozenset[int]]
    owned: Mapping[tuple[str, str], frozenset[int]]
    objects: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, facts: ClusterFacts) -> _Rights:
        given: dict[Right, set[int]] = {}
        revoked: dict[Right, set[int]] = {}
        owned: dict[tuple[str, str], set[int]] = {}
        objects: dict[str, set[int]] = {}
        for name, node in facts.nodes.items():
            settled = facts.settled_on(name)
            for one in node.objects:
                there = settled.intersection(one.shards)
                if one.kind == GRANTS:
                    for right, is_given in _parsed(one.name, one.definition):
                        (given if is_given else revoked).setdefault(right, set()).update(there)
                elif one.kind == "owner":
                    owned.setdefault((one.name, one.definition), set()).update(there)
                else:
                    thing = one.name if one.kind == GENERATOR else f"{one.kind} {one.name}".strip()
                    objects.setdefault(thing, set()).update(there)
        return cls(_frozen(given), _frozen(revoked), _frozen(owned), _frozen(objects))

    def having(self, thing: str, shards: frozenset[int]) -> frozenset[int]:
        """Return those of the shards that have an object."""
        return self.objects.get(thing, frozenset()) & shards

    def held_in(self, shards: frozenset[int], recorded: Objects) -> dict[Right, frozenset[int]]:
        """Return the shards where roles have rights, also rights that are not recorded."""
        held = {right: there & shards for right, there in self.given.items() if there & shards}
        by_default = {right for right, there in self.revoked.items() if there & shards}
        by_default |= {right for right, is_given in _recorded(recorded) if not is_given}
        for right in by_default:
            there = self.having(right.thing, shards) - self.revoked.get(right, frozenset())
            held[right] = held.get(right, frozenset()) | there
        return held


_Key = TypeVar("_Key")


def _frozen(found: Mapping[_Key, set[int]]) -> dict[_Key, frozenset[int]]:
    return {one: frozenset(there) for one, there in found.items()}


def _expected(recorded: Objects, held: Collection[Right]) -> set[Right]:
    lines = dict(_recorded(recorded))
    things = {f"{kind} {name}".strip() for kind, name in recorded}
    given = {right for right, is_given in lines.items() if is_given}
    # What comes with an object, and was revoked in some shard, is not in the lines of the others.
    return given | {
        right
        for right in held
        if right not in lines
        and right.role == "public"
        and right.privilege in _BY_DEFAULT.get(right.thing.partition(" ")[0], ())
        and (right.thing in things or right.thing in _GENERATOR)
    }


def _recorded(recorded: Objects) -> Iterator[tuple[Right, bool]]:
    for (kind, name), one in recorded.items():
        if kind == GRANTS:
            yield from _parsed(name, one.text)


def _parsed(thing: str, definition: str) -> Iterator[tuple[Right, bool]]:
    """Yield the rights of the lines of an object's privileges, and whether they are given or revoked."""
    for line in definition.splitlines():
        privilege, is_given, role = line.partition(" to ")
        if not is_given:
            privilege, _, role = line.partition(" revoked from ")
        bare = role.removesuffix(" with grant option")
        yield Right(thing, privilege, bare), bool(is_given)
        if bare != role:
            yield Right(thing, privilege, bare, may_grant=True), bool(is_given)


def _by_role(
    pairs: Iterable[tuple[Right, int]],
) -> dict[tuple[str, tuple[Right, ...]], tuple[int, ...]]:
    """Return the shards by role and by the rights of it that are wrong there."""
    by_shard: dict[tuple[str, int], set[Right]] = {}
    for right, shard in pairs:
        by_shard.setdefault((right.role, shard), set()).add(right)
    found = grouped(((role, tuple(sorted(rights))), shard) for (role, shard), rights in by_shard.items())
    return dict(sorted(found.items()))


def _grants(role: str, rights: Iterable[Right], shards: Collection[int]) -> tuple[Command, ...]:
    """Return the command that gives back the use of the generator; no other command grants."""
    if role == "public" or not any(right.thing in _GENERATOR - {"schema"} for right in rights):
        return ()
    return in_shell(f"shardids grant {shlex.quote(role)} --shards {shown_shards(shards)}")


def _revokes(facts: ClusterFacts, rights: Collection[Right], shards: Collection[int]) -> tuple[Command, ...]:
    """Return the commands that take rights away: on each node, those for its shards."""
    prefix = facts.description.schema_prefix
    by_thing: dict[tuple[str, str, str], list[str]] = {}
    for right in sorted(rights):
        # A right takes the right to grant it along.
        if not (right.may_grant and replace(right, may_grant=False) in rights):
            option = "grant option for " if right.may_grant else ""
            by_thing.setdefault((right.thing, right.role, option), []).append(right.privilege.lower())
    commands: list[Command] = []
    for node in sorted({facts.placed[shard].node for shard in shards}):
        schemas = [schema_name(prefix, shard) for shard in shards if facts.owns(node, shard)]
        for (thing, role, option), privileges in by_thing.items():
            grantee = "public" if role == "public" else quoted(role)
            for on, columns in _objects(thing, schemas):
                what = ", ".join(f"{privilege}{columns}" for privilege in privileges)
                commands += on_node(node, f"revoke {option}{what} on {on} from {grantee};")
    return tuple(commands)


def _objects(thing: str, schemas: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what REVOKE names for an object in schemas, and the columns that it names."""
    kind = next(
        (
            kind
            for kind in sorted(_ON, key=len, reverse=True)
            if thing == kind or thing.startswith(f"{kind} ")
        ),
        "",
    )
    name = thing.removeprefix(kind).strip()
    if thing.startswith("column "):
        # A name with another dot is ambiguous.
        table, _, column = thing.removeprefix("column ").partition(".")
        if "." not in column:
            tables = ", ".join(quoted(schema, table) for schema in schemas)
            yield f"table {tables}", f" ({quoted(column)})"
    elif kind.startswith("engine "):
        yield f"{_ON[kind]} {name}", ""
    elif kind == "schema":
        yield f"schema {', '.join(map(quoted, schemas))}", ""
    elif kind:
        # A function's name is quoted already, with its arguments.
        is_quoted = "(" in name and _ON[kind] in ("function", "procedure")
        names = (
            f"{quoted(schema)}.{_of_shard(schema, name) if is_quoted else quoted(name)}" for schema in schemas
        )
        yield f"{_ON[kind]} {', '.join(names)}", ""


def _of_shard(schema: str, function: str) -> str:
    """Return a function by its name in a schema: two of the generator have the shard's number in theirs."""
    number = re.search(r"\d+$", schema)
    return re.sub(r"^(late_id|set_aside)\(", rf"\1_{int(number[0])}(", function) if number else function


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
    """Leave out what generator-sequence gives back: a sequence that is dropped and made anew repeats IDs."""
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
                f' replace its objects; the engine is owned by "{strangers.owner}"',
                to_do="Check the schema for changes by the role, and give it back",
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
                f' "{strangers.owner}", and commands may run their code with its rights',
                to_do="Read their code, drop them, and repeat the command that creates the necessary ones",
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
    """Return the ALTER ROLE or ALTER DATABASE that resets the setting exactly where it is set."""
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
