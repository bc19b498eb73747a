"""The steps before the swap of a key: each finds what is there and does what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from shardids.errors import AdoptionFailed, AdoptionRefused, MissingPrivilege, StatementFailed
from shardids.inplace import journal, statements
from shardids.inplace.inventory import ForeignKey, Index, Pair
from shardids.inplace.journal import Change
from shardids.inplace.node import OnWait, Shard, with_short_locks
from shardids.inplace.statements import Way

_CHECK_VIOLATION = "23514"
_PASSES = 3
"""How often a table is filled if rows are found afterwards that are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A change under way, and how it is to be done.

    ``batch``: about how many rows are filled in one transaction; ``pause_s``: the time between two.
    ``on_step``: called with the step about to be taken. ``on_rows``: with a table and its filled share.
    """

    shard: Shard
    change: Change
    way: Way
    batch: int
    pause_s: float
    on_step: Callable[[str], None]
    on_rows: Callable[[str, float], None]
    on_wait: OnWait

    def short(self, what: str, work: Callable[[], None]) -> None:
        """Does work that others would queue behind."""
        names = [name.as_string(None) for name in self.change.key.locked()]
        with_short_locks(self.shard, what, work, tables=names, on_wait=self.on_wait)

    def run(self, *parts: sql.Composable) -> None:
        """Runs statements in the open transaction."""
        self.shard.execute(sql.SQL(";\n").join(parts))


def prepare(work: Work) -> None:
    """Makes the other columns ready for the swap: filled, checked, indexed and referred to."""
    key = work.change.key
    for relid, pairs in key.tables.items():
        _tie(work, relid, pairs)
    for relid, pairs in key.tables.items():
        _fill_until_valid(work, relid, pairs)
    for pair in key.pairs:
        if pair.not_null:
            _set_not_null(work, pair)
    for index in key.indexes:
        _build(work, index)
    for one in key.foreign_keys:
        _refer(work, one)


def _tie(work: Work, relid: int, pairs: tuple[Pair, ...]) -> None:
    """Adds the columns and their trigger; after a swap, there or back, only the checks are missing."""
    with work.shard.connection.begin():
        tied = _constraints(work, pairs[0])
        # The columns come with it, in one transaction: without it, columns of such names are not ours.
        has_trigger = work.shard.execute(
            "select exists (select from pg_trigger where tgrelid = :relid and tgname = :name)",
            relid=relid,
            name=statements.TRIGGER,
        ).scalar()
    missing = [pair for pair in pairs if pair.check.as_string(None).strip('"') not in tied]
    if not missing:
        return
    work.on_step(f"columns of {pairs[0].table}")

    def add() -> None:
        if has_trigger:
            work.run(*(statements.add_check(work.way, pair) for pair in missing))
        else:
            work.run(*statements.add_columns(pairs))
        journal.write_blocks(work.shard, work.change, relid, None)

    work.short(f"adding columns to {pairs[0].table}", add)


def _constraints(work: Work, pair: Pair) -> dict[str, bool]:
    """The constraints of a table, and whether they are validated."""
    rows = work.shard.execute(
        "select conname, convalidated from pg_constraint where conrelid = :relid", relid=pair.relid
    )
    return {row.conname: row.convalidated for row in rows}


def _fill_until_valid(work: Work, relid: int, pairs: tuple[Pair, ...]) -> None:
    for left in reversed(range(_PASSES)):
        with work.shard.connection.begin():
            state = _constraints(work, pairs[0])
        if all(state[pair.check.as_string(None).strip('"')] for pair in pairs):
            return
        _fill(work, relid, pairs)
        work.on_step(f"check {pairs[0].table}")
        try:
            for pair in pairs:
                _validate(work, pair.relation, pair.check)
            return
        except StatementFailed as error:
            if error.sqlstate != _CHECK_VIOLATION:
                raise
            if not left and not work.way.is_forward:
                raise no_way_back(pairs[0]) from error
            if not left:
                raise AdoptionFailed(
                    f"rows of {pairs[0].table} are not in step: {error.message}",
                    hint="Does a session write while it disables triggers? Then run the command again.",
                ) from error
        with work.shard.connection.begin():
            journal.write_blocks(work.shard, work.change, relid, None)


def no_way_back(pair: Pair) -> AdoptionRefused:
    """Return the error for a column whose values its former type can't hold."""
    return AdoptionRefused(
        f"{pair.table} has values that {pair.type} can't hold: the way back is closed",
        hint="shardids adopt table TABLE --finish",
    )


def _validate(work: Work, relation: sql.Identifier, constraint: sql.Identifier) -> None:
    with work.shard.connection.begin():
        work.shard.execute("set local statement_timeout = 0")
        work.run(sql.SQL("alter table {} validate constraint {}").format(relation, constraint))


