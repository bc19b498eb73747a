"""The state of reference tables: the lag of each node, differences, and the requirements of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.references import AWAIT, MARK, WITHIN_S, reference_digests, references_of, slots_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.client.references import followers_behind
from shardids.errors import ClusterConflict, ConnectionFailed, MissingPrivilege, ReferencesBehind
from shardids.pg.connections import server_major
from shardids.pg.notation import counted
from shardids.pg.reader import Refused, reading_as_reader
from shardids.pg.schemas import untrusted
from shardids.replication.sides import Side
from shardids.replication.subscriptions import CAPACITY
from shardids.tables.references.following import LOCK_TIMEOUT, Work, definitions, run

_CATCH_UP_S: Final = 5.0
_NO_WORKER: Final = "its worker does not run; the node's log says why"
REFUSES: Final = "refuses writes: its server was promoted, restored or upgraded"
"""The state of a writer that has to be given the right to write again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A reference table: ``creating``, ``active`` or ``dropping``, and the node that it is written to on."""

    name: str
    state: str
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The state of a node that follows the writer.

    Attributes:
        node: its name.
        role: ``writer`` or ``reader``.
        state: ``follows``, or its fault; of the writer ``is written to``, or why not.
        lag_bytes: how much of the writer's log it has not confirmed; ``None`` if that is unknown.
        kept_bytes: how much of its log the writer keeps for it.
    """

    node: str
    role: str
    state: str
    lag_bytes: int | None = None
    kept_bytes: int | None = None


def tables(catalog: Catalog) -> list[Table]:
    """Return the reference tables, as the catalog has them."""
    known = references_of(catalog)
    return [Table(name=name, state=state, writer=str(known.writer)) for name, state in known.states.items()]


_SLOTS = text("""
    select slot_name::text as name, active, coalesce(wal_status, '') = 'lost' as is_lost,
           greatest(pg_current_wal_lsn() - confirmed_flush_lsn, 0)::bigint as lag_bytes,
           (pg_current_wal_lsn() - restart_lsn)::bigint as kept_bytes
    from pg_replication_slots where slot_name = any(:names)""")

_SUBSCRIPTION = text("""
    select s.subenabled as is_enabled, exists (
             select from pg_stat_subscription t where t.subid = s.oid and t.pid is not null) as is_working
    from pg_subscription s where s.subname = :name and s.subdbid = shardids.database()""")


def status(catalog: Catalog) -> list[Followed]:
    """Return how each node follows the writer; change nothing, and wait for nobody.

    Raises:
        ConnectionFailed: the writer does not answer. A reader that does not is in the answer.
    """
    known, placement = references_of(catalog), catalog.placement()
    if known.writer is None:
        return []
    names = {
        node: slot
        for slot, node in slots_of(catalog.describe().cluster, placement.nodes, known.writer).items()
    }
    with Nodes(placement.nodes, catalog.url, autocommit=True) as nodes:
        with nodes[known.writer].connect() as connection:
            slots = {row.name: row for row in connection.execute(_SLOTS, {"names": list(names.values())})}
            active = [name for name, state in known.states.items() if state == "active"]
            is_open = taking_writes(connection, active) == set(active)
        answers = nodes.each(lambda name, engine: _subscribed(engine.connect(), names[name]), names)
    state = "is written to" if is_open else REFUSES
    if known.successor is not None:
        state = f'takes no writes while node "{known.successor}" becomes the writer'
    found = [Followed(node=known.writer, role="writer", state=state)]
    for node, name in sorted(names.items()):
        slot = slots.get(name)
        failure = answers.failures.get(node)
        wrong = str(failure.message) if failure is not None else answers.results[node] or wrong_slot(slot)
        found.append(
            Followed(
                node=node,
                role="reader",
                state=wrong or "follows",
                lag_bytes=None if slot is None else slot.lag_bytes,
                kept_bytes=None if slot is None else slot.kept_bytes,
            )
        )
    return found


def taking_writes(connection: Connection, names: Sequence[str]) -> set[str]:
    """Return the tables that take writes on a node as on their writer."""
    asked = text("""select name::text from unnest(cast(:names as name[])) name
                    where shardids.takes_reference_writes(name)""")
    return set(connection.scalars(asked, {"names": list(names)}))


def _subscribed(connection: Connection, name: str) -> str | None:
    with connection:
        return wrong_subscription(connection, name)


