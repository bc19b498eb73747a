"""The key of one table: from integers of a sequence to a bigint that a shard issues, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import sql

from shardids.adopt.inplace.changing import (
    How,
    Table,
    be_quiet,
    draw_at_once,
    drop,
    no_way_back,
    stay,
    swap,
    undraw,
    widening,
)
from shardids.adopt.inplace.key import (
    Change,
    Key,
    State,
    alone,
    begin_change,
    forget_change,
    parse_key,
    read_document,
    write_state,
)
from shardids.adopt.inplace.node import opened_shard, unable_to_draw
from shardids.adopt.inplace.statements import BACK, FORWARD, LIMITS
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, BadArgument, ClusterConflict
from shardids.replication.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far a table's key is. ``state``: None if nothing is under way.

    ``columns``: those that are or get bigint, the key first. ``filled``: the share of each table, by name.
    """

    table: str
    shard: int
    state: str | None
    columns: tuple[str, ...]
    filled: dict[str, float]


def change_key(
    catalog: Catalog, table: str, shard: int, how: How | None = None, *, dry_run: bool = False
) -> Status:
    """Make a table's key a bigint, with all that refers to it; it goes on coming from its sequence.

    A key that is a bigint already only gets the shard's ``next_id()`` as its default. Repeating the call goes
    on where it was interrupted.

    Raises:
        BadArgument: the table does not exist.
        AdoptionRefused: the table can't be changed. The message gives every reason; nothing was changed.
        AdoptionFailed: a lock was not to be had, or rows are written past the trigger; the call can be
            repeated.
        ClusterConflict: another process works at the table, or it is on its way back.
    """
    with _opened(catalog, table, shard, how) as its:
        change = its.change()
        if change is None:
            document = _checked(its)
            key = parse_key(document)
            if key.is_bigint and not dry_run:
                its.work(key, FORWARD).take(Step(name="default", act=draw_at_once))
            else:
                with its.shard.connection.begin() as transaction:
                    begin_change(its.shard, its.relid, its.name, document, State.WIDENING)
                    if dry_run:
                        transaction.rollback()
            change = its.change()
            if change is None:
                return _status(its, None, key)
        if change.shard != shard or change.state is State.RETURNING:
            why = "is on its way back" if change.shard == shard else f"was begun with shard {change.shard}"
            raise ClusterConflict(
                f"the key of {its.name} {why}", hint="Continue that; to see its state: --status"
            )
        if change.state is State.WIDENING and not dry_run:
            its.work(change.key, FORWARD).take(*widening(change.key), Step(name="swap", act=swap))
            change = its.change()
        return _status(its, change)


def take_back(
    catalog: Catalog, table: str, shard: int, how: How | None = None, *, dry_run: bool = False
) -> Status:
    """Restore the table to its state before :func:`change_key`, from any step.

    Raises:
        AdoptionRefused: rows have IDs that the old type can't hold; the table stays as it is.
        ClusterConflict: nothing is under way, or another process works at the table.
    """
    with _opened(catalog, table, shard, how) as its:
        change = _required(its)
        if change.state is not State.DRAWING:
            _require_fit(its, change.key)
        if dry_run:
            return _status(its, change)
        if change.state is State.DRAWING:
            its.work(change.key, BACK).take(Step(name="default", act=undraw))
            return _status(its, None, change.key)
        if change.state is State.SWAPPED:
            with its.shard.connection.begin():
                write_state(its.shard, its.relid, State.RETURNING)
            change = _required(its)
        if change.state is State.RETURNING:
            work = its.work(change.key, BACK)
            try:
                work.take(*widening(change.key))
            except AdoptionRefused:
                stay(work)
                raise
            work.take(Step(name="swap", act=swap))
        its.work(change.key, FORWARD).take(Step(name="drop", act=drop))
        return _status(its, None, change.key)


def finish(
    catalog: Catalog, table: str, shard: int, how: How | None = None, *, dry_run: bool = False
) -> Status:
    """Let the key draw from the shard, and drop the integer columns. It cannot be undone.

    Raises:
        AdoptionRefused: there are keys that the shard would issue again, or roles that may not draw.
        ClusterConflict: the table has not been swapped, or another process works at it.
    """
    with _opened(catalog, table, shard, how) as its:
        change = _required(its)
        if change.state is State.DRAWING:
            if dry_run:
                return _status(its, change)
            with its.shard.connection.begin():
                forget_change(its.shard, its.relid)
            return _status(its, None, change.key)
        if change.state is not State.SWAPPED:
            raise ClusterConflict(f"{its.name} has not been swapped yet", hint="shardids key adopt TABLE")
        with its.shard.connection.begin():
            roles = read_document(its.shard, its.name)["inserters"]
            _refuse(its, list(_obstacles(its, change.key, roles)))
        if dry_run:
            return _status(its, change)
        its.work(change.key, BACK).take(Step(name="drop", act=partial(drop, draw=True)))
        return _status(its, None, change.key)


