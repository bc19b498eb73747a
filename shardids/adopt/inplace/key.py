"""A primary key, all that hangs on it, and the journal of its change, in the table's own database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from psycopg import sql

from shardids.adopt.inplace.node import Shard
from shardids.errors import ClusterConflict
from shardids.pg.locks import AdvisoryLock, session_lock
from shardids.pg.schemas import engine_owner, own_schema, require_own
from shardids.pg.sqlfiles import read_sql

SCHEMA: Final = "shardids_inplace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A column that gets another in its place: the key, or one that refers to it.

    ``column`` is its name, before the swap and after. Until the swap the other is ``new_name``; after it the
    first one is ``old_name``.
    """

    schema: str
    table: str
    relid: int
    column: str
    type: str
    is_key: bool
    number: int
    not_null: bool
    not_null_name: str | None
    comment: str | None

    @property
    def relation(self) -> sql.Identifier:
        """The table."""
        return sql.Identifier(self.schema, self.table)

    @property
    def new_name(self) -> str:
        """The bigint column, until the swap."""
        return f"shardids_new_{self.number}"

    @property
    def old_name(self) -> str:
        """The integer column, from the swap on."""
        return f"shardids_old_{self.number}"

    @property
    def check_name(self) -> str:
        """The name of the constraint that holds the two in step."""
        return f"shardids_step_{self.number}"

    @property
    def check(self) -> sql.Identifier:
        """The same, for statements."""
        return sql.Identifier(self.check_name)

    @property
    def not_null_constraint(self) -> sql.Identifier:
        """From PostgreSQL 18 on, the constraint that keeps NULL out of the other column."""
        return sql.Identifier(f"shardids_nn_{self.number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumn:
    """A column or expression of an index."""

    name: str | None
    expression: str | None
    is_included: bool
    is_descending: bool
    is_nulls_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index with at least one column that gets another in its place; ``constraint``: if it is one's."""

    schema: str
    table: str
    name: str
    number: int
    is_unique: bool
    is_primary: bool
    constraint: str | None
    nulls_not_distinct: bool
    predicate: str | None
    options: tuple[str, ...]
    tablespace: str | None
    comment: str | None
    constraint_comment: str | None
    columns: tuple[IndexColumn, ...]

    @property
    def new_name(self) -> str:
        """Its successor, until the swap."""
        return f"shardids_ix_{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """A foreign key from or to a column that gets another in its place."""

    schema: str
    table: str
    name: str
    number: int
    column: str
    referenced_schema: str
    referenced_table: str
    referenced_column: str
    on_delete: str
    on_update: str
    comment: str | None

    @property
    def new_name(self) -> str:
        """Its successor, until the swap."""
        return f"shardids_fk_{self.number}"

    @property
    def child(self) -> tuple[str, str]:
        """The table that refers."""
        return self.schema, self.table

    @property
    def parent(self) -> tuple[str, str]:
        """The table that is referred to."""
        return self.referenced_schema, self.referenced_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """The sequence that a key comes from. ``identity``: empty, or ``a``/``d`` for ALWAYS/BY DEFAULT."""

    schema: str
    name: str
    identity: str
    type: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cache: int
    cycle: bool
    has_privileges: bool
    is_owned: bool
    default: str | None

    def changes(self, before: Sequence) -> Iterator[str]:
        """What differs from before, of all that a swap sets as it was before."""
        for name in _PLAYED_IDENTITY if before.identity else _PLAYED_SERIAL:
            was, is_now = getattr(before, name), getattr(self, name)
            if was != is_now:
                yield f"{name.removeprefix('is_').replace('_', ' ')} of its sequence was {was}, is {is_now}"


_PLAYED_SERIAL = ("identity", "default", "schema", "name", "is_owned")
_PLAYED_IDENTITY = (
    *_PLAYED_SERIAL,
    "start",
    "increment",
    "minimum",
    "maximum",
    "cache",
    "cycle",
    "has_privileges",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A table's key and all that hangs on it. ``document``: as the database described it."""

    pairs: tuple[Pair, ...]
    indexes: tuple[Index, ...]
    foreign_keys: tuple[ForeignKey, ...]
    sequence: Sequence | None
    document: Mapping[str, Any]

    @property
    def key(self) -> Pair:
        """The pair of the key itself."""
        return next(pair for pair in self.pairs if pair.is_key)

    @property
    def is_bigint(self) -> bool:
        """Whether the key needs no other column."""
        return self.key.type == "bigint"

    @property
    def tables(self) -> dict[int, tuple[Pair, ...]]:
        """The pairs of each table, by its OID."""
        relids = sorted({pair.relid for pair in self.pairs})
        return {relid: tuple(pair for pair in self.pairs if pair.relid == relid) for relid in relids}

    def pair_of(self, schema: str, table: str, column: str | None) -> Pair | None:
        """The pair of a column, if it has one."""
        wanted = (schema, table, column)
        return next((p for p in self.pairs if (p.schema, p.table, p.column) == wanted), None)

    def locked(self) -> list[sql.Identifier]:
        """All tables that a swap changes, referenced before referencing ones, as most transactions do."""
        edges = {(one.child, one.parent) for one in self.foreign_keys if one.child != one.parent}
        left = {(pair.schema, pair.table) for pair in self.pairs} | {name for edge in edges for name in edge}
        ordered: list[tuple[str, str]] = []
        while left:
            free = {name for name in left if not any(c == name and p in left for c, p in edges)}
            # Foreign keys in a circle have no first table.
            ordered += sorted(free or left)
            left -= set(ordered)
        return [sql.Identifier(*name) for name in ordered]

    def changes(self, before: Key) -> Iterator[str]:
        """Objects that somebody has changed, or made, and that can't be carried along."""
        yield from self.document["problems"]
        if self.sequence and before.sequence:
            yield from self.sequence.changes(before.sequence)
        elif self.sequence != before.sequence:
            yield "its sequence"
        if self._shape() != before._shape():
            yield "columns, indexes or foreign keys"

    def _shape(self) -> object:
        """What stays the same until the swap, and after it, unless somebody changes the tables."""
        varying = ("number", "type", "not_null_name", "key_type", "inserters", "problems", "sequence")

        def bare(value: object) -> object:
            if isinstance(value, Mapping):
                return {name: bare(its) for name, its in value.items() if name not in varying}
            return [bare(one) for one in value] if isinstance(value, list) else value

        return bare(self.document)


def parse_key(document: Mapping[str, Any]) -> Key:
    """Return the key that a document of :func:`read_document` describes."""
    indexes = []
    for one in document["indexes"]:
        columns = tuple(IndexColumn(**column) for column in one["columns"])
        indexes.append(Index(**(one | {"columns": columns, "options": tuple(one["options"])})))
    sequence = document["sequence"]
    return Key(
        pairs=tuple(Pair(**one) for one in document["pairs"]),
        indexes=tuple(indexes),
        foreign_keys=tuple(ForeignKey(**one) for one in document["foreign_keys"]),
        sequence=sequence and Sequence(**sequence),
        document=document,
    )


def read_document(shard: Shard, table: str, key: Key | None = None) -> dict[str, Any]:
    """Return the database's description of a table's key. ``table``: as SQL writes it.

    ``key``: the description from before the change, whose columns may be bigint by now.
    """
    pairs = [[pair.relid, pair.column] for pair in key.pairs] if key else []
    shard.execute(
        "select set_config('shardids.table', :table, true), set_config('shardids.pairs', :pairs, true)",
        table=table,
        pairs=json.dumps(pairs),
    )
    raw = shard.connection.execution_options(no_parameters=True)
    found: dict[str, Any] = raw.exec_driver_sql(read_sql("inplace/key.v1")).scalar_one()
    return found


_MAKE: Final = """
    create table if not exists shardids_inplace.key_change (
      relid oid primary key, name text not null, shard integer not null, state text not null,
      document jsonb not null, blocks jsonb not null default '{}',
      began_at timestamptz not null default now());
    comment on schema shardids_inplace is 'shardids: tables that get another key where they are'"""


class State(StrEnum):
    """The progress of a change. Within a state, the objects that exist show which steps are done."""

    WIDENING = "widening"
    """The bigint columns are being made and filled; the integer ones are the key."""
    SWAPPED = "swapped"
    """The bigint columns are the key; the integer ones are kept in step."""
    RETURNING = "returning"
    """The integer columns are made ready to be the key again."""
    DRAWING = "drawing"
    """The key was bigint, and only its default has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The journal's row of a table.

    ``blocks``: by table, the next block to fill and the one to end before.
    """

    relid: int
    name: str
    shard: int
    state: State
    key: Key
    blocks: Mapping[str, tuple[int, int]]
    began_at: datetime


def _owner(shard: Shard) -> str:
    """Return the role that the journal belongs to: the engine's owner, if this one can act as that."""
    engine = engine_owner(shard.connection)
    own = "select case when pg_has_role(:engine, 'member') then :engine else current_user end"
    return str(shard.execute(own, engine=engine).scalar())


def find_change(shard: Shard, relid: int) -> Change | None:
    """Return the row of a table, or None.

    Raises:
        MissingPrivilege: another role made the journal, or can change it.
    """
    require_own(shard.connection, (SCHEMA,), _owner(shard))
    there = shard.execute("select to_regclass('shardids_inplace.key_change') is not null").scalar()
    if not there:
        return None
    row = shard.execute(
        "select * from shardids_inplace.key_change where relid = :relid", relid=relid
    ).one_or_none()
    return row and Change(
        relid=row.relid,
        name=row.name,
        shard=row.shard,
        state=State(row.state),
        key=parse_key(row.document),
        blocks={name: (first, end) for name, (first, end) in row.blocks.items()},
        began_at=row.began_at,
    )


def begin_change(shard: Shard, relid: int, name: str, document: Mapping[str, Any], state: State) -> None:
    """Write the row of a table, and make the journal if it is missing.

    Raises:
        ClusterConflict: another table's change has one of its tables.
        MissingPrivilege: the journal's schema, or an object in it, belongs to another role.
    """
    role = shard.execute("select current_setting('role')").scalar()
    own_schema(shard.connection, SCHEMA, owner=_owner(shard))
    shard.connection.exec_driver_sql(_MAKE)
    # The tables of the application may belong to a role that the engine's owner can't act as.
    shard.execute("select set_config('role', :role, true)", role=role)
    other = shard.execute(
        """select c.name from shardids_inplace.key_change c, jsonb_array_elements(c.document -> 'pairs') p
            where p ->> 'relid' = any (:relids) limit 1""",
        relids=[str(pair["relid"]) for pair in document["pairs"]],
    ).scalar()
    if other is not None:
        raise ClusterConflict(
            f"{other} gets another key, and shares tables with {name}", hint="Finish it first."
        )
    shard.execute(
        """insert into shardids_inplace.key_change (relid, name, shard, state, document)
            values (:relid, :name, :shard, :state, cast(:document as jsonb))""",
        relid=relid,
        name=name,
        shard=shard.number,
        state=str(state),
        document=json.dumps(document),
    )


def write_state(shard: Shard, relid: int, state: State) -> None:
    """Write how far it is; the tables are then to be filled from their beginning."""
    shard.execute(
        "update shardids_inplace.key_change set state = :state, blocks = '{}' where relid = :relid",
        state=str(state),
        relid=relid,
    )


def write_blocks(shard: Shard, relid: int, table: int, blocks: tuple[int, int] | None) -> None:
    """Write how far a table is filled; None: it is to be filled from its beginning."""
    shard.execute(
        """update shardids_inplace.key_change
            set blocks = case when cast(:blocks as jsonb) is null then blocks - :name
                         else blocks || jsonb_build_object(cast(:name as text), cast(:blocks as jsonb)) end
            where relid = :relid""",
        name=str(table),
        blocks=None if blocks is None else json.dumps(blocks),
        relid=relid,
    )


def forget_change(shard: Shard, relid: int) -> None:
    """Remove the row of a table, and the journal with the last one."""
    shard.execute("delete from shardids_inplace.key_change where relid = :relid", relid=relid)
    if not shard.execute("select exists (select from shardids_inplace.key_change)").scalar():
        shard.execute("drop table shardids_inplace.key_change")
        shard.execute("drop schema shardids_inplace")


@contextmanager
def alone(shard: Shard, relid: int) -> Iterator[None]:
    """Hold the lock of a table's change; the server gives it back when the process dies.

    Raises:
        ClusterConflict: another process has it.
    """
    busy = ClusterConflict("another process works at this table", hint="Wait until it has ended.")
    with session_lock(shard.connection, AdvisoryLock.KEY_CHANGE, relid, taken=lambda: busy):
        yield
