-- Purpose:    what shardids doctor asks of keys: the integer primary keys of the shards' tables, and all columns
--             that some next_id() fills, with what fills them; shards that are alike in one row.
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
       case when drawn.oid is not null then case when drawn.namespace = shard.namespace then 'own' else 'foreign' end
            when a.attidentity <> '' or pg_get_expr(d.adbin, d.adrelid) like 'nextval(%' then 'sequence'
            when d.oid is not null then 'other'
            else 'none' end as filled_by,
       case when drawn.namespace <> shard.namespace then drawn.namespace::regnamespace::text end as filled_from,
       key.oid is not null as is_primary_key,
       exists (select from pg_constraint k where k.conrelid = c.oid and k.contype = 'f' and a.attnum = any (k.conkey))
         as is_foreign_key,
       array_agg(shard.id order by shard.id) as shards,
       array_agg(c.relpages order by shard.id) as pages
from shard
join pg_class c on c.relnamespace = shard.namespace and c.relkind in ('r', 'p') and not c.relispartition
  and c.relname not in ('shardids_version', 'shardids_load', 'alembic_version') and c.relname not like 'shardids\_lookup\_%'
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
left join pg_constraint key on key.conrelid = c.oid and key.contype = 'p' and key.conkey = array[a.attnum]
left join lateral (
  select p.oid, p.pronamespace as namespace
  from pg_depend x
  join pg_proc p on p.oid = x.refobjid and p.proname = 'next_id'
  where x.classid = 'pg_attrdef'::regclass and x.objid = d.oid and x.refclassid = 'pg_proc'::regclass
  limit 1) drawn on true
where drawn.oid is not null
   or key.oid is not null and a.atttypid in ('int8'::regtype, 'int4'::regtype, 'int2'::regtype)
group by 1, 2, 3, 4, 5, 6, 7
order by 1, 2;