def status(catalog: Catalog, table: str, shard: int) -> Status:
    """Return how far a table's key is."""
    with _opened(catalog, table, shard, is_exclusive=False) as its:
        return _status(its, its.change())


@contextmanager
def _opened(
    catalog: Catalog, table: str, shard: int, how: How | None = None, *, is_exclusive: bool = True
) -> Iterator[Table]:
    if "." not in table:
        raise BadArgument(f"{table!r} has no schema", hint=f"For example: public.{table}")
    with opened_shard(catalog, shard) as its:
        with its.connection.begin():
            row: Any = its.execute(
                "select c.oid::bigint as relid, c.oid::regclass::text as name from pg_class c"
                " where c.oid = to_regclass(:table) and c.relkind in ('r', 'p')",
                table=table,
            ).one_or_none()
        if row is None:
            raise BadArgument(
                f"table {table} does not exist on node {its.node!r}", hint="Quote names as in SQL."
            )
        found = Table(shard=its, relid=row.relid, name=row.name, how=how or How())
        if not is_exclusive:
            yield found
            return
        with alone(its, row.relid):
            yield found


def _required(its: Table) -> Change:
    change = its.change()
    if change is None:
        raise ClusterConflict(f"nothing is under way with the key of {its.name}")
    return change


def _checked(its: Table) -> dict[str, Any]:
    """Read the key, and refuse objects that are not known to be carried along."""
    with its.shard.connection.begin():
        document = read_document(its.shard, its.name)
        problems = list(document["problems"])
        if document["key_type"] == "uuid":
            problems.append("its UUIDs stay: a bigint key beside them is made by fill_past_ids()")
        if not problems:
            key = parse_key(document)
            if key.sequence and key.sequence.identity and key.sequence.has_privileges:
                problems.append(f"sequence {key.sequence.name} has privileges of its own")
            problems += _obstacles(its, key, document["inserters"])
            if not key.is_bigint:
                be_quiet(its.shard, key.tables)
    _refuse(its, problems)
    return document


def _refuse(its: Table, problems: list[str]) -> None:
    if problems:
        raise AdoptionRefused(f"the key of {its.name} can't be changed: " + "; ".join(problems))


def _obstacles(its: Table, key: Key, roles: list[int]) -> Iterator[str]:
    """Yield the obstacles to drawing: roles without the right, keys that are not below the shard's next ID.

    Nothing is drawn: a sequence does not take numbers back from a transaction that rolls back.
    """
    unable = unable_to_draw(its.shard, roles)
    if unable:
        names = ", ".join(f'"{name}"' for name in unable)
        yield f"role {names} may insert, but not draw from the shard (shardids grant ROLE)"
    its.shard.execute("set local statement_timeout = 0")
    column, relation = sql.Identifier(key.key.column), key.key.relation
    highest = its.shard.execute(sql.SQL("select max({}) from {}").format(column, relation)).scalar()
    generator: Any = its.shard.execute(
        """select s.state = 'active' and s.server = shardids.server() and s.seen >= 0 as issues_ids,
                  greatest(shardids.drawn_id(s.seen, s.drawn, s.drawn, s.id),
                           shardids.min_id(clock_timestamp() - interval '1 second')) as next
           from (select *, pg_sequence_last_value(id_offset) as seen,
                        coalesce(pg_sequence_last_value(id_counter), 0) + 1 as drawn
                 from shardids.shard) s
           where s.id = :shard""",
        shard=its.shard.number,
    ).one()
    if not generator.issues_ids:
        yield f"shard {its.shard.number} does not issue IDs on this server (shardids shard list)"
    elif highest is not None and highest >= generator.next:
        yield f"its highest key is {highest}, and the shard issues {generator.next} now"


def _require_fit(its: Table, key: Key) -> None:
    """Refuse the way back where a column has values that its former type can't hold."""
    with its.shard.connection.begin():
        for pair in key.pairs:
            if pair.type in LIMITS:
                lowest, highest = LIMITS[pair.type]
                query = sql.SQL("select exists (select from {} where {} not between {} and {})").format(
                    pair.relation, sql.Identifier(pair.column), lowest, highest
                )
                if its.shard.execute(query).scalar():
                    raise no_way_back(pair)


def _status(its: Table, change: Change | None, key: Key | None = None) -> Status:
    key = change.key if change else key
    pairs = sorted(key.pairs, key=lambda pair: not pair.is_key) if key else []
    filled = {}
    for relid, (first, end) in (change.blocks if change else {}).items():
        filled[next(p.table for p in pairs if p.relid == int(relid))] = first / end if end else 1.0
    return Status(
        table=its.name,
        shard=its.shard.number,
        state=str(change.state) if change else None,
        columns=tuple(f"{pair.table}.{pair.column}" for pair in pairs),
        filled=filled,
    )
