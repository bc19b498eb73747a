"""The change of a key: the steps before the swap, each of which does its remaining part, and the swap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, LiteralString, TypeVar

from psycopg import sql

from shardids.adopt.inplace import statements
from shardids.adopt.inplace.key import (
    Change,
    ForeignKey,
    Index,
    Key,
    Pair,
    State,
    begin_change,
    find_change,
    forget_change,
    parse_key,
    read_document,
    write_blocks,
    write_state,
)
from shardids.adopt.inplace.node import LOCK_MS, Shard, with_short_locks
from shardids.adopt.inplace.statements import Sql, Way
from shardids.errors import (
    AdoptionFailed,
    AdoptionRefused,
    ClusterConflict,
    MissingPrivilege,
    StatementFailed,
)
from shardids.pg.queries import quoted, statement
from shardids.replication.steps import Event, OnEvent, Report, Runner, Step, ignore

_CHECK_VIOLATION = "23514"
T = TypeVar("T")
Pairs = tuple[Pair, ...]
"""The pairs of one table."""
_PASSES = 3
"""How often a table is filled if rows are found afterwards that are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled(Event):
    """The share of a table's rows whose new columns are filled."""

    table: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Options of the work, and the receiver of its events.

    ``batch``: about how many rows are filled in one transaction; ``pause_s``: the time between two.
    """

    batch: int = 2000
    pause_s: float = 0.0
    on_event: OnEvent = ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table on the node of a shard. ``name``: as SQL writes it."""

    shard: Shard
    relid: int
    name: str
    how: How

    def change(self) -> Change | None:
        """Return the journal's document of it."""
        with self.shard.connection.begin():
            return find_change(self.shard, self.relid)

    def work(self, key: Key, way: Way) -> Work:
        """Return the work at the table's key, which is logged."""
        fields = {"table": self.name, "shard": self.shard.number, "node": self.shard.node}
        report = Report("adopt", f"key of {self.name}", fields, self.how.on_event, shard=self.shard.number)
        how = replace(self.how, on_event=report)
        return Work(shard=self.shard, relid=self.relid, name=self.name, how=how, key=key, way=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Table):
    """Work at a table's key, one way or the other."""

    key: Key
    way: Way

    def take(self, *steps: Step[Work]) -> None:
        """Take the steps that are needed, as the database says of each when its turn comes."""
        Runner(self, self.how.on_event).take(steps)

    def short(self, what: str, work: Callable[[], None]) -> None:
        """Do work that others would queue behind."""
        names = [name.as_string(None) for name in self.key.locked()]
        with_short_locks(self.shard, what, work, tables=names, on_event=self.how.on_event)

    def run(self, parts: Iterable[Sql]) -> None:
        """Run statements in the open transaction, sent at once."""
        self.shard.execute(sql.SQL(";\n").join(parts))


def _step(
    name: str, of: T, act: Callable[[Work, T], None], is_done: Callable[[Work, T], object]
) -> Step[Work]:
    return Step(name=name, act=lambda work: act(work, of), is_needed=lambda work: not is_done(work, of))


def widening(key: Key) -> Iterator[Step[Work]]:
    """Yield the steps that make the other columns ready: filled, checked, indexed and referred to."""
    for pairs in key.tables.values():
        yield _step(f"columns of {pairs[0].table}", pairs, _tie, _is_tied)
    for pairs in key.tables.values():
        yield _step(f"fill {pairs[0].table}", pairs, _fill, _is_filled)
        yield _step(f"check {pairs[0].table}", pairs, _check, _is_checked)
    for pair in key.pairs:
        if pair.not_null:
            yield _step(f"not null {pair.table}", pair, _set_not_null, _is_not_null)
    for index in key.indexes:
        yield _step(f"index {index.name}", index, _build, _is_valid_index)
    for one in key.foreign_keys:
        yield _step(f"foreign key {one.name}", one, _refer, _is_valid)


def _constraints(work: Work, pair: Pair) -> dict[str, bool]:
    """Return the constraints of a table, and whether they are validated."""
    with work.shard.connection.begin():
        rows = work.shard.execute(
            "select conname, convalidated from pg_constraint where conrelid = :relid", relid=pair.relid
        )
        return {row.conname: row.convalidated for row in rows}


def _is_tied(work: Work, pairs: Pairs) -> bool:
    return {pair.check_name for pair in pairs} <= _constraints(work, pairs[0]).keys()


