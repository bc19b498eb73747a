-- Purpose:    what shardids adopt plan asks of tables: those of applications, partitioned ones as a whole, with sizes,
--             estimated rows and whether the role may read all of their rows. Temporary tables and those of extensions
--             are left out.
-- Locks:      each table and index for the moment of measuring it: ACCESS SHARE.
-- Privileges: none.

with recursive application as (
  select c.*, n.nspname
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace
  where c.relkind in ('r', 'p', 'f') and c.relpersistence <> 't' and not c.relispartition
    and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    and not exists (
      select from pg_depend d
      where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.objsubid = 0 and d.deptype = 'e')),
tree as (
  select oid as top, oid as part, relkind from application
  union all
  select tree.top, c.oid, c.relkind
  from tree
  join pg_inherits i on i.inhparent = tree.part
  join pg_class c on c.oid = i.inhrelid and c.relispartition),
measured as (
  select tree.top, c.oid, c.relkind, c.relpages, c.reltuples,
         coalesce(pg_relation_size(c.oid), 0) as heap_bytes,
         coalesce(pg_total_relation_size(c.oid), 0) as size_bytes,
         pg_stat_get_live_tuples(c.oid) as live,
         pg_stat_get_tuples_inserted(c.oid) as inserted,
         pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid)
           as written,
         current_setting('block_size')::bigint as block_bytes
  from tree
  join pg_class c on c.oid = tree.part and c.relkind in ('r', 'f')),
summed as (
  select top, count(*) as parts, sum(heap_bytes)::bigint as heap_bytes, sum(size_bytes)::bigint as size_bytes,
         -- As the planner does; of a table that was never analyzed, its counters or a row of 100 bytes.
         sum(case when reltuples >= 0 and relpages > 0 then reltuples / relpages * (heap_bytes / block_bytes)
                  else greatest(live, heap_bytes / 100) end)::bigint as rows,
         sum(inserted)::bigint as inserted, sum(written)::bigint as written
  from measured
  group by top)
select c.oid::bigint as oid,
       c.nspname::text as schema,
       c.relname::text as name,
       format('%I.%I', c.nspname, c.relname) as sql,
       c.relkind::text as relkind,
       coalesce(s.parts, 0) as parts,
       coalesce(s.heap_bytes, 0) as heap_bytes,
       coalesce(s.size_bytes, 0) as size_bytes,
       coalesce(s.rows, 0) as rows,
       coalesce(s.inserted, 0) as inserted,
       coalesce(s.written, 0) as written,
       coalesce(has_schema_privilege(c.relnamespace, 'usage') and has_table_privilege(c.oid, 'select')
                and not row_security_active(c.oid), false) as is_readable,
       has_schema_privilege(c.relnamespace, 'usage') as is_usable
from application c
left join summed s on s.top = c.oid
order by c.nspname, c.relname;
