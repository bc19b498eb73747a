"""The recorded state: the objects, with their states, that shards and nodes have to have."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection, text

from shardids.catalog.objects import NOT_COMPARED, SchemaObject
from shardids.pg.queries import prepare
from shardids.pg.sqlfiles import read_sql

Thing = tuple[str, str]
"""Kind and name of an object."""
Key = tuple[str, int]
"""What shards must have in common to be compared: the revision, and the server's major version."""

NUMBER: Final = "{number}"
"""Stands for a shard's own number in a definition."""


@dataclass(frozen=True, slots=True)
class Definition:
    """How an object is defined in a shard; ``bare`` without the shard's own number, where it has it."""

    text: str
    bare: str | None = None

    @classmethod
    def of(cls, definition: str, shard: int) -> Definition:
        """Return the definition that a shard has."""
        bare = without_number(definition, shard)
        return cls(definition, None if bare == definition else bare)


One = TypeVar("One")
Objects = Mapping[Thing, Definition]
"""All that a shard has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSchema:
    """A row of ``shardids_catalog.recorded_schema``; ``at`` is comparable to those of others."""

    key: Key
    objects: Objects
    at: float
    by: str


def without_number(definition: str, shard: int) -> str:
    """Return a definition without the number of the shard that has it."""
    return re.sub(rf"(?<![\w.]){shard}(?![\w.])", NUMBER, definition)


def revision_of(heads: Iterable[str] | None) -> str:
    """Return ``revision`` for the rows of a shard's version table; ``None``: it has no such table."""
    return "" if heads is None else ", ".join(sorted(heads)) or "base"


def objects_of(shard: int, objects: Iterable[SchemaObject]) -> dict[Thing, Definition]:
    """Return what one shard has, among the objects of several."""
    return {
        (one.kind, one.name): Definition.of(one.definition, shard)
        for one in objects
        if shard in one.shards and one.kind not in NOT_COMPARED
    }


def compared(
    expected: Objects, shards: frozenset[int], rows: Iterable[tuple[Thing, str, Collection[int]]]
) -> dict[Thing, dict[int, str | None]]:
    """Return the objects that are not as expected, with their definitions in each shard where they are not.

    ``rows`` has the definitions of objects, each with the shards, among others, that have it so.
    """
    found: dict[Thing, dict[int, str]] = {}
    fitting = {thing: set[int]() for thing in expected}
    for thing, definition, there in rows:
        wanted = expected.get(thing)
        if wanted is not None and wanted.text == definition:
            fitting[thing].update(shards.intersection(there))
        else:
            found.setdefault(thing, {}).update(dict.fromkeys(shards.intersection(there), definition))
    odd: dict[Thing, dict[int, str | None]] = {}
    for thing, definitions in found.items():
        numbered = _numbered(expected.get(thing), definitions)
        # One that has the shard's number is another in each shard; two that are the same have a constant.
        if len(fitting.get(thing, ())) <= 1 and 2 * len(numbered) >= len(definitions):
            fitting.setdefault(thing, set()).update(numbered)
        wrong = {shard: one for shard, one in definitions.items() if shard not in fitting.get(thing, ())}
        if wrong:
            odd[thing] = dict(wrong)
    for thing, there in fitting.items():
        missing = shards - there - odd.get(thing, {}).keys()
        if missing and thing in expected:
            odd.setdefault(thing, {}).update(dict.fromkeys(missing))
    return odd


def _numbered(wanted: Definition | None, definitions: Mapping[int, str]) -> set[int]:
    """Return the shards whose definition has their own number in place of another."""
    if wanted is None or wanted.bare is None:
        return set()
    return {shard for shard, one in definitions.items() if without_number(one, shard) == wanted.bare}


