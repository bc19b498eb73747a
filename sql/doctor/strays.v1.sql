-- Purpose:    what shardids doctor asks of things that are not where they belong: schemas that look like shards and are
--             none, extensions in shards, prepared transactions that were left, slots that nobody reads, revisions
--             that are not finished.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with database as (
  select oid, datname from pg_database where datname = current_database()),
shard as (
  select s.id, s.state, n.oid as namespace, n.nspname
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema)
-- With the sequences of a generator it is a shard that its node does not know: asked for elsewhere.
select 'schema' as kind, n.nspname::text as name,
       substr(n.nspname, length(shardids.schema_prefix()) + 1)::integer as shard,
       (select count(*) from pg_class c where c.relnamespace = n.oid and c.relkind in ('r', 'p'))::text as detail,
       null::float8 as age_s,
       null::bigint as kept_bytes
from pg_namespace n
where starts_with(n.nspname, shardids.schema_prefix())
  and substr(n.nspname, length(shardids.schema_prefix()) + 1) ~ '^[0-9]{4,5}$'
  and not exists (select from shardids.shard s where s.schema = n.nspname)
  and not exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'id_offset' and c.relkind = 'S')
union all
select 'extension', e.extname, s.id, case when e.extrelocatable then 'relocatable' end, null, null
from pg_extension e
join shard s on s.namespace = e.extnamespace
union all
-- A lock of a prepared transaction belongs to no process; its virtual transaction is -1 and its ID.
select 'prepared transaction', x.gid, null,
       (select string_agg(distinct l.relation::regclass::text, ', ' order by l.relation::regclass::text)
        from pg_locks l
        join pg_class c on c.oid = l.relation and c.relkind in ('r', 'p', 'm', 'S')
        where l.pid is null and l.virtualtransaction = '-1/' || x.transaction and l.database = database.oid),
       extract(epoch from clock_timestamp() - x.prepared)::float8, null
from pg_prepared_xacts x
join database on database.datname = x.database
union all
select 'slot', r.slot_name, null, r.slot_type, null,
       case when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn)::bigint end
from pg_replication_slots r, database
where not r.active and not r.temporary and r.restart_lsn is not null
  and (r.database is null or r.database = database.datname and not starts_with(r.slot_name, 'shardids_'))
union all
select 'revision', substr(d.description, length('shardids: ') + 1), s.id,
       case when exists (
         select from pg_locks l
         where l.locktype = 'advisory' and l.granted and l.database = database.oid
           and l.classid = 1936220533 and l.objid = s.id::oid and l.objsubid = 2) then 'running' end, null, null
from database
cross join shard s
join pg_class c on c.relnamespace = s.namespace and c.relkind = 'r'
join pg_description d on d.classoid = 'pg_class'::regclass and d.objoid = c.oid and d.objsubid = 0
where s.state = 'active' and starts_with(d.description, 'shardids: ')
order by 1, 2, 3;
