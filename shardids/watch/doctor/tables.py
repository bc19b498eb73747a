"""Checks of the application's tables: keys, indexes, revisions, and objects that differ between shards."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shardids.catalog.objects import GRANTS, NOT_COMPARED, UNKNOWN_OPTION
from shardids.catalog.recorded import Key, Thing, compared, revision_of, without_number
from shardids.pg.notation import named_nodes, named_shards, shown_shards
from shardids.pg.queries import quoted
from shardids.watch.doctor.findings import Found, Severity, check, grouped, in_shell, on_node
from shardids.watch.doctor.restoring import Difference, remedies
from shardids.watch.facts.cluster import ClusterFacts, KeyColumn

_FORGET: Final = "comment on column public.alembic_node_version.version_num is null;"


@check("primary-key-default", Severity.WARNING, remedy="Give it the shard's `next_id()` as its default.")
def primary_key_default(facts: ClusterFacts) -> Iterator[Found]:
    """A primary key in a shard that the shard's `next_id()` does not fill, but a sequence or nothing does."""
    for name, node in facts.nodes.items():
        for key in node.keys:
            if key.is_primary_key and not key.is_foreign_key and (why := _not_ours(key)):
                yield Found(
                    what=f'{key.table_name}.{key.column_name} in {named_shards(key.shards)} of node "{name}":'
                    f" {why}",
                    to_do=f"In a migration of all shards: alter table {key.table_name} alter"
                    f" {key.column_name} type bigint, alter {key.column_name} set default next_id()",
                    nodes=(name,),
                    shards=tuple(key.shards),
                    thing=f"{key.table_name}.{key.column_name}",
                )


def _not_ours(key: KeyColumn) -> str:
    if key.filled_by == "sequence":
        return "a sequence fills it, which begins at 1 in every shard: the keys are not unique over shards"
    if key.type == "bigint" and key.filled_by in ("none", "other"):
        return f"{'nothing' if key.filled_by == 'none' else 'another expression'} fills it, not next_id()"
    return ""


@check("id-column-type", Severity.ERROR, remedy="Make it `bigint`.")
def id_column_type(facts: ClusterFacts) -> Iterator[Found]:
    """A column for IDs of type integer or smallint: inserts fail, for no ID fits."""
    for name, node in facts.nodes.items():
        for key in node.keys:
            holds_ids = key.filled_by in ("own", "foreign") or (
                key.is_primary_key
                and not key.is_foreign_key
                and key.filled_by == "none"
                and (key.column_name == "id" or key.column_name.endswith("_id"))
            )
            if holds_ids and key.type in ("integer", "smallint"):
                schemas = [node.shards[shard].schema for shard in key.shards if shard in node.shards]
                column = quoted(key.column_name)
                yield Found(
                    what=f"{key.table_name}.{key.column_name} in {named_shards(key.shards)} of node"
                    f' "{name}" is {key.type}, and IDs are bigint',
                    to_do="Change the type, in a migration of all shards; it rewrites the table under a lock",
                    commands=on_node(
                        name,
                        *(
                            f"alter table {quoted(schema)}.{quoted(key.table_name)}"
                            f" alter {column} type bigint,"
                            f" alter {column} set default {quoted(schema)}.next_id();"
                            for schema in schemas
                        ),
                    ),
                    nodes=(name,),
                    shards=tuple(key.shards),
                    thing=f"{key.table_name}.{key.column_name}",
                )


@check("key-of-another-shard", Severity.ERROR, remedy="Set the shard's own `next_id()` as the default.")
def key_of_another_shard(facts: ClusterFacts) -> Iterator[Found]:
    """A column that another schema's `next_id()` fills: its IDs name a shard where the rows are not."""
    for name, node in facts.nodes.items():
        for key in node.keys:
            if key.filled_by == "foreign":
                schemas = [node.shards[shard].schema for shard in key.shards if shard in node.shards]
                yield Found(
                    what=f"{key.table_name}.{key.column_name} in {named_shards(key.shards)} of node"
                    f' "{name}" is filled by {key.filled_from}.next_id()',
                    to_do="Set the shard's own next_id() as the default",
                    commands=on_node(
                        name,
                        *(
                            f"alter table {quoted(schema)}.{quoted(key.table_name)} alter"
                            f" {quoted(key.column_name)} set default {quoted(schema)}.next_id();"
                            for schema in schemas
                        ),
                    ),
                    nodes=(name,),
                    shards=tuple(key.shards),
                    thing=f"{key.table_name}.{key.column_name}",
                )


