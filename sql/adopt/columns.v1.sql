-- Purpose:    what shardids adopt plan asks of columns: types, and what fills them. builtin_type is the type's name in
--             pg_catalog, null for domains, enums, arrays and types of extensions; sequences are what the default or the
--             identity draws from; default is its expression, with the schemas of all but PostgreSQL's own.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

with sequence as (
  -- Of an identity: the sequence depends on the column. Of a default: the default depends on the sequence.
  select d.refobjid as relation, d.refobjsubid as number, d.objid as sequence
  from pg_depend d
  where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i' and d.refobjsubid > 0
  union all
  select f.adrelid, f.adnum, d.refobjid
  from pg_attrdef f
  join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid and d.refclassid = 'pg_class'::regclass
  join pg_class s on s.oid = d.refobjid and s.relkind = 'S'),
drawn as (
  select q.relation, q.number, min(format('%I.%I', n.nspname, c.relname)) as sequence
  from sequence q
  join pg_class c on c.oid = q.sequence and c.relkind = 'S'
  join pg_namespace n on n.oid = c.relnamespace
  group by q.relation, q.number)
select a.attrelid::bigint as table_oid,
       a.attname::text as name,
       format_type(a.atttypid, a.atttypmod) as type,
       case when t.typtype = 'b' and t.typnamespace = 'pg_catalog'::regnamespace and t.typcategory <> 'A'
            then t.typname::text end as builtin_type,
       a.attnotnull as not_null,
       a.attgenerated::text as generated,
       coalesce(l.collisdeterministic, true) as is_deterministic,
       array_remove(array[drawn.sequence], null) as sequences,
       pg_get_expr(d.adbin, d.adrelid) as default
from pg_attribute a
join pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p', 'f') and not c.relispartition
join pg_namespace n on n.oid = c.relnamespace and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
join pg_type t on t.oid = a.atttypid
left join pg_collation l on l.oid = a.attcollation
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
left join drawn on drawn.relation = a.attrelid and drawn.number = a.attnum
where a.attnum > 0 and not a.attisdropped
order by a.attrelid, a.attnum;
