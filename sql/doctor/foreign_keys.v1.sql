-- Purpose:    what shardids doctor asks of foreign keys: columns too narrow for the IDs that they refer to, and
--             keys that refer to another schema; shards that are alike in one row.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with shard as (
  select s.id, n.oid as namespace
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  where s.state <> 'moved')
select c.relname::text as table_name,
       a.attname::text as column_name,
       format_type(a.atttypid, null) as type,
       target.relname::text as target_table,
       target_column.attname::text as target_column,
       format_type(target_column.atttypid, null) as target_type,
       case when target.relnamespace <> shard.namespace and target.relnamespace is distinct from to_regnamespace('shardids_ref')::oid then target.relnamespace::regnamespace::text end as target_schema,
       array_agg(shard.id order by shard.id) as shards
from shard
join pg_class c on c.relnamespace = shard.namespace and not c.relispartition
join pg_constraint k on k.conrelid = c.oid and k.contype = 'f'
join pg_class target on target.oid = k.confrelid
cross join lateral unnest(k.conkey, k.confkey) as pair (own, theirs)
join pg_attribute a on a.attrelid = c.oid and a.attnum = pair.own
join pg_attribute target_column on target_column.attrelid = target.oid and target_column.attnum = pair.theirs
where target.relnamespace <> shard.namespace and target.relnamespace is distinct from to_regnamespace('shardids_ref')::oid
   or a.atttypid in ('int4'::regtype, 'int2'::regtype) and target_column.atttypid = 'int8'::regtype
group by 1, 2, 3, 4, 5, 6, 7
order by 1, 2;