def _is_checked(work: Work, pairs: Pairs) -> bool:
    there = _constraints(work, pairs[0])
    return all(there[pair.check_name] for pair in pairs)


def _tie(work: Work, pairs: Pairs) -> None:
    """Add the columns and their trigger; after a swap, there or back, only the checks are missing."""
    relid, there = pairs[0].relid, _constraints(work, pairs[0])
    with work.shard.connection.begin():
        # The columns come with it, in one transaction: without it, columns of such names are not ours.
        has_trigger = work.shard.execute(
            "select exists (select from pg_trigger where tgrelid = :relid and tgname = :name)",
            relid=relid,
            name=statements.TRIGGER,
        ).scalar()

    def add() -> None:
        if has_trigger:
            missing = (pair for pair in pairs if pair.check_name not in there)
            work.run(statements.add_check(work.way, pair) for pair in missing)
        else:
            work.run(statements.add_columns(pairs))
        write_blocks(work.shard, work.relid, relid, None)

    work.short(f"adding columns to {pairs[0].table}", add)


def _check(work: Work, pairs: Pairs) -> None:
    """Validate that the columns are in step; rows that are not are filled again, a few times."""
    for left in reversed(range(_PASSES)):
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
            write_blocks(work.shard, work.relid, pairs[0].relid, None)
        _fill(work, pairs)


def no_way_back(pair: Pair) -> AdoptionRefused:
    """Return the error for a column whose values its former type can't hold."""
    return AdoptionRefused(
        f"{pair.table} has values that {pair.type} can't hold: the way back is closed",
        hint="shardids key adopt TABLE --finish",
    )


def _validate(work: Work, relation: sql.Identifier, constraint: sql.Identifier) -> None:
    with work.shard.connection.begin():
        work.shard.execute("set local statement_timeout = 0")
        work.run([statement("alter table {} validate constraint {}", relation, constraint)])


def _blocks(work: Work, relid: int) -> tuple[int, int, int]:
    """Return the block to fill a table from, the one to end before, and how many are one batch."""
    with work.shard.connection.begin():
        change = find_change(work.shard, work.relid)
        size: Any = work.shard.execute(
            """select pg_relation_size(c.oid) / current_setting('block_size')::integer as blocks,
                      greatest(reltuples, 0) / greatest(relpages, 1) as density
               from pg_class c where oid = :relid""",
            relid=relid,
        ).one()
    first, end = (change and change.blocks.get(str(relid))) or (0, size.blocks)
    return first, end, max(1, round(work.how.batch / (size.density or 100)))


def _is_filled(work: Work, pairs: Pairs) -> bool:
    first, end, _ = _blocks(work, pairs[0].relid)
    return first >= end or _is_checked(work, pairs)


def _fill(work: Work, pairs: Pairs) -> None:
    """Fill the rows of a table, from the block that the journal has."""
    first, end, step = _blocks(work, pairs[0].relid)
    while first < end:
        until = min(first + step, end)
        _fill_blocks(work, pairs, (first, until), end)
        first = until
        work.how.on_event(Filled(table=pairs[0].table, share=first / end))
        if work.how.pause_s and first < end:
            time.sleep(work.how.pause_s)


def _fill_blocks(work: Work, pairs: Pairs, blocks: tuple[int, int], end: int) -> None:
    def fill() -> None:
        be_quiet(work.shard, work.key.tables)
        work.run([statements.fill(work.way, pairs, *blocks)])
        write_blocks(work.shard, work.relid, pairs[0].relid, (blocks[1], end))

    work.short(f"filling {pairs[0].table}", fill)


