"""The requirements of a move. Each function returns its reasons against the move and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, text

from shardids.catalog.revisions import read_node_heads
from shardids.catalog.shards import read_shard
from shardids.errors import MissingPrivilege, MoveRefused, ShardidsError, StatementFailed
from shardids.pg.connections import keep_out_of_logs, server_major
from shardids.pg.reader import HINT, reading_as_reader
from shardids.pg.schemas import untrusted
from shardids.replication.programs import Scripts
from shardids.replication.sides import Side, Sides
from shardids.replication.subscriptions import CAPACITY, Refusal, ending_copies, play

_ROOM_FACTOR = 1.5
"""How many times its own size a shard may need on the target, which writes its log there too."""
_SYNC_WORKERS = 2
"""How many workers copy tables beside the one that applies changes: PostgreSQL's default."""


def examine(
    sides: Sides,
    notes: list[str],
    *,
    offline: bool,
    replace_copy: bool,
    parallel: int,
    trusted: Sequence[str],
) -> list[Refusal]:
    """Return every reason against the move except those of :func:`target_takes_schema`.

    Adds to ``notes`` what could not be checked, and what stays behind.

    With ``replace_copy``, the target may have an old copy of the shard, which is replaced. ``parallel`` is
    how many moves will run at once.

    Raises:
        ConnectionFailed: a node does not answer.
    """
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        refusals = [
            *shard_is_there(sides),
            *target_is_free(target, sides, replace_copy),
            *engines_agree(source, target, sides),
            *roles_exist(source, target, sides),
            *code_is_trusted(sides, trusted),
        ]
        notes += [
            f'{dependent} on node "{sides.source.name}" depends on the shard, and stays with the old copy'
            for dependent in source.scalars(
                text("select * from shardids.dependents_of(:shard)"), {"shard": sides.shard}
            )
        ]
        if not offline:
            refusals += tables_can_be_followed(source, sides)
            refusals += replication_fits(source, target, sides, parallel)
            refusals += ending_copies(source, f'node "{sides.source.name}"')
            refusals += ending_copies(target, f'node "{sides.target.name}"', taking=True)
        return refusals + room_is_enough(source, sides, notes)


def shard_is_there(sides: Sides) -> list[Refusal]:
    """Require that the source has the shard, and that the shard issues IDs there."""
    with sides.source.engine.connect() as connection:
        there = read_shard(connection, sides.shard)
    node, shard = sides.source.name, sides.shard
    if there is None:
        return [
            Refusal(
                reason=f'node "{node}" does not have it', remedy="Restore its schema there from a backup."
            )
        ]
    activation = f"If no other copy was active meanwhile: shardids shard activate {shard}"
    if there.state == "copy":
        return [Refusal(reason=f'node "{node}" is a copy, and it was not activated there', remedy=activation)]
    if there.state == "active":
        return []
    if there.state in ("broken", "unreadable"):
        return [
            Refusal(reason=f'its sequences on node "{node}" are {there.state}', remedy="See: shardids doctor")
        ]
    return [
        Refusal(
            reason=f'it is {"moved" if there.state == "moved" else "fenced"} on node "{node}"',
            remedy=activation,
        )
    ]


def target_is_free(target: Connection, sides: Sides, replace_copy: bool) -> list[Refusal]:
    """Require that the target has nothing of the shard, or only an old copy that may be dropped."""
    row = target.execute(
        text("""
            select (select state from shardids.shard where id = :shard) as state,
                   to_regnamespace(:schema) is not null as has_schema"""),
        {"shard": sides.shard, "schema": sides.schema},
    ).one()
    node = sides.target.name
    if row.state == "moved":
        if replace_copy:
            return copy_can_go(target, sides)
        return [
            Refusal(
                reason=f'node "{node}" still has the copy that was left there when the shard was moved away',
                remedy=f"To move it back there: --back. To drop the copy: shardids shard purge {sides.shard}",
            )
        ]
    if row.state is not None:
        return [Refusal(reason=f'node "{node}" has it too, {row.state}', remedy="See shardids shard list.")]
    if row.has_schema:
        return [
            Refusal(
                reason=f'node "{node}" has a schema {sides.schema} that is not the shard\'s',
                remedy="Rename or drop it.",
            )
        ]
    return []


def copy_can_go(target: Connection, sides: Sides) -> list[Refusal]:
    """Require that dropping the old copy on the target would drop nothing outside it."""
    return [
        Refusal(
            reason=f'{dependent} on node "{sides.target.name}" would be dropped with the old copy there',
            remedy="Drop it, or let it depend on something outside of the shard's schema;"
            " an extension: ALTER EXTENSION … SET SCHEMA public.",
        )
        for dependent in target.scalars(
            text("select * from shardids.dependents_of(:shard)"), {"shard": sides.shard}
        )
    ]


_TABLES = text("select name::text from unnest(shardids.tables_of(:shard)) name")


