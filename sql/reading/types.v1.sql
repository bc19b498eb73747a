-- Purpose:    the enums and domains of columns, those that others are made of first. What belongs to extensions is left out.
-- Settings:   shardids.names: a JSON array of the tables' names with schemas, each quoted where SQL needs it.
-- Locks:      none.
-- Privileges: none.

with recursive used as (
  select a.atttypid as oid, 0 as depth
  from jsonb_array_elements_text(current_setting('shardids.names')::jsonb) n (name)
  join pg_attribute a on a.attrelid = to_regclass(n.name) and a.attnum > 0 and not a.attisdropped
  union
  select next.oid, used.depth + 1
  from used
  join pg_type t on t.oid = used.oid
  cross join lateral (values (t.typelem), (t.typbasetype)) next (oid)
  where next.oid <> 0 and (t.typbasetype <> 0 or t.typcategory = 'A'))
select format('%I.%I', n.nspname, t.typname) as name,
       quote_ident(n.nspname) as schema,
       t.typtype::text as kind,
       array(select e.enumlabel::text from pg_enum e where e.enumtypid = t.oid order by e.enumsortorder) as labels,
       format_type(t.typbasetype, t.typtypmod) as base,
       t.typnotnull as not_null,
       pg_get_expr(t.typdefaultbin, 'pg_type'::regclass) as default,
       case when t.typtype = 'd' and t.typcollation <> b.typcollation then t.typcollation::regcollation::text end as collation,
       array(select format('constraint %I %s', k.conname, pg_get_constraintdef(k.oid)) from pg_constraint k
             where k.contypid = t.oid and k.contype = 'c' and k.convalidated order by k.conname) as checks,
       obj_description(t.oid, 'pg_type') as comment
from (select oid, max(depth) as depth from used group by oid) u
join pg_type t on t.oid = u.oid and t.typtype in ('e', 'd')
join pg_namespace n on n.oid = t.typnamespace and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
left join pg_type b on b.oid = t.typbasetype
where not exists (
  select from pg_depend d where d.classid = 'pg_type'::regclass and d.objid = t.oid and d.deptype = 'e')
order by u.depth desc, 1;