def be_quiet(shard: Shard, relids: dict[int, tuple[Pair, ...]]) -> None:
    """Keep the tables' other triggers from running for the open transaction's updates.

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


_NOT_NULL = """
    select a.attnotnull, k.conname from pg_attribute a
    left join pg_constraint k
      on k.contype::text = 'n' and k.conrelid = a.attrelid and k.conkey = array[a.attnum]
    where a.attrelid = :relid and a.attname = :column"""


def _is_not_null(work: Work, pair: Pair) -> bool:
    with work.shard.connection.begin():
        return bool(
            work.shard.execute(_NOT_NULL, relid=pair.relid, column=work.way.other(pair)).one().attnotnull
        )


def _set_not_null(work: Work, pair: Pair) -> None:
    column = work.way.other(pair)

    def set_it() -> None:
        work.run([statement("alter table {} alter column {} set not null", pair.relation, column)])
        name = work.shard.execute(_NOT_NULL, relid=pair.relid, column=column).one().conname
        if name is not None:
            rename: LiteralString = "alter table {} rename constraint {} to {}"
            work.run([statement(rename, pair.relation, name, pair.not_null_constraint)])

    work.short(f"SET NOT NULL on {pair.table}", set_it)


def _is_valid_index(work: Work, index: Index) -> bool | None:
    """Return whether an index's successor is valid; ``None`` without a successor."""
    with work.shard.connection.begin():
        found: bool | None = work.shard.execute(
            "select (select indisvalid from pg_index where indexrelid = to_regclass(:name))",
            name=sql.Identifier(index.schema, index.new_name).as_string(None),
        ).scalar()
    return found


def _build(work: Work, index: Index) -> None:
    is_valid = _is_valid_index(work, index)
    options = {"isolation_level": "AUTOCOMMIT", "no_parameters": True}
    with work.shard.connection.engine.connect().execution_options(**options) as free:
        for setting in ("statement_timeout", "lock_timeout"):
            free.exec_driver_sql(f"set {setting} = 0")
        if is_valid is False:
            free.exec_driver_sql(f"drop index concurrently {quoted(index.schema, index.new_name)}")
        free.exec_driver_sql(statements.make_index(work.way, work.key, index).as_string(None))


def _is_valid(work: Work, one: ForeignKey) -> bool | None:
    """Return whether a foreign key's successor is validated; ``None`` without a successor."""
    with work.shard.connection.begin():
        found: bool | None = work.shard.execute(
            """select (select convalidated from pg_constraint
                       where conrelid = cast(:table as regclass) and conname = :name)""",
            table=quoted(*one.child),
            name=one.new_name,
        ).scalar()
    return found


def _refer(work: Work, one: ForeignKey) -> None:
    relation = sql.Identifier(*one.child)
    if _is_valid(work, one) is None:
        # As most transactions take them, which write to the child after its parent.
        parent = sql.Identifier(*one.parent)
        both = statement("lock table {}, {} in share row exclusive mode", parent, relation)
        add = statements.add_foreign_key(work.way, work.key, one)
        work.short(f"adding foreign key {one.name}", lambda: work.run([both, add]))
    _validate(work, relation, sql.Identifier(one.new_name))


def _locking(work: Work, then: Callable[[], None]) -> Callable[[], None]:
    """Return a step that locks all of a key's tables, within the time that one may take, and go on.

    Who waits for the first waits for all. Transactions that take them in the other order are in its way; so
    it tries that, too.
    """
    is_reversed = cycle((False, False, True))

    def lock() -> None:
        names = _there(work)
        if next(is_reversed):
            names.reverse()
        work.shard.execute(f"set local statement_timeout = '{LOCK_MS}ms'")
        work.shard.execute(statements.lock_all(names))
        work.shard.execute("set local statement_timeout = 0")
        then()

    return lock


def _there(work: Work) -> list[sql.Identifier]:
    """The key's tables that still exist."""
    names = work.key.locked()
    found = work.shard.execute(
        """select to_regclass(n) is not null from unnest(cast(:names as text[])) with ordinality t (n, place)
           order by place""",
        names=[name.as_string(None) for name in names],
    ).scalars()
    return [name for name, is_there in zip(names, found, strict=True) if is_there]


def swap(work: Work) -> None:
    """Give the other columns the place of the live ones.

    Raises:
        ClusterConflict: the objects that depend on the columns have changed since the change began.
    """
    key, way = work.key, work.way
    seen: object = None

    def put() -> None:
        # What is described takes longer than others should wait; whether it has changed since does not.
        changed = ["just now"] if _fingerprint(work) != seen else []
        _refuse_changes(work, changed, "Run the command again.")
        last = _last_value(work)
        work.run(statements.swap(way, key))
        if key.sequence and last is not None:
            work.run(statements.identity_on(key.key, key.sequence, last))
        elif key.sequence:
            work.run(statements.serial_on(key.key, key.sequence, way.parked(key.key)))
        write_state(work.shard, work.relid, State.SWAPPED if way.is_forward else State.WIDENING)

    lock_and_put = _locking(work, put)

    def do() -> None:
        nonlocal seen
        seen = _fingerprint(work)
        now = parse_key(read_document(work.shard, work.name, key))
        from_the_start = "; or take it back (--back), and begin again" if way.is_forward else ""
        hint = f"Undo that, and run the command again{from_the_start}."
        _refuse_changes(work, list(now.changes(key)), hint)
        lock_and_put()

    work.short("the swap", do)


