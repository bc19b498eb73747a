"""The application's objects in the schemas of shards, in words that are the same for every shard.

PostgreSQL writes the definitions, and nothing is installed for it. ``shardids doctor``, ``shardids migrate
check`` and moves compare shards by them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from shardids.pg.queries import batches, prepare, read

_BATCH: Final = 128
"""Shards that one transaction reads at least: it may hold locks on all their relations."""
_RELATIONS: Final = 2000
"""Relations that it reads, if shards have few: the query is planned anew for each batch."""
_COUNT: Final = """
    select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
    join shardids.shard s on s.schema = n.nspname and s.state = 'active'"""

GRANTS: Final = "grants"
"""The kind of an object's privileges: its name is the object's kind and name."""
UNKNOWN_OPTION: Final = "unknown option"
"""The kind of an option of tables or columns that PostgreSQL does not have."""
GENERATOR: Final = "generator"
"""The kind of what shardids itself makes in a shard; its name is the object's kind and name."""
NOT_COMPARED: Final = frozenset({UNKNOWN_OPTION, GENERATOR})
"""Kinds that are listed only because others ask for them."""

Definitions = Mapping[tuple[str, str], str]
"""By kind and name of an object, its definition: one shard's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaObject:
    """An object with the same definition in several shards: one row of ``catalog/objects.v1.sql``.

    ``kind`` is ``table``, ``column``, ``constraint``, ``owner``, ``grants``, ``comment`` or another. In
    ``name`` and ``definition``, ``{shard}`` stands for the shard's schema, and ``{owner}`` for the owner of
    schema ``shardids``.
    """

    kind: str
    name: str
    definition: str
    shards: list[int]


def read_objects(connection: Connection, shards: Collection[int]) -> list[SchemaObject]:
    """Read all objects of the shards' schemas on a node. Shards that are not there have none.

    The connection must be neither in AUTOCOMMIT nor in a transaction: the transactions that read set their
    ``search_path``, so that names are qualified and no function of another schema is called.
    """
    with connection.begin():
        prepare(connection)
        relations = connection.exec_driver_sql(_COUNT).scalar_one() // max(len(shards), 1)
    size = max(_BATCH, _RELATIONS // max(relations, 1))
    return [
        found
        for batch in batches(sorted(shards), size)
        for found in read(
            connection, "catalog/objects.v1", SchemaObject, shards="{" + ",".join(map(str, batch)) + "}"
        )
    ]


def odd_shards(objects: Iterable[SchemaObject], reference: int, shards: Collection[int]) -> set[int]:
    """Return the shards whose objects are not those of ``reference``; the objects are those of all nodes."""
    having: dict[tuple[str, str, str], set[int]] = {}
    for one in objects:
        if one.kind in NOT_COMPARED:
            continue
        having.setdefault((one.kind, one.name, one.definition), set()).update(one.shards)
    odd: set[int] = set()
    for there in having.values():
        odd |= there.symmetric_difference(shards) if reference in there else there
    return odd.intersection(shards) - {reference}


def by_shard(objects: Iterable[SchemaObject], shards: Collection[int]) -> dict[int, Definitions]:
    """Return the objects of each of the shards."""
    found: dict[int, dict[tuple[str, str], str]] = {shard: {} for shard in shards}
    for one in objects:
        if one.kind in NOT_COMPARED:
            continue
        for shard in found.keys() & one.shards:
            found[shard][one.kind, one.name] = one.definition
    return dict(found)


def differences(expected: Definitions, found: Definitions) -> list[str]:
    """Describe how one shard differs from another, a line for each definition.

    ``+`` is what only ``found`` has, ``-`` what only ``expected`` has. Servers of different major versions
    may write the same view or function differently.
    """
    lines = []
    for kind, name in sorted(expected.keys() | found.keys()):
        before, after = expected.get((kind, name)), found.get((kind, name))
        if before != after:
            lines += [f"- {kind} {name} {before}".rstrip()] if before is not None else []
            lines += [f"+ {kind} {name} {after}".rstrip()] if after is not None else []
    return lines