@check("foreign-key-type", Severity.ERROR, remedy="Make it `bigint`.")
def foreign_key_type(facts: ClusterFacts) -> Iterator[Found]:
    """A foreign key of type integer over IDs, which are bigint: inserts fail, for no ID fits."""
    for name, node in facts.nodes.items():
        for key in node.foreign_keys:
            if key.type != key.target_type:
                yield Found(
                    what=f"{key.table_name}.{key.column_name} in {named_shards(key.shards)} of node"
                    f' "{name}" is {key.type}, and refers to {key.target_table}.{key.target_column}, which is'
                    f" {key.target_type}",
                    to_do=f"In a migration of all shards: alter table {key.table_name} alter"
                    f" {key.column_name} type {key.target_type}",
                    nodes=(name,),
                    shards=tuple(key.shards),
                    thing=f"{key.table_name}.{key.column_name}",
                )


@check("foreign-key-leaves-shard", Severity.WARNING, remedy="Drop it: a shard must be movable by itself.")
def foreign_key_leaves_shard(facts: ClusterFacts) -> Iterator[Found]:
    """A foreign key that refers to a table outside of its shard, so that the shard can't be moved."""
    for name, node in facts.nodes.items():
        for key in node.foreign_keys:
            if key.target_schema is not None:
                yield Found(
                    what=f"{key.table_name}.{key.column_name} in {named_shards(key.shards)} of node"
                    f' "{name}" refers to {key.target_schema}.{key.target_table}',
                    to_do="Drop the constraint, or bring the table into the shards",
                    nodes=(name,),
                    shards=tuple(key.shards),
                    thing=f"{key.table_name}.{key.column_name}",
                )


@check("invalid-index", Severity.WARNING, remedy="Build it again: `reindex index concurrently`.")
def invalid_index(facts: ClusterFacts) -> Iterator[Found]:
    """An index that CREATE INDEX CONCURRENTLY left unfinished: it is not used, and may not be unique."""
    for name, node in facts.nodes.items():
        for index in node.invalid_indexes:
            schemas = [node.shards[shard].schema for shard in index.shards if shard in node.shards]
            yield Found(
                what=f"index {index.index_name} on {index.table_name} in {named_shards(index.shards)} of node"
                f' "{name}" is invalid, and nobody is building it',
                to_do="Rebuild it; for a unique index, remove the duplicates first",
                commands=on_node(
                    name,
                    *(
                        f"reindex index concurrently {quoted(schema)}.{quoted(index.index_name)};"
                        for schema in schemas
                    ),
                ),
                nodes=(name,),
                shards=tuple(index.shards),
                thing=index.index_name,
            )


@check("revisions-apart", Severity.WARNING, remedy="Run the application's migrations over all shards.")
def revisions_apart(facts: ClusterFacts) -> Iterator[Found]:
    """Shards whose `alembic_version` is not the same as that of most, while no migration is running."""
    if facts.is_migrating:
        return
    at = grouped(
        (node.application_revisions.get(shard), shard)
        for name, node in facts.nodes.items()
        # With an error, perhaps none was read.
        if node.engine and (node.application_revisions or not node.error)
        for shard, local in node.shards.items()
        if local.has_schema
        and shard in facts.placed
        and facts.placed[shard].node == name
        and ("alembic_version", shard) not in node.unread
    )
    usual = max(at, key=lambda revisions: len(at[revisions]), default=None)
    for revisions, shards in at.items():
        if revisions != usual:
            yield Found(
                what=f"{named_shards(shards)}: at {_named(revisions)}; {len(at[usual])} shards are at"
                f" {_named(usual)}",
                to_do=f"Migrate all shards to one revision; these differ: {shown_shards(shards)}",
                shards=shards,
                thing="alembic_version",
            )


def _named(revisions: tuple[str, ...] | None) -> str:
    if revisions is None:
        return "no revision (there is no alembic_version)"
    return ", ".join(revisions) or "base"


@check(
    "revision-edited",
    Severity.WARNING,
    remedy="Make the shards alike, and record it: `shardids migrate stamp`.",
)
def revision_edited(facts: ClusterFacts) -> Iterator[Found]:
    """A revision that was edited between shards, or nodes: they ran other statements under its name."""
    for revision, hashes in _hashes_of_shards(facts).items():
        usual = max(hashes, key=lambda one: len(hashes[one]))
        odd = {shard for one, shards in hashes.items() if one != usual for shard in shards}
        if odd:
            everyone = odd | hashes[usual]
            names = tuple(sorted({facts.placed[shard].node for shard in odd}))
            yield Found(
                what=f"{named_shards(odd)} on {named_nodes(names)} ran another text of revision"
                f" {revision} than {named_shards(hashes[usual])}: it was edited in between",
                to_do="Compare the shards (shardids migrate check --all) and make them alike; then record"
                " that they match the code's revision",
                commands=in_shell(*_stamps(facts, everyone)),
                nodes=names,
                shards=tuple(sorted(odd)),
                thing=revision,
            )
    for revision, on in _hashes_of_nodes(facts).items():
        usual = max(on, key=lambda one: len(on[one]))
        names = tuple(sorted(name for one, there in on.items() if one != usual for name in there))
        if names:
            yield Found(
                what=f"{named_nodes(names)} ran another text of revision {revision} for the node than"
                f" {named_nodes(sorted(on[usual]))}: it was edited in between",
                to_do="Make the nodes alike; then delete their records of the revision",
                commands=tuple(command for name in names for command in on_node(name, _FORGET)),
                nodes=names,
                thing=revision,
            )


