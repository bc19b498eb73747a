"""What is written of each table that gets another key, in the table's own database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import text

from shardids.catalog.schemas import engine_owner, own_schema, require_own
from shardids.errors import ClusterConflict
from shardids.inplace.inventory import Key, parse_key
from shardids.inplace.node import Shard
from shardids.inplace.statements import SCHEMA

_LOCK: Final = 1936220532
_MAKE: Final = """
    create table if not exists shardids_inplace.key_change (
      relid oid primary key, name text not null, shard integer not null, state text not null,
      document jsonb not null, blocks jsonb not null default '{}',
      began_at timestamptz not null default now());
    comment on schema shardids_inplace is 'shardids: tables that get another key where they are'"""


class State(StrEnum):
    """How far it is. Within a state, what is done is what is there."""

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


def find(shard: Shard, relid: int) -> Change | None:
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


def begin(shard: Shard, relid: int, name: str, document: Mapping[str, Any], state: State) -> None:
    """Writes the row of a table, and makes the journal if there is none.

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
    shard.connection.execute(
        text(
            """insert into shardids_inplace.key_change (relid, name, shard, state, document)
                values (:relid, :name, :shard, :state, cast(:document as jsonb))"""
        ),
        {
            "relid": relid,
            "name": name,
            "shard": shard.number,
            "state": str(state),
            "document": json.dumps(document),
        },
    )


def write_state(shard: Shard, change: Change, state: State) -> None:
    """Writes how far it is; the tables are then to be filled from their beginning."""
    shard.execute(
        "update shardids_inplace.key_change set state = :state, blocks = '{}' where relid = :relid",
        state=str(state),
        relid=change.relid,
    )


def write_blocks(shard: Shard, change: Change, relid: int, blocks: tuple[int, int] | None) -> None:
    """Writes how far a table is filled; None: it is to be filled from its beginning."""
    shard.execute(
        """update shardids_inplace.key_change
            set blocks = case when cast(:blocks as jsonb) is null then blocks - :name
                         else blocks || jsonb_build_object(cast(:name as text), cast(:blocks as jsonb)) end
            where relid = :relid""",
        name=str(relid),
        blocks=None if blocks is None else json.dumps(blocks),
        relid=change.relid,
    )


def forget(shard: Shard, relid: int) -> None:
    """Removes the row of a table, and the journal with the last one."""
    shard.execute("delete from shardids_inplace.key_change where relid = :relid", relid=relid)
    if not shard.execute("select exists (select from shardids_inplace.key_change)").scalar():
        shard.execute("drop table shardids_inplace.key_change")
        shard.execute("drop schema shardids_inplace")


@contextmanager
def alone(shard: Shard, relid: int) -> Iterator[None]:
    """Holds the lock of a table's change; the server gives it back when the process dies.

    Raises:
        ClusterConflict: another process has it.
    """
    lock = {"class": _LOCK, "relid": relid - (1 << 32) if relid >> 31 else relid}
    with shard.connection.begin():
        is_free = shard.execute("select pg_try_advisory_lock(:class, :relid)", **lock).scalar()
    if not is_free:
        raise ClusterConflict("another process works at this table", hint="Wait until it has ended.")
    try:
        yield
    finally:
        if not shard.connection.closed and not shard.connection.invalidated:
            with shard.connection.begin():
                shard.execute("select pg_advisory_unlock(:class, :relid)", **lock)
