-- Purpose:    what shardids shard reset-clock asks of a node: columns that may hold IDs of a shard, with their schemas and
--             tables: those that the shard's next_id() fills; on the node also keys of other shards and of reference tables, and
--             foreign keys that are indexed. Nothing is installed.
-- Settings:   shardids.of_shard: the shard
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables. Tables that may not be read are left out.

with held as (
  select n.oid as namespace, s.id = current_setting('shardids.of_shard')::integer as is_own
  from shardids.shard s join pg_namespace n on n.nspname = s.schema
  union all
  select to_regnamespace('shardids_ref'), false)
select c.relnamespace::regnamespace::text as schema, c.relname::text as table_name, a.attname::text as column_name,
       quote_ident((select n.nspname from pg_namespace n where n.oid = c.relnamespace)) || '.' || quote_ident(c.relname) as relation,
       quote_ident(a.attname) as column
from held
join pg_class c on c.relnamespace = held.namespace and c.relkind in ('r', 'p') and not c.relispartition
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.atttypid = 'int8'::regtype
where has_column_privilege(c.oid, a.attnum, 'select')
  and (held.is_own and exists (
         select from pg_attrdef d
         join pg_depend x on x.classid = 'pg_attrdef'::regclass and x.objid = d.oid and x.refclassid = 'pg_proc'::regclass
         join pg_proc p on p.oid = x.refobjid and p.proname = 'next_id' and p.pronamespace = held.namespace
         where d.adrelid = c.oid and d.adnum = a.attnum)
       or exists (
         select from pg_constraint k join pg_index i on i.indrelid = c.oid and i.indkey[0] = a.attnum and i.indisvalid and i.indpred is null
         where k.conrelid = c.oid and k.contype in ('p', 'f') and a.attnum = any (k.conkey)))
order by held.is_own desc, 1, 2, 3;