def code_is_trusted(sides: Sides, trusted: Sequence[str]) -> list[Refusal]:
    """Require that nobody else's code runs when the tables are made and filled on the target.

    CREATE TABLE computes generated columns and partition keys, ADD FOREIGN KEY is planned over indexes, and
    before PostgreSQL 16 the subscription writes as its owner.
    """
    with sides.source.engine.connect() as connection, connection.begin():
        tables = connection.scalars(_TABLES, {"shard": sides.shard}).all()
        return [
            Refusal(reason=one.reason, remedy=one.remedy)
            for one in untrusted(connection, tables, trusted=trusted)
        ]


def require_trusted(sides: Sides, trusted: Sequence[str]) -> None:
    """Refuse what :func:`code_is_trusted` finds.

    Raises:
        MoveRefused: it finds something.
    """
    for refusal in code_is_trusted(sides, trusted):
        raise MoveRefused(f"shard {sides.shard}: {refusal.reason}", hint=refusal.remedy)


def engines_agree(source: Connection, target: Connection, sides: Sides) -> list[Refusal]:
    """Require the same revision of the engine on both nodes."""
    revision = text("select version_num from shardids.shardids_version")
    there, here = source.execute(revision).scalar(), target.execute(revision).scalar()
    if there == here:
        return []
    return [
        Refusal(
            reason=f'the engine is {there} on node "{sides.source.name}" and {here} on "{sides.target.name}"',
            remedy="Upgrade the older one first.",
        )
    ]


_ROLES = text("""
    with schema (oid) as (select to_regnamespace(:schema)),
    objects as (
      select relowner as owner, relacl as acl from pg_class where relnamespace = (table schema)
      union all
      select proowner, proacl from pg_proc where pronamespace = (table schema)
      union all
      select typowner, typacl from pg_type where typnamespace = (table schema)
      union all
      select nspowner, nspacl from pg_namespace where oid = (table schema))
    select pg_get_userbyid(owner) from objects
    union
    select pg_get_userbyid(a.grantee) from objects, aclexplode(objects.acl) a where a.grantee <> 0
    union
    select pg_get_userbyid(a.grantee)
    from pg_class c join pg_attribute t on t.attrelid = c.oid, aclexplode(t.attacl) a
    where c.relnamespace = (table schema) and a.grantee <> 0
    union
    select pg_get_userbyid(r.oid)
    from pg_class c join pg_policy p on p.polrelid = c.oid, unnest(p.polroles) r (oid)
    where c.relnamespace = (table schema) and r.oid <> 0""")


def roles_exist(source: Connection, target: Connection, sides: Sides) -> list[Refusal]:
    """Require on the target every role that owns or may use objects of the shard."""
    needed = set(source.scalars(_ROLES, {"schema": sides.schema}))
    missing = sorted(needed - set(target.scalars(text("select rolname from pg_roles"))))
    if not missing:
        return []
    names = ", ".join(f'"{name}"' for name in missing)
    return [
        Refusal(
            reason=f'node "{sides.target.name}" lacks roles that own or may use its objects: {names}',
            remedy="Create them there first.",
        )
    ]


_UNFIT_TABLES = text("""
    select c.oid::regclass::text as name, c.relpersistence = 'u' as is_unlogged
    from pg_class c
    where c.oid = any (shardids.tables_of(:shard)) and c.relkind = 'r'
      and (c.relpersistence = 'u'
           or not case c.relreplident
                  when 'f' then true
                  when 'd' then exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
                  when 'i' then exists (select from pg_index i where i.indrelid = c.oid and i.indisreplident)
                  else false end)
    order by 1""")


def tables_can_be_followed(source: Connection, sides: Sides) -> list[Refusal]:
    """Require that logical replication sees every change of every table."""
    return [
        Refusal(
            reason=f"table {row.name} is unlogged: its changes can't be followed",
            remedy=f"alter table {row.name} set logged; or move the shard with --offline",
        )
        if row.is_unlogged
        else Refusal(
            reason=f"table {row.name} has no replica identity: its updates can't be followed",
            remedy=f"Give it a primary key, or: alter table {row.name} replica identity full;"
            " or move the shard with --offline",
        )
        for row in source.execute(_UNFIT_TABLES, {"shard": sides.shard})
    ]


