"""The short transactions of a key's change: the swap, the default, and what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from psycopg import sql

from shardids.errors import ClusterConflict
from shardids.inplace import journal, statements
from shardids.inplace.inventory import Key, parse_key, read_document
from shardids.inplace.journal import Change, State
from shardids.inplace.node import LOCK_MS, OnWait, Shard, with_short_locks
from shardids.inplace.statements import BACK, Sql, Way
from shardids.inplace.steps import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How the work is done, and who hears of it; see :class:`~shardids.inplace.steps.Work`."""

    batch: int = 2000
    pause_s: float = 0.0
    on_step: Callable[[str], None] = lambda _step: None
    on_rows: Callable[[str, float], None] = lambda _table, _share: None
    on_wait: OnWait = lambda _text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table on the node of a shard."""

    shard: Shard
    relid: int
    name: str

    def change(self) -> Change | None:
        """What the journal has of it."""
        with self.shard.connection.begin():
            return journal.find(self.shard, self.relid)

    def work(self, change: Change, way: Way, how: How) -> Work:
        """The work at a change, one way or the other."""
        return Work(
            shard=self.shard,
            change=change,
            way=way,
            batch=how.batch,
            pause_s=how.pause_s,
            on_step=how.on_step,
            on_rows=how.on_rows,
            on_wait=how.on_wait,
        )


class _Lock:
    """Locks all of a key's tables, within the time that one may take: who waits for the first waits for all.

    Transactions that take them in the other order are in its way; so it tries that, too.
    """

    def __init__(self, its: Table, key: Key) -> None:
        self._its, self._key = its, key
        self._is_reversed = cycle((False, False, True))

    def __call__(self) -> None:
        names = _there(self._its, self._key)
        if next(self._is_reversed):
            names.reverse()
        self._its.shard.execute(f"set local statement_timeout = '{LOCK_MS}ms'")
        self._its.shard.execute(statements.lock_all(names))
        self._its.shard.execute("set local statement_timeout = 0")


def _there(its: Table, key: Key) -> list[sql.Identifier]:
    """The key's tables, without what was dropped meanwhile."""
    names = key.locked()
    found = its.shard.execute(
        """select to_regclass(n) is not null from unnest(cast(:names as text[])) with ordinality t (n, place)
           order by place""",
        names=[name.as_string(None) for name in names],
    ).scalars()
    return [name for name, is_there in zip(names, found, strict=True) if is_there]


def _run(its: Table, parts: Iterator[Sql]) -> None:
    its.shard.execute(statements.joined(parts))


def swap(its: Table, change: Change, way: Way, how: How) -> None:
    """Gives the other columns the place of the live ones.

    Raises:
        ClusterConflict: what hangs on the columns is no longer what it was when the change began.
    """
    how.on_step("swap")
    key = change.key

    lock = _Lock(its, key)

    def do() -> None:
        seen = _fingerprint(its, key)
        now = parse_key(read_document(its.shard, its.name, key))
        from_the_start = "; or take it back (--back), and begin again" if way.is_forward else ""
        _refuse_changes(its, list(now.changes(key)), f"Undo that, and run the command again{from_the_start}.")
        lock()
        # What is described takes longer than others should wait; whether it has changed since does not.
        changed = ["just now"] if _fingerprint(its, key) != seen else []
        _refuse_changes(its, changed, "Run the command again.")
        last = _last_value(its, key)
        _run(its, statements.swap(way, key))
        if key.sequence and last is not None:
            _run(its, statements.identity_on(key.key, key.sequence, last))
        elif key.sequence:
            _run(its, statements.serial_on(key.key, key.sequence, way.parked(key.key)))
        journal.write_state(its.shard, change, State.SWAPPED if way.is_forward else State.WIDENING)

    its.work(change, way, how).short("the swap", do)


def _refuse_changes(its: Table, changed: list[str], hint: str) -> None:
    if changed:
        raise ClusterConflict(
            f"the tables around the key of {its.name} were changed meanwhile: {'; '.join(changed)}", hint=hint
        )


def _fingerprint(its: Table, key: Key) -> object:
    """All that hangs on the key's tables: the rows of ``pg_depend`` in one number, and what has none there.

    That is the sequence as such, publications of all tables or of a schema, and slots.
    """
    sequence = key.sequence and sql.Identifier(key.sequence.schema, key.sequence.name).as_string(None)
    return its.shard.execute(
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


def _last_value(its: Table, key: Key) -> tuple[int, bool] | None:
    """What an identity's sequence has issued, with nobody drawing from it any more."""
    sequence = key.sequence
    if sequence is None or not sequence.identity:
        return None
    column = sql.Identifier(key.key.column)
    its.shard.execute(
        sql.SQL("alter table {} alter column {} set cache {}").format(
            key.key.relation, column, sequence.cache
        )
    )
    name = sql.Identifier(sequence.schema, sequence.name)
    row = its.shard.execute(sql.SQL("select last_value, is_called from {}").format(name)).one()
    return int(row.last_value), bool(row.is_called)


def stay(its: Table, change: Change, how: How) -> None:
    """Gives up the way back: what was made for it is dropped, and the table stays swapped."""

    def do() -> None:
        for pair in change.key.pairs:
            its.shard.execute(
                sql.SQL("alter table {} drop constraint if exists {}").format(pair.relation, pair.check)
            )
        journal.write_state(its.shard, change, State.SWAPPED)

    its.work(change, BACK, how).short("staying", do)


def drop(its: Table, change: Change, way: Way, how: How, *, draw: bool) -> None:
    """Drops the other columns, and lets the key draw from the shard if that is wanted."""
    how.on_step("drop")
    key = change.key

    lock = _Lock(its, key)

    def do() -> None:
        lock()
        if draw and key.sequence:
            _run(its, statements.draw_on(key.key, key.sequence, its.shard.next_id))
        _run(its, statements.drop_columns(way, key))
        journal.forget(its.shard, its.relid)

    its.work(change, way, how).short("dropping columns", do)


def draw_at_once(its: Table, document: dict[str, Any], how: How) -> None:
    """Lets a key that is a bigint draw from the shard; the journal keeps what its sequence had issued."""
    key = parse_key(document)
    how.on_step("default")

    lock = _Lock(its, key)

    def draw() -> None:
        lock()
        last = _last_value(its, key)
        journal.begin(its.shard, its.relid, its.name, document | {"last": last}, State.DRAWING)
        if key.sequence:
            _run(its, statements.draw_on(key.key, key.sequence, its.shard.next_id))

    _short(its, "the default", draw, how)


def undraw(its: Table, change: Change, how: How) -> None:
    """Lets a key that was a bigint come from its sequence again."""
    key, last = change.key, change.key.document["last"]
    how.on_step("default")

    lock = _Lock(its, key)

    def do() -> None:
        lock()
        if key.sequence and last is not None:
            _run(its, statements.default_off(key.key))
            _run(its, statements.identity_on(key.key, key.sequence, (last[0], last[1])))
        elif key.sequence:
            _run(its, statements.serial_on(key.key, key.sequence, None))
        journal.forget(its.shard, its.relid)

    _short(its, "the default", do, how)


def _short(its: Table, what: str, work: Callable[[], None], how: How) -> None:
    with_short_locks(its.shard, what, work, tables=[its.name], on_wait=how.on_wait)