def _refuse_changes(work: Work, changed: list[str], hint: str) -> None:
    if changed:
        raise ClusterConflict(
            f"the tables around the key of {work.name} were changed meanwhile: {'; '.join(changed)}",
            hint=hint,
        )


def _fingerprint(work: Work) -> object:
    """All that hangs on the key's tables: the rows of ``pg_depend`` in one number, and objects without any.

    That is the sequence as such, publications of all tables or of a schema, and slots.
    """
    key = work.key
    sequence = key.sequence and sql.Identifier(key.sequence.schema, key.sequence.name).as_string(None)
    return work.shard.execute(
        """select (select count(*) || ' ' || coalesce(sum(hashtextextended(
                     concat_ws(' ', d.classid, d.objid, d.objsubid, d.refobjid, d.refobjsubid), 0)), 0)
                   from pg_depend d
                   where d.refclassid = 'pg_class'::regclass
                     and d.refobjid = any (:relids ::bigint[]::oid[])) as depend,
                  (select concat(q, c.relacl) from pg_sequence q join pg_class c on c.oid = q.seqrelid
                   where c.oid = to_regclass(:sequence)) as sequence,
                  array(select oid from pg_publication where puballtables order by oid) as publications,
                  array(select d.objid from pg_depend d
                        where d.classid = to_regclass('pg_publication_namespace')
                          and d.refclassid = 'pg_namespace'::regclass order by 1) as schemas,
                  array(select slot_name from pg_replication_slots
                        where slot_type = 'logical' and database = current_database() order by 1) as slots""",
        relids=list(key.tables),
        sequence=sequence,
    ).one()


def _last_value(work: Work) -> tuple[int, bool] | None:
    """The numbers that an identity's sequence has issued, with no session drawing from it any more."""
    sequence = work.key.sequence
    if sequence is None or not sequence.identity:
        return None
    pair, name = work.key.key, sql.Identifier(sequence.schema, sequence.name)
    set_cache: LiteralString = "alter table {} alter column {} set cache {}"
    work.run([statement(set_cache, pair.relation, pair.column, sequence.cache)])
    row = work.shard.execute(statement("select last_value, is_called from {}", name)).one()
    return int(row.last_value), bool(row.is_called)


def stay(work: Work) -> None:
    """Give up the way back: drops the objects made for it; the table stays swapped."""

    def do() -> None:
        drops = (statement(statements.DROP_CONSTRAINT, p.relation, p.check) for p in work.key.pairs)
        work.run(drops)
        write_state(work.shard, work.relid, State.SWAPPED)

    work.short("staying", do)


def drop(work: Work, *, draw: bool = False) -> None:
    """Drop the other columns, and let the key draw from the shard if that is wanted."""
    key = work.key

    def do() -> None:
        if draw and key.sequence:
            work.run(statements.draw_on(key.key, key.sequence, work.shard.next_id))
        work.run(statements.drop_columns(work.way, key))
        forget_change(work.shard, work.relid)

    work.short("dropping columns", _locking(work, do))


def draw_at_once(work: Work) -> None:
    """Let a key that is a bigint draw from the shard; the journal keeps what its sequence had issued."""
    key = work.key

    def do() -> None:
        document = {**key.document, "last": _last_value(work)}
        begin_change(work.shard, work.relid, work.name, document, State.DRAWING)
        if key.sequence:
            work.run(statements.draw_on(key.key, key.sequence, work.shard.next_id))

    work.short("the default", _locking(work, do))


def undraw(work: Work) -> None:
    """Let a key that was a bigint come from its sequence again."""
    key, last = work.key, work.key.document["last"]

    def do() -> None:
        if key.sequence and last is not None:
            work.run(statements.default_off(key.key))
            work.run(statements.identity_on(key.key, key.sequence, (last[0], last[1])))
        elif key.sequence:
            work.run(statements.serial_on(key.key, key.sequence, None))
        forget_change(work.shard, work.relid)

    work.short("the default", _locking(work, do))
