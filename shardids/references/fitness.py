"""Checks what reference tables require. Each raises with all that is wrong, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.references import REFERENCE_SCHEMA
from shardids.catalog.trust import untrusted
from shardids.errors import ClusterConflict, MissingPrivilege
from shardids.mover.requirements import CAPACITY
from shardids.mover.sides import Side, server_major
from shardids.references.state import digests
from shardids.references.work import Work

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
    """Refuses a table that can't be a reference table; ``trusted``: as :mod:`shardids.catalog.trust` says.

    Raises:
        ClusterConflict: the writer lacks it, or it has what can't be followed.
        MissingPrivilege: code of roles that are not trusted would run on the nodes.
    """
    found = connection.execute(
        _TABLE, {"schema": REFERENCE_SCHEMA, "name": name, "tables": list(work.known.states)}
    ).one_or_none()
    if found is None:
        raise ClusterConflict(
            f'node "{work.writer.name}" has no table {REFERENCE_SCHEMA}.{name}',
            hint="Make it there by CREATE TABLE, by a revision for the node, or with --models.",
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
        yield "it is no plain table: partitions, children, views and foreign tables are not followed"
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
        yield f"it refers to {found.refers_to}, which is no reference table"
    if found.acting is not None:
        yield f"foreign key {found.acting} acts on rows (CASCADE, SET NULL), which no node would repeat"
    if found.bytes > _LARGEST_BYTES:
        yield f"it is {found.bytes >> 20} MiB, and may be {_LARGEST_BYTES >> 20}: shard it"


def require_capacity(work: Work) -> None:
    """Refuses servers whose settings or rights don't let nodes follow the writer.

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
            hint="Then repeat the command. Nothing was changed.",
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
    """Refuses a node that as the writer would not enforce, or set, what the present one does, or more.

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
            f'reference table {table} on node "{lacks.name}" lacks what it has on node "{has.name}": {rule}',
            hint="Make them alike, as by a revision for the node (shardids migrate up). Then repeat the"
            " command.",
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
    """Refuses to replace rows of a table that is no reference table yet.

    Raises:
        ClusterConflict: a node has such a table, with rows.
    """
    for reader in work.readers.values():
        found, _columns = digests(reader, [name])[name]
        if rows := found[0] if found else 0:
            raise ClusterConflict(
                f'node "{reader.name}" has a table {REFERENCE_SCHEMA}.{name} with {rows} rows already',
                hint="They would be replaced by the writer's. Save what you need, and empty it there first.",
            )


def referrers(side: Side, name: str) -> Sequence[Any]:
    """Returns the foreign keys that refer to a reference table on a node.

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
