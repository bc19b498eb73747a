"""Checks of the application's tables: keys, indexes, revisions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from shardids.catalog.notation import named_nodes, named_shards, shown_shards
from shardids.doctor.cluster_facts import ClusterFacts
from shardids.doctor.facts import KeyColumn
from shardids.doctor.findings import Found, Severity, check, grouped, in_shell, on_node, quoted

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
                what=f"{named_shards(odd)} on {named_nodes(names)} ran another revision {revision} than"
                f" {named_shards(hashes[usual])}: it was edited in between",
                to_do="Compare the shards (shardids migrate check --all) and make them alike; then record"
                " that they are as the code's revision makes them",
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
                what=f"{named_nodes(names)} ran another revision {revision} for the node than"
                f" {named_nodes(sorted(on[usual]))}: it was edited in between",
                to_do="Make the nodes alike; then take away what they recorded",
                commands=tuple(command for name in names for command in on_node(name, _FORGET)),
                nodes=names,
                thing=revision,
            )


def _hashes_of_shards(facts: ClusterFacts) -> dict[str, dict[str, set[int]]]:
    """Returns the shards by revision and by the hash that they recorded of it."""
    found: dict[str, dict[str, set[int]]] = {}
    for name, node in facts.nodes.items():
        for one in node.recorded:
            shards = {s for s in one.shards if facts.is_settled(s, name) and s not in node.in_flux}
            if shards:
                for revision, value in one.hashes.items():
                    found.setdefault(revision, {}).setdefault(value, set()).update(shards)
    return dict(sorted(found.items()))


def _hashes_of_nodes(facts: ClusterFacts) -> dict[str, dict[str, set[str]]]:
    """Returns the nodes by revision for the node and by the hash that they recorded of it."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, node in facts.nodes.items():
        for one in node.recorded:
            if not one.shards:
                for revision, value in one.hashes.items():
                    found.setdefault(revision, {}).setdefault(value, set()).add(name)
    return dict(sorted(found.items()))


def _stamps(facts: ClusterFacts, shards: set[int]) -> Iterator[str]:
    """Yields commands that record what shards with a single head are at."""
    heads = grouped(
        (facts.nodes[facts.placed[shard].node].application_revisions.get(shard, ()), shard)
        for shard in shards
    )
    for revisions, there in sorted(heads.items()):
        if len(revisions) == 1:
            yield f"shardids migrate stamp {shlex.quote(revisions[0])} --shards {shown_shards(there)}"


CHECKS = (
    primary_key_default,
    id_column_type,
    key_of_another_shard,
    foreign_key_type,
    foreign_key_leaves_shard,
    invalid_index,
    revisions_apart,
    revision_edited,
)
"""All checks of this module."""