def wrong_subscription(connection: Connection, name: str) -> str | None:
    """Return the fault of a node's subscription; ``None`` without one."""
    found = connection.execute(_SUBSCRIPTION, {"name": name}).one_or_none()
    if found is None:
        return "has no subscription"
    if not found.is_enabled:
        return "its subscription is disabled"
    return None if found.is_working else _NO_WORKER


def wrong_slot(slot: Any) -> str | None:
    """Return the fault of a node's slot on the writer; ``None`` without one."""
    if slot is None:
        return "the writer has no replication slot for it"
    return "the writer has given up its replication slot" if slot.is_lost else None


def has_arrived(work: Work, reader: Side) -> bool:
    """Wait some seconds until a node has the writer's commits; return whether it has."""
    return not followers_behind(work.writer.engine, {work.slot(reader): reader.name}, _CATCH_UP_S)


def await_all(work: Work, what: str) -> None:
    """Wait until all nodes have the writer's commits; ``what`` begins the message.

    Raises:
        ReferencesBehind: some have not in time.
    """
    followers = {work.slot(reader): name for name, reader in work.readers.items()}
    if behind := followers_behind(work.writer.engine, followers, WITHIN_S):
        raise ReferencesBehind(
            f"{what} node {behind} within {WITHIN_S:g} s",
            hint="Repeat the command when the node follows again. See: shardids reference list",
        )


def differing(work: Work, names: Sequence[str]) -> Mapping[str, str]:
    """Return the nodes that are not as the writer, and why. Writers of reference tables wait meanwhile."""
    wrong: dict[str, str] = {}
    followers = {work.slot(reader): name for name, reader in work.readers.items()}
    with work.writer.autocommit() as connection:
        slots = {row.name: row for row in connection.execute(_SLOTS, {"names": list(followers)})}
    for name, reader in work.readers.items():
        try:
            with reader.autocommit() as connection:
                found = wrong_subscription(connection, work.slot(reader)) or wrong_slot(
                    slots.get(work.slot(reader))
                )
                if taken := sorted(taking_writes(connection, names)):
                    found = f"takes writes to {taken[0]} as the writer does"
        except ConnectionFailed as error:
            found = error.message
        if found not in (None, _NO_WORKER):
            wrong[name] = found
    rest = {slot: name for slot, name in followers.items() if name not in wrong}
    if not rest or not names:
        return wrong
    with ExitStack() as stack:
        locking, other = (
            stack.enter_context(work.writer.begin()),
            stack.enter_context(work.writer.autocommit()),
        )
        _lock(locking, names)
        wanted = other.scalar(MARK)
        asked = {"slots": list(rest), "wanted": wanted, "patience_s": _CATCH_UP_S}
        wrong |= {rest[slot]: "does not follow; its log says why" for slot in other.scalars(AWAIT, asked)}
        original = digests(work.writer, names)
        for name in rest.values():
            if name not in wrong and (
                table := _first_difference(original, digests(work.readers[name], names))
            ):
                wrong[name] = f"its rows of {table} differ"
    return wrong


def _lock(connection: Connection, names: Sequence[str]) -> None:
    connection.execute(text("select set_config('lock_timeout', :timeout, true)"), {"timeout": LOCK_TIMEOUT})
    listed = sql.SQL(", ").join(sql.Identifier(REFERENCE_SCHEMA, name) for name in sorted(names))
    run(connection, sql.SQL("lock table {} in share mode").format(listed))