def _hashes_of_shards(facts: ClusterFacts) -> dict[str, dict[str, set[int]]]:
    """Return the shards by revision and by the hash that they recorded of it."""
    found: dict[str, dict[str, set[int]]] = {}
    for name, node in facts.nodes.items():
        for one in node.recorded:
            shards = {s for s in one.shards if facts.is_settled(s, name) and s not in node.in_flux}
            if shards:
                for revision, value in one.hashes.items():
                    found.setdefault(revision, {}).setdefault(value, set()).update(shards)
    return dict(sorted(found.items()))


def _hashes_of_nodes(facts: ClusterFacts) -> dict[str, dict[str, set[str]]]:
    """Return the nodes by revision for the node and by the hash that they recorded of it."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, node in facts.nodes.items():
        for one in node.recorded:
            if not one.shards:
                for revision, value in one.hashes.items():
                    found.setdefault(revision, {}).setdefault(value, set()).add(name)
    return dict(sorted(found.items()))


def _stamps(facts: ClusterFacts, shards: set[int]) -> Iterator[str]:
    """Yield commands that record what shards with a single head are at."""
    heads = grouped(
        (facts.nodes[facts.placed[shard].node].application_revisions.get(shard, ()), shard)
        for shard in shards
    )
    for revisions, there in sorted(heads.items()):
        if len(revisions) == 1:
            yield f"shardids migrate stamp {shlex.quote(revisions[0])} --shards {shown_shards(there)}"


_SHOWN: Final = 5
_LONGEST: Final = 160
_LEFT_OUT: Final = NOT_COMPARED | {GRANTS}
"""Kinds that other checks report."""
_RELATIONS: Final = frozenset({"table", "view", "materialized view", "foreign table", "sequence", "type"})
_INVALID: Final = "(invalid)"
ACCEPT: Final = "shardids shard accept-schema"


@check("schema-differs", Severity.WARNING, remedy="Bring the shards to the same schema, in a migration.")
def schema_differs(facts: ClusterFacts) -> Iterator[Found]:
    """Tables, columns, constraints, indexes, triggers, functions, owners or others are not as recorded."""
    for key, shards in compared_shards(facts).items():
        recorded = facts.recorded.get(key)
        differing: dict[int, list[Difference]] = {}
        if recorded is not None:
            there = frozenset(shards)
            expected = {thing: it for thing, it in recorded.objects.items() if thing[0] not in _LEFT_OUT}
            for thing, wrong in sorted(compared(expected, there, _rows(facts, there)).items()):
                for shard, definition in wrong.items():
                    if not _is_unfinished(thing, definition):
                        wanted = expected[thing].text if thing in expected else None
                        differing.setdefault(shard, []).append((thing, wanted, definition))
            against, to_do = (
                "the recorded schema",
                (
                    "Bring them back to that, by hand or in a migration; if the change is meant, record it:"
                    f" {ACCEPT} --dry-run shows it"
                ),
            )
        else:
            for thing, variants in sorted(_variants(facts, frozenset(shards)).items()):
                usual = _usual(variants)
                for shard, definition in variants.items():
                    if definition != usual:
                        differing.setdefault(shard, []).append((thing, usual, definition))
            against = f"most of {len(shards)}"
            to_do = "Bring them to the same schema, in a migration of these shards, or by hand"
        alike = grouped((tuple(_essential(differences)), shard) for shard, differences in differing.items())
        for differences, odd in alike.items():
            names = tuple(sorted({facts.placed[shard].node for shard in odd}))
            yield Found(
                what=f"{named_shards(odd)} on {named_nodes(names)} differ{'s' if len(odd) == 1 else ''}"
                f" from {against} at {key[0] or 'no revision'}: {_shown(differences)}",
                to_do=to_do,
                commands=remedies(facts, recorded.objects, differences, odd) if recorded is not None else (),
                nodes=names,
                shards=odd,
                thing=" ".join(differences[0][0]).strip(),
            )


@check("schema-unrecorded", Severity.INFO, remedy=f"Look at it and record it: `{ACCEPT}`.")
def schema_unrecorded(facts: ClusterFacts) -> Iterator[Found]:
    """Shards with tables whose schema is not recorded: they are only compared with each other."""
    having = {
        shard
        for node in facts.nodes.values()
        for one in node.objects
        if one.kind == "table" and one.name != "alembic_version"
        for shard in one.shards
    }
    for key, shards in compared_shards(facts).items():
        there = [shard for shard in shards if shard in having]
        if there and key not in facts.recorded and not facts.is_migrating:
            yield Found(
                what=f"{named_shards(there)}, at {key[0] or 'no revision'} on PostgreSQL {key[1]}: no schema"
                " is recorded, so a change of all shards is not detected",
                to_do="Look at the schema, and record it",
                commands=in_shell(f"{ACCEPT} --dry-run", ACCEPT),
                shards=tuple(there),
                thing=key[0] or "no revision",
            )


@check("unknown-option", Severity.INFO, remedy="None is needed: shardids does not compare them.")
def unknown_option(facts: ClusterFacts) -> Iterator[Found]:
    """Options of tables or columns that PostgreSQL does not have: a vendor's server keeps notes there."""
    found = grouped(
        (one.name, shard)
        for node in facts.nodes.values()
        for one in node.objects
        if one.kind == UNKNOWN_OPTION
        for shard in one.shards
    )
    if found:
        shards = sorted({shard for there in found.values() for shard in there})
        yield Found(
            what=f"options of tables or columns that PostgreSQL does not have, in {named_shards(shards)}:"
            f" {', '.join(sorted(found))}",
            to_do="Nothing is necessary: shardids does not compare them",
            shards=tuple(shards),
            thing=", ".join(sorted(found)),
        )