def carried(
    expected: Mapping[Thing, One], before: Mapping[Thing, One], after: Mapping[Thing, One]
) -> dict[Thing, One]:
    """Return the expected objects once a change that was seen in one shard, or on one node, is made.

    Only the difference between ``before`` and ``after`` counts: damage that was there is not expected.
    """
    found = {thing: one for thing, one in expected.items() if thing in after or thing not in before}
    return found | {thing: one for thing, one in after.items() if before.get(thing) != one}


def read_schemas(connection: Connection) -> dict[Key, RecordedSchema]:
    """Return all recorded schemas."""
    found = connection.execute(
        text("""
            select revision, server_version, objects, recorded_by,
                   extract(epoch from recorded_at)::float8 as at
            from shardids_catalog.recorded_schema""")
    )
    return {
        (row.revision, row.server_version): RecordedSchema(
            key=(row.revision, row.server_version),
            objects={(kind, name): Definition(*written) for kind, name, *written in row.objects},
            at=row.at,
            by=row.recorded_by,
        )
        for row in found
    }


def write_schemas(connection: Connection, schemas: Mapping[Key, Objects], by: str) -> None:
    """Record schemas, all at one time, in the connection's transaction."""
    connection.execute(
        text("""
            insert into shardids_catalog.recorded_schema
              (revision, server_version, objects, recorded_at, recorded_by)
            select w.revision, w.server_version, w.objects, t.now, :by
            from jsonb_to_recordset(cast(:schemas as jsonb))
                   w (revision text, server_version integer, objects jsonb),
                 (select clock_timestamp() as now) t
            on conflict (revision, server_version) do update
            set objects = excluded.objects, recorded_at = excluded.recorded_at,
                recorded_by = excluded.recorded_by"""),
        {
            "by": by,
            "schemas": json.dumps(
                [
                    {"revision": revision, "server_version": version, "objects": _written(objects)}
                    for (revision, version), objects in schemas.items()
                ]
            ),
        },
    )


def forget_schemas(connection: Connection, schemas: Iterable[RecordedSchema]) -> None:
    """Delete records of revisions, except those that were written anew meanwhile; in the transaction."""
    for one in schemas:
        connection.execute(
            text("""
                delete from shardids_catalog.recorded_schema
                where revision = :revision and server_version = :version
                  and extract(epoch from recorded_at)::float8 = :at"""),
            {"revision": one.key[0], "version": one.key[1], "at": one.at},
        )


def _written(objects: Objects) -> list[list[str]]:
    return [
        [*thing, one.text, *(() if one.bare is None else (one.bare,))]
        for thing, one in sorted(objects.items())
    ]


Contract = Mapping[Thing, str]
"""The settings and objects of a node outside of its shards, by kind and name."""


def contract_of(connection: Connection) -> dict[Thing, str]:
    """Return the contract that a node fulfils now, in the open transaction."""
    prepare(connection)
    found = connection.execution_options(no_parameters=True).exec_driver_sql(read_sql("catalog/contract.v1"))
    return {(row.kind, row.name): row.definition or "" for row in found}


def read_contracts(connection: Connection) -> dict[str, dict[Thing, str]]:
    """Return the recorded contract of each node that has one."""
    found = connection.execute(text("select node, contract from shardids_catalog.recorded_node"))
    return {row.node: {(kind, name): definition for kind, name, definition in row.contract} for row in found}


def write_contract(
    connection: Connection, node: str, contract: Contract, by: str, *, anew: bool = True
) -> None:
    """Record a node's contract in the connection's transaction; unless ``anew`` one that is there stays."""
    connection.execute(
        text("""
            insert into shardids_catalog.recorded_node (node, contract, recorded_by)
            values (:node, cast(:contract as jsonb), :by)
            on conflict (node) do update
            set contract = excluded.contract, recorded_at = excluded.recorded_at,
                recorded_by = excluded.recorded_by
            where :anew"""),
        {
            "anew": anew,
            "node": node,
            "by": by,
            "contract": json.dumps([[*thing, definition] for thing, definition in sorted(contract.items())]),
        },
    )
