-- Purpose:    the tables of every shard of a node, for the query node: one row for each table and way it is defined, with
--             the shards in which it is so, null for reference tables. Old copies are among them, for a shard that is just being moved is placed
--             where it has stopped already. Nothing is installed.
-- Settings:   none
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with shard as (
  select s.id, n.oid as namespace
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  union all
  select null, n.oid from pg_namespace n where n.nspname = 'shardids_ref'),
"table" as (
  select s.id as shard, s.namespace, c.oid, c.relname::text as name
  from shard s
  join pg_class c on c.relnamespace = s.namespace and c.relkind in ('r', 'p') and not c.relispartition
  where not exists (
    select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')),
-- Columns that a shard's generator fills. Read once: for each column by itself it takes seconds.
generated as materialized (
  select f.adrelid as "table", f.adnum as number, p.pronamespace as namespace
  from pg_attrdef f
  join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid and d.refclassid = 'pg_proc'::regclass
  join pg_proc p on p.oid = d.refobjid and p.proname = 'next_id'),
"column" as (
  select t.oid, a.attnum,
         jsonb_build_object(
           'name', a.attname,
           -- The server writes types with their schema: shardids' sessions see pg_catalog alone.
           'type', case
                     when inner_type.typnamespace <> t.namespace then format_type(a.atttypid, a.atttypmod)
                     when inner_type.typtype = 'e' then null
                     when inner_type.typtype = 'd' and inner_type.oid = a.atttypid and base.typnamespace <> t.namespace
                       then format_type(inner_type.typbasetype, inner_type.typtypmod)
                   end,
           'is_cast', inner_type.typnamespace = t.namespace,
           'enum', case when inner_type.typnamespace = t.namespace and inner_type.typtype = 'e' then inner_type.typname end,
           'labels', case when inner_type.typnamespace = t.namespace and inner_type.typtype = 'e' then (
                       select jsonb_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = inner_type.oid)
                     end,
           'is_array', inner_type.oid <> a.atttypid,
           'collation', case
                          when l.oid <> case when declared.typtype = 'd' and declared.typnamespace = t.namespace
                                          then base.typcollation else declared.typcollation end
                            then format('%I.%I', l_schema.nspname, l.collname)
                        end,
           'is_own', coalesce(l.collnamespace = t.namespace, false)) as definition,
         (t.oid, a.attnum, t.namespace) in (select g."table", g.number, g.namespace from generated g) as is_id
  from "table" t
  join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped
  join pg_type declared on declared.oid = a.atttypid
  -- Arrays of such a type, too.
  join pg_type inner_type
    on inner_type.oid = case when declared.typelem <> 0 and declared.typlen = -1 then declared.typelem else declared.oid end
  left join pg_type base on base.oid = inner_type.typbasetype
  left join pg_collation l on l.oid = a.attcollation
  left join pg_namespace l_schema on l_schema.oid = l.collnamespace),
definition as (
  select t.shard, t.name, t.namespace, t.oid,
         coalesce(jsonb_agg(c.definition order by c.attnum) filter (where c.oid is not null), '[]') as columns,
         coalesce(bool_or(c.is_id), false) as has_ids
  from "table" t
  left join "column" c on c.oid = t.oid
  group by t.shard, t.name, t.namespace, t.oid)
select d.name, d.columns, d.has_ids, refers.names as refers, array_agg(d.shard order by d.shard) as shards
from definition d
cross join lateral (
  -- What a row must refer to is in the row's shard.
  select coalesce(array_agg(distinct r.relname::text), '{}') as names
  from pg_constraint k
  join pg_class r on r.oid = k.confrelid and r.relnamespace = d.namespace
  where k.conrelid = d.oid and k.contype = 'f'
    and not exists (
      select from pg_attribute a where a.attrelid = d.oid and a.attnum = any (k.conkey) and not a.attnotnull)) refers
group by d.name, d.columns, d.has_ids, refers.names
order by d.name, 5;