def replication_fits(source: Connection, target: Connection, sides: Sides, parallel: int) -> list[Refusal]:
    """Require settings, free slots and workers, and rights of the role for ``parallel`` moves at once."""
    there, here = source.execute(CAPACITY).one(), target.execute(CAPACITY).one()
    a, b = (f'node "{side.name}"' for side in (sides.source, sides.target))
    needed = parallel * (1 + _SYNC_WORKERS)
    origins = "max_active_replication_origins" if server_major(target) >= 18 else "max_replication_slots"
    refusals = [
        Refusal(
            reason=f"{where} has {max(free, 0)} free of {setting}; it takes {wanted}",
            remedy=f"Raise {setting} there and restart that server, or move fewer at once.",
        )
        for where, setting, free, wanted in (
            (a, "max_replication_slots", there.slots, needed),
            (a, "max_wal_senders", there.senders, needed),
            (b, "max_logical_replication_workers", here.workers, parallel + 1),
            (b, "max_worker_processes", here.processes, parallel + 1),
            (b, origins, here.origins, parallel + 1),
            (b, "max_sync_workers_per_subscription", here.sync_workers, 1),
        )
        if free < wanted
    ]
    if there.wal_level != "logical":
        refusals.append(
            Refusal(
                reason=f"{a} has wal_level = {there.wal_level}",
                remedy="alter system set wal_level = logical, and restart that server;"
                " or move the shard with --offline, which stops writes to it while it is copied",
            )
        )
    if not there.may_replicate:
        remedy = "alter role … replication, or use a superuser's URL."
        refusals.append(Refusal(reason=f"the role may not make replication slots on {a}", remedy=remedy))
    if not here.may_subscribe:
        remedy = "Use a superuser's URL; from version 16 on, grant pg_create_subscription does."
        refusals.append(Refusal(reason=f"the role may not subscribe on {b}", remedy=remedy))
    return refusals


def room_is_enough(source: Connection, sides: Sides, notes: list[str]) -> list[Refusal]:
    """Require room on the target's disk, as ``df`` run by the server tells: PostgreSQL itself can't."""
    node = sides.target.name
    size_bytes: int = source.execute(_SIZE, {"shard": sides.shard}).scalar_one()
    try:
        free_bytes = _free_bytes(sides.target)
    except (StatementFailed, MissingPrivilege):
        notes.append(f'room on the disk of node "{node}" is unknown: the role may not run df there')
        return []
    if free_bytes >= size_bytes * _ROOM_FACTOR:
        return []
    return [
        Refusal(
            reason=f'node "{node}" has {free_bytes >> 20} MB of room; the shard is {size_bytes >> 20} MB'
            f" and takes up to {_ROOM_FACTOR} times that",
            remedy="Make room there, or choose another node.",
        )
    ]


_SIZE = text("""
    select coalesce(sum(pg_total_relation_size(t.name)), 0)::bigint
    from unnest(shardids.tables_of(:shard)) t (name)""")


def _free_bytes(side: Side) -> int:
    with side.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("create temporary table shardids_df (line text) on commit drop"))
        connection.execute(text("copy shardids_df from program 'df -Pk .'"))
        lines = connection.execute(text("select line from shardids_df")).scalars().all()
        transaction.rollback()
    # The columns are filesystem, blocks, used, available; a block is 1024 bytes.
    return int(lines[-1].split()[3]) * 1024


def target_takes_schema(sides: Sides, scripts: Scripts, *, subscribing: bool) -> list[Refusal]:
    """Create the schema and a disabled subscription on the target, and roll both back."""
    refusals = []
    with sides.target.engine.connect() as connection, connection.begin() as transaction:
        try:
            connection.execute(text("select shardids.drop_copy(:shard)"), {"shard": sides.shard})
            play(connection, scripts.tables)
            play(connection, scripts.rest)
        except ShardidsError as error:
            remedy = (
                error.hint or "The objects that a shard uses outside of its schema must be on every node."
            )
            refusals.append(Refusal(reason=f"its schema can't be made there: {error.message}", remedy=remedy))
        transaction.rollback()
    if subscribing:
        conninfo = make_conninfo("", **sides.source.parameters())
        with sides.target.engine.connect() as connection, connection.begin() as transaction:
            try:
                keep_out_of_logs(connection)
                connection.execute(text("select shardids.try_subscribing(:conninfo)"), {"conninfo": conninfo})
            except ShardidsError as error:
                refusals.append(
                    Refusal(
                        reason=f'it can\'t connect to node "{sides.source.name}": {error.message}',
                        remedy="The source's URL in the catalog must be good on the target too, and"
                        " pg_hba.conf must let the role in.",
                    )
                )
            transaction.rollback()
    return refusals


def examine_contents(sides: Sides, *, offline: bool) -> list[Refusal]:
    """Return every reason against the move that lies in the shard's contents. Changes nothing."""
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        return [
            *node_revisions_agree(sides),
            *children_are_inside(source, sides),
            *all_can_be_moved(source, target, sides, offline=offline),
        ]


def node_revisions_agree(sides: Sides) -> list[Refusal]:
    """Require the same of the application's revisions for the node: the shard may use what they create."""
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
    """Require on both nodes a role that reads rows without the right to write."""
    refusals = []
    for side in (sides.source, sides.target):
        with reading_as_reader(side.engine, f'node "{side.name}"') as reader:
            if reader.skips is not None:
                refusals.append(Refusal(reason=f"rows can't be compared: {reader.skips}", remedy=HINT))
    return refusals


def children_are_inside(source: Connection, sides: Sides) -> list[Refusal]:
    """Require partitions and inheritance children in their parents' schema: pg_dump dumps one schema."""
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
    """Require that the shard has nothing that pg_dump of one schema omits or replication would run twice."""
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
      and t.tgname <> 'shardids_barrier' and not starts_with(t.tgname, 'shardids_key_')
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