def compared_shards(facts: ClusterFacts) -> dict[Key, tuple[int, ...]]:
    """Return the shards whose schemas were read in full while nothing changed them, by their key."""
    compared: list[tuple[Key, int]] = []
    for name, node in facts.nodes.items():
        unfinished = {stray.shard for stray in node.strays if stray.kind == "revision"}
        settled = facts.settled_on(name) - node.in_flux - unfinished
        for shard, local in node.shards.items():
            if (
                node.engine
                and node.objects
                and local.state == "active"
                and local.has_schema
                and shard in settled
            ):
                revision = revision_of(node.application_revisions.get(shard))
                compared.append(((revision, node.engine.server_version // 10000), shard))
    return {key: shards for key, shards in grouped(compared).items() if key not in facts.rerecorded}


def _rows(facts: ClusterFacts, shards: frozenset[int]) -> Iterator[tuple[Thing, str, set[int]]]:
    """Yield each definition of an object, with those of the shards that have it."""
    for name, node in facts.nodes.items():
        own = shards & facts.settled_on(name)
        for one in node.objects:
            if one.kind not in _LEFT_OUT:
                there = set(own.intersection(one.shards))
                if there:
                    yield (one.kind, one.name), one.definition, there


def _is_unfinished(thing: Thing, definition: str | None) -> bool:
    return thing[0] == "index" and definition is not None and definition.endswith(_INVALID)


def _variants(facts: ClusterFacts, shards: frozenset[int]) -> dict[Thing, dict[int, str | None]]:
    """Return the objects that differ between the shards, each with its definition in each shard."""
    variants: dict[Thing, dict[str, set[int]]] = {}
    for thing, definition, there in _rows(facts, shards):
        variants.setdefault(thing, {}).setdefault(definition, set()).update(there)
    found: dict[Thing, dict[int, str | None]] = {}
    for thing, definitions in variants.items():
        if len(definitions) == 1 and len(*definitions.values()) == len(shards):
            continue
        by_shard: dict[int, str | None] = dict.fromkeys(shards)
        for definition, there in definitions.items():
            by_shard |= dict.fromkeys(there, definition)
        if len(definitions) > 1:
            by_shard = _without_numbers(by_shard)
        found[thing] = {
            shard: definition
            for shard, definition in by_shard.items()
            if not _is_unfinished(thing, definition)
        }
    return found


def _without_numbers(definitions: Mapping[int, str | None]) -> dict[int, str | None]:
    """Return the definitions without each shard's own number, where that makes them alike."""
    bare = {
        shard: definition and without_number(definition, shard) for shard, definition in definitions.items()
    }
    return bare if len(set(bare.values())) < len(set(definitions.values())) else dict(definitions)


def _usual(variants: Mapping[int, str | None]) -> str | None:
    """Return the variant of most shards; of equally frequent ones, the variant of the first shard."""
    counts = Counter(variants[shard] for shard in sorted(variants))
    return counts.most_common(1)[0][0] if counts else None


def _essential(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Yield the differences without those that follow from others, as the columns of a missing table."""
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
