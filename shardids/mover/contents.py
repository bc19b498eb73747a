"""Checks that everything in a shard can be moved, and returns the reasons against the move."""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardids.catalog.reader import HINT, reading_as_reader
from shardids.catalog.revisions import read_node_heads
from shardids.mover.requirements import Refusal
from shardids.mover.sides import Sides


def examine_contents(sides: Sides, *, offline: bool) -> list[Refusal]:
    """Returns every reason against the move that lies in the shard's contents. Changes nothing."""
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        return [
            *node_revisions_agree(sides),
            *children_are_inside(source, sides),
            *all_can_be_moved(source, target, sides, offline=offline),
        ]


def node_revisions_agree(sides: Sides) -> list[Refusal]:
    """Requires the same of the application's revisions for the node: the shard may use what they create."""
    there, here = (
        read_node_heads(side.engine, f'node "{side.name}"') for side in (sides.source, sides.target)
    )
    if there == here:
        return []
    at = [", ".join(heads) or "base" for heads in (there, here)]
    return [
        Refusal(
            reason=f'node "{sides.target.name}" is at node revision {at[1]}, and'
            f' "{sides.source.name}" at {at[0]}',
            remedy="Bring every node to the newest: shardids migrate up",
        )
    ]


def rows_can_be_compared(sides: Sides) -> list[Refusal]:
    """Requires what reads rows on both nodes without the right to write."""
    refusals = []
    for side in (sides.source, sides.target):
        with reading_as_reader(side.engine, f'node "{side.name}"') as reader:
            if reader.skips is not None:
                refusals.append(Refusal(reason=f"rows can't be compared: {reader.skips}", remedy=HINT))
    return refusals


def children_are_inside(source: Connection, sides: Sides) -> list[Refusal]:
    """Requires partitions and inheritance children in their parents' schema: pg_dump dumps one schema."""
    return [
        Refusal(
            reason=f"table {row.child} is a partition or child of {row.parent}, in another schema",
            remedy=f"alter table {row.child} set schema …, so that both are in the shard, or detach it.",
        )
        for row in source.execute(_STRAY_CHILDREN, {"schema": sides.schema})
    ]


_STRAY_CHILDREN = text("""
    select i.inhrelid::regclass::text as child, i.inhparent::regclass::text as parent
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
    join pg_class p on p.oid = i.inhparent
    where c.relkind in ('r', 'p', 'f')
      and (c.relnamespace = to_regnamespace(:schema)) <> (p.relnamespace = to_regnamespace(:schema))
    order by 1""")


def all_can_be_moved(source: Connection, target: Connection, sides: Sides, *, offline: bool) -> list[Refusal]:
    """Requires that the shard has nothing that pg_dump of one schema omits or replication would run twice."""
    shard = {"shard": sides.shard}
    there = set(target.scalars(_ALL_TABLES))
    refusals = [
        Refusal(
            reason=f'{row.name} on node "{sides.source.name}" {row.why}, and is not moved with it',
            remedy=row.remedy,
        )
        for row in source.execute(_LEFT_OUT, shard)
        if row.published_as not in there
    ]
    refusals += [
        Refusal(
            reason=f"column {row.name} of table {row.table} may refer to large objects, which are not moved",
            remedy="Store them as bytea, or remove them.",
        )
        for row in source.execute(_LARGE_OBJECTS, shard)
    ]
    if not offline:
        refusals += [
            Refusal(
                reason=f"{row.name} is enabled for replicated rows, and would run on the target too",
                remedy=f"alter table {row.table} enable {row.kind} …; or move the shard with --offline",
            )
            for row in source.execute(_ALWAYS, shard)
        ]
        refusals += [
            Refusal(
                reason=f'role "{row.owner}" owns tables of schema {sides.schema} and lacks USAGE on it:'
                " rows can't be replicated in its name",
                remedy=f'grant usage on schema {sides.schema} to "{row.owner}"',
            )
            for row in source.execute(_OWNERS, shard)
        ]
    return refusals


_ALL_TABLES = text("select pubname::text from pg_publication where puballtables")

_LEFT_OUT = text("""
    with own as materialized (select classid, objid from shardids.objects_of(:shard))
    select 'the ' || pg_describe_object('pg_cast'::regclass, c.oid, 0) as name,
           'is of a type or function of the shard' as why, 'Drop it, or use a function instead.' as remedy,
           null as published_as
    from pg_cast c
    where exists (select from own
                  where classid = 'pg_type'::regclass and objid in (c.castsource, c.casttarget)
                  or classid = 'pg_proc'::regclass and objid = c.castfunc)
      and not exists (select from pg_depend d
                      where d.classid = 'pg_cast'::regclass and d.objid = c.oid and d.deptype = 'e')
    union all
    select format('publication %I', p.pubname), 'publishes tables of the shard',
           'Remove them from it, or create the same publication, for all tables, on the other node.',
           case when p.puballtables then p.pubname::text end
    from pg_publication p
    where not starts_with(p.pubname, 'shardids_')
      and exists (select from pg_publication_tables t
                  where t.pubname = p.pubname and t.schemaname = shardids.schema_of(:shard))
    union all
    select format('subscription %I', s.subname), 'writes to tables of the shard',
           'Drop it, and create it on the other node after the move.', null
    from pg_subscription s
    where not starts_with(s.subname, 'shardids_')
      and exists (select from pg_subscription_rel r
                  where r.srsubid = s.oid and r.srrelid = any (shardids.tables_of(:shard)))
    order by 1""")

_LARGE_OBJECTS = text("""
    select a.attname as name, a.attrelid::regclass::text as table
    from pg_attribute a join pg_type t on t.oid = a.atttypid
    where a.attrelid = any (shardids.tables_of(:shard)) and a.attnum > 0 and not a.attisdropped
      and 'oid'::regtype in (t.oid, t.typbasetype) and exists (select from pg_largeobject_metadata)
    order by 2, 1""")

_ALWAYS = text("""
    select format('trigger %s of table %s', t.tgname, t.tgrelid::regclass) as name,
           t.tgrelid::regclass::text as table, 'trigger' as kind
    from pg_trigger t
    where t.tgrelid = any (shardids.tables_of(:shard)) and t.tgenabled in ('A', 'R') and not t.tgisinternal
      and t.tgname <> 'shardids_barrier'
    union all
    select format('rule %s of table %s', r.rulename, r.ev_class::regclass), r.ev_class::regclass::text, 'rule'
    from pg_rewrite r
    where r.ev_class = any (shardids.tables_of(:shard)) and r.ev_enabled in ('A', 'R')
    order by 1""")

_OWNERS = text("""
    select distinct pg_get_userbyid(c.relowner) as owner
    from pg_class c
    where c.oid = any (shardids.tables_of(:shard))
      and not has_schema_privilege(c.relowner, c.relnamespace, 'usage')""")