def _fill(work: Work, relid: int, pairs: tuple[Pair, ...]) -> None:
    """Fills the rows of a table, from the block that the journal has."""
    shard = work.shard
    with shard.connection.begin():
        change = journal.find(shard, work.change.relid)
        size: Any = shard.execute(
            """select pg_relation_size(c.oid) / current_setting('block_size')::integer as blocks,
                      greatest(reltuples, 0) / greatest(relpages, 1) as density
               from pg_class c where oid = :relid""",
            relid=relid,
        ).one()
    first, end = (change and change.blocks.get(str(relid))) or (0, size.blocks)
    step = max(1, round(work.batch / (size.density or 100)))
    if first < end:
        work.on_step(f"fill {pairs[0].table}")
    while first < end:
        until = min(first + step, end)
        _fill_blocks(work, pairs, (first, until), end)
        first = until
        work.on_rows(pairs[0].table, first / end)
        if work.pause_s and first < end:
            time.sleep(work.pause_s)


def _fill_blocks(work: Work, pairs: tuple[Pair, ...], blocks: tuple[int, int], end: int) -> None:
    def fill() -> None:
        be_quiet(work.shard, work.change.key.tables)
        work.run(statements.fill(work.way, pairs, *blocks))
        journal.write_blocks(work.shard, work.change, pairs[0].relid, (blocks[1], end))

    work.short(f"filling {pairs[0].table}", fill)


def be_quiet(shard: Shard, relids: dict[int, tuple[Pair, ...]]) -> None:
    """Keeps the tables' other triggers from running for the open transaction's updates.

    Raises:
        AdoptionRefused: the role may not, and there are triggers.
    """
    savepoint = shard.connection.begin_nested()
    try:
        shard.execute("set local session_replication_role = replica")
        savepoint.commit()
    except MissingPrivilege as error:
        savepoint.rollback()
        names = shard.execute(
            """select format('"%s" of %s', tgname, tgrelid::regclass) from pg_trigger
               where tgrelid = any (:relids ::bigint[]::oid[]) and not tgisinternal and tgname <> :ours
                 and tgtype & 16 = 16 and tgenabled <> 'D' and tgattr = ''::int2vector""",
            relids=list(relids),
            ours=statements.TRIGGER,
        ).scalars()
        if found := list(names):
            raise AdoptionRefused(
                f"trigger {', '.join(found)} would run for each row that is filled",
                hint="A superuser, or a role that may set session_replication_role, can keep it from that.",
            ) from error


def _set_not_null(work: Work, pair: Pair) -> None:
    column = work.way.other(pair)
    query = """select a.attnotnull, k.conname from pg_attribute a
               left join pg_constraint k
                 on k.contype::text = 'n' and k.conrelid = a.attrelid and k.conkey = array[a.attnum]
               where a.attrelid = :relid and a.attname = :column"""

    def set_it() -> None:
        parts = sql.SQL("alter table {} alter column {} set not null")
        work.run(parts.format(pair.relation, sql.Identifier(column)))
        name = work.shard.execute(query, relid=pair.relid, column=column).one().conname
        if name is not None:
            work.run(
                sql.SQL("alter table {} rename constraint {} to {}").format(
                    pair.relation, sql.Identifier(name), pair.not_null_constraint
                )
            )

    with work.shard.connection.begin():
        is_set = work.shard.execute(query, relid=pair.relid, column=column).one().attnotnull
    if not is_set:
        work.on_step(f"not null {pair.table}")
        work.short(f"SET NOT NULL on {pair.table}", set_it)


def _build(work: Work, index: Index) -> None:
    name = sql.Identifier(index.schema, index.new_name)
    with work.shard.connection.begin():
        is_valid = work.shard.execute(
            "select (select indisvalid from pg_index where indexrelid = to_regclass(:name))",
            name=name.as_string(None),
        ).scalar()
    if is_valid:
        return
    work.on_step(f"index {index.name}")
    options = {"isolation_level": "AUTOCOMMIT", "no_parameters": True}
    with work.shard.connection.engine.connect().execution_options(**options) as free:
        for setting in ("statement_timeout", "lock_timeout"):
            free.exec_driver_sql(f"set {setting} = 0")
        if is_valid is False:
            free.exec_driver_sql(sql.SQL("drop index concurrently {}").format(name).as_string(None))
        free.exec_driver_sql(statements.make_index(work.way, work.change.key, index).as_string(None))


def _refer(work: Work, one: ForeignKey) -> None:
    relation = sql.Identifier(one.schema, one.table)
    with work.shard.connection.begin():
        is_valid = work.shard.execute(
            """select (select convalidated from pg_constraint
                       where conrelid = cast(:table as regclass) and conname = :name)""",
            table=relation.as_string(None),
            name=one.new_name,
        ).scalar()
    if is_valid:
        return
    work.on_step(f"foreign key {one.name}")
    if is_valid is None:
        # As most transactions take them, which write to the child after its parent.
        both = sql.SQL("lock table {}, {} in share row exclusive mode").format(
            sql.Identifier(*one.parent), relation
        )
        statement = statements.add_foreign_key(work.way, work.change.key, one)
        work.short(f"adding foreign key {one.name}", lambda: work.run(both, statement))
    _validate(work, relation, sql.Identifier(one.new_name))