def digests(side: Side, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
    """Return the number of rows, their hash and the columns of each table.

    Raises:
        MissingPrivilege, StatementFailed: rows can't be read there.
    """
    columns = definitions(side, names)
    there = [name for name in names if columns[name] is not None]
    with reading_as_reader(side.engine, f'node "{side.name}"') as reader:
        found = reference_digests(reader, there)
        for name, answer in found.items():
            if isinstance(answer, Refused):
                raise reader.error(answer, f"{REFERENCE_SCHEMA}.{name}")
    return {name: (found.get(name), columns[name]) for name in names}


def differs(one: Side, other: Side, names: Sequence[str]) -> str | None:
    """Return a table whose rows or columns differ between two nodes; ``None`` if none does."""
    return _first_difference(digests(one, names), digests(other, names))


def _first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    return next((table for table in sorted(one) if one[table] != other.get(table)), None)


_LARGEST_BYTES: Final = 256 << 20
"""A node that begins to follow gets all rows at once, while writers wait."""

_TABLE = text("""
    select c.relkind, c.relpersistence, c.relrowsecurity, c.relreplident, c.relispartition, c.relhasrules,
           exists (select from pg_inherits i where c.oid in (i.inhrelid, i.inhparent)) as inherits,
           exists (select from pg_index i
                   where i.indrelid = c.oid and i.indisprimary and i.indimmediate) as has_key,
           pg_total_relation_size(c.oid) as bytes,
           (select min(k.confrelid::regclass::text)
            from pg_constraint k join pg_class t on t.oid = k.confrelid
            where k.conrelid = c.oid and k.contype = 'f' and t.oid <> c.oid
              and not (t.relnamespace = c.relnamespace
                       and t.relname = any (cast(:tables as name[])))) as refers_to,
           (select min(g.tgname::text) from pg_trigger g
            where g.tgrelid = c.oid and not g.tgisinternal and g.tgenabled <> 'D'
              and not starts_with(g.tgname::text, 'shardids_')) as trigger,
           (select min(k.conname::text) from pg_constraint k
            where k.conrelid = c.oid and k.contype = 'f'
              and not (k.confdeltype in ('a', 'r') and k.confupdtype in ('a', 'r'))) as acting
    from pg_class c where c.relnamespace = to_regnamespace(:schema) and c.relname = :name""")


def require_fit(connection: Connection, name: str, work: Work, trusted: Sequence[str]) -> None:
    """Refuse a table that can't be a reference table; ``trusted``: as :mod:`shardids.pg.schemas` says.

    Raises:
        ClusterConflict: the writer lacks it, or it has parts that can't be followed.
        MissingPrivilege: code of roles that are not trusted would run on the nodes.
    """
    found = connection.execute(
        _TABLE, {"schema": REFERENCE_SCHEMA, "name": name, "tables": list(work.known.states)}
    ).one_or_none()
    if found is None:
        raise ClusterConflict(
            f'node "{work.writer.name}" has no table {REFERENCE_SCHEMA}.{name}',
            hint="Create it there by CREATE TABLE, by a revision for the node, or with --models.",
        )
    if reasons := list(_unfit(found)):
        raise ClusterConflict(
            f"{REFERENCE_SCHEMA}.{name} can't be a reference table: {'; '.join(reasons)}",
            hint="Change the table, then repeat the command.",
        )
    for one in untrusted(connection, [f"{REFERENCE_SCHEMA}.{name}"], trusted=trusted):
        raise MissingPrivilege(one.reason, hint=one.remedy)


def _unfit(found: Any) -> Iterator[str]:
    if found.relkind != "r" or found.relispartition or found.inherits:
        yield "it is not a plain table: partitions, children, views and foreign tables are not followed"
    if found.relpersistence != "p":
        yield "it is unlogged or temporary"
    if not found.has_key:
        yield "it has no primary key that is checked at once"
    if found.relreplident != "d":
        yield "its replica identity is not the primary key"
    if found.relrowsecurity:
        yield "it has row level security"
    if found.relhasrules:
        yield "it has rules"
    if found.trigger is not None:
        yield f"trigger {found.trigger} may change rows that a node is given, so that they differ"
    if found.refers_to is not None:
        yield f"it refers to {found.refers_to}, which is not a reference table"
    if found.acting is not None:
        yield f"foreign key {found.acting} acts on rows (CASCADE, SET NULL), which no node would repeat"
    if found.bytes > _LARGEST_BYTES:
        yield f"it is {found.bytes >> 20} MiB, and may be {_LARGEST_BYTES >> 20}: shard it"


def require_capacity(work: Work) -> None:
    """Refuse servers whose settings or rights don't let nodes follow the writer.

    Raises:
        ClusterConflict: the message has every reason, and what to do.
    """
    following = _following(work)
    new = [reader for reader in work.readers.values() if reader.name not in following]
    reasons: list[str] = []
    with work.writer.autocommit() as connection:
        there = connection.execute(CAPACITY).one()
        if there.wal_level != "logical":
            reasons.append(
                f'node "{work.writer.name}" has wal_level = {there.wal_level}: alter system set wal_level ='
                " logical, and restart that server"
            )
        if not there.may_replicate:
            reasons.append(
                f'the role may not make replication slots on node "{work.writer.name}": alter role …'
                " replication, or use a superuser's URL"
            )
        reasons += _too_few(
            work.writer, len(new), max_replication_slots=there.slots, max_wal_senders=there.senders
        )
    for reader in new:
        with reader.autocommit() as connection:
            here = connection.execute(CAPACITY).one()
            origins = (
                "max_active_replication_origins"
                if server_major(connection) >= 18
                else "max_replication_slots"
            )
        reasons += _too_few(
            reader,
            1,
            max_logical_replication_workers=here.workers,
            max_worker_processes=here.processes,
            **{origins: here.origins},
        )
        if not here.may_subscribe:
            reasons.append(
                f'the role may not subscribe on node "{reader.name}": use a superuser\'s URL, or from version'
                " 16 on grant pg_create_subscription"
            )
    if reasons:
        raise ClusterConflict(
            f"nodes can't follow the writer of reference tables: {'; '.join(reasons)}",
            hint="Correct this, then repeat the command. Nothing was changed.",
        )


# Without NOT NULL, which the columns tell.
_RULES = text("""
    select c.relname::text as table, rule
    from pg_class c cross join lateral (
      select replace(pg_get_constraintdef(k.oid), ' NOT VALID', '') as rule from pg_constraint k
      where k.conrelid = c.oid and k.contype in ('p', 'u', 'f', 'c', 'x')
      union
      select pg_get_indexdef(i.indexrelid) from pg_index i
      where i.indrelid = c.oid and i.indisunique and i.indisvalid
        and not exists (select from pg_constraint k where k.conindid = i.indexrelid)
      union
      select case when a.attidentity = ''
                  then format('column %I DEFAULT %s', a.attname, pg_get_expr(d.adbin, c.oid))
                  else format('column %I GENERATED %s AS IDENTITY', a.attname,
                              case a.attidentity when 'a' then 'ALWAYS' else 'BY DEFAULT' end) end
      from pg_attribute a left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
      where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        and (a.attidentity <> '' or d.oid is not null)
    ) as found
    where c.relnamespace = to_regnamespace(:schema) and c.relname = any(:tables)""")


def require_same_rules(writer: Side, successor: Side, tables: Sequence[str]) -> None:
    """Refuse a node that as the writer would enforce or set less, or more, than the present one.

    Raises:
        ClusterConflict: a constraint, a unique index, a default or an identity column differs.
    """
    asked = {"schema": REFERENCE_SCHEMA, "tables": list(tables)}
    with writer.autocommit() as one, successor.autocommit() as other:
        there, here = (
            {(row.table, row.rule) for row in side.execute(_RULES, asked)} for side in (one, other)
        )
    for table, rule in sorted(there ^ here):
        lacks, has = (successor, writer) if (table, rule) in there else (writer, successor)
        raise ClusterConflict(
            f'reference table {table} lacks a rule on node "{lacks.name}" that node "{has.name}" has: {rule}',
            hint="Make the tables alike, for example by a revision for the node (shardids migrate up). Then"
            " repeat the command.",
        )


def _too_few(side: Side, needed: int, **free: int) -> list[str]:
    return [
        f'node "{side.name}" has {max(there, 0)} free of {setting} and needs {needed}: raise it there and'
        " restart that server"
        for setting, there in free.items()
        if there < needed
    ]


def _following(work: Work) -> set[str]:
    slots = {work.slot(reader): name for name, reader in work.readers.items()}
    with work.writer.autocommit() as connection:
        found = connection.scalars(
            text("select slot_name::text from pg_replication_slots where slot_name = any(:names)"),
            {"names": list(slots)},
        )
        return {slots[slot] for slot in found}


def require_unused_name(work: Work, name: str) -> None:
    """Refuse to replace rows of a table that is not a reference table yet.

    Raises:
        ClusterConflict: a node has such a table, with rows.
    """
    for reader in work.readers.values():
        found, _columns = digests(reader, [name])[name]
        if rows := found[0] if found else 0:
            raise ClusterConflict(
                f'node "{reader.name}" has a table {REFERENCE_SCHEMA}.{name} with'
                f" {counted(rows, 'row')} already",
                hint="The writer's rows would replace them. Save the rows you need, then empty the table.",
            )


def referrers(side: Side, name: str) -> Sequence[Any]:
    """Return the foreign keys that refer to a reference table on a node.

    Each has ``table``, ``constraint``, ``acts``, whether it deletes or changes rows that refer to a deleted
    one, and ``is_own``, whether the table refers to itself.
    """
    with side.autocommit() as connection:
        return connection.execute(
            text("""
                select k.conrelid::regclass::text as table, k.conname::text as constraint,
                       not (k.confdeltype in ('a', 'r')) as acts, k.conrelid = k.confrelid as is_own
                from pg_constraint k join pg_class c on c.oid = k.confrelid
                where k.contype = 'f' and c.relnamespace = to_regnamespace(:schema) and c.relname = :name
                order by 1, 2"""),
            {"schema": REFERENCE_SCHEMA, "name": name},
        ).all()
