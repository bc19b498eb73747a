-- Purpose:    the sequences that columns draw from, by default or as their identity: a row for each, with its last number,
--             null if it was never drawn, or the role may not read it.
-- Settings:   shardids.names: a JSON array of the tables' names with schemas, each quoted where SQL needs it.
-- Locks:      each sequence for the moment of reading it: ACCESS SHARE.
-- Privileges: none; to know the last numbers USAGE or SELECT on the sequences.

with wanted as (
  select n.name, to_regclass(n.name) as oid from jsonb_array_elements_text(current_setting('shardids.names')::jsonb) n (name)),
drawn as (
  select d.refobjid as relation, d.refobjsubid as number, d.objid as sequence
  from pg_depend d
  where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i' and d.refobjsubid > 0
  union
  select f.adrelid, f.adnum, d.refobjid
  from pg_attrdef f
  join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid and d.refclassid = 'pg_class'::regclass)
select w.name,
       a.attname::text as column,
       format('%I.%I', n.nspname, c.relname) as sequence,
       c.oid::bigint as oid,
       s.seqincrement as increment,
       has_sequence_privilege(s.seqrelid, 'usage') or has_sequence_privilege(s.seqrelid, 'select') as is_readable,
       case when has_sequence_privilege(s.seqrelid, 'usage') or has_sequence_privilege(s.seqrelid, 'select')
            then pg_sequence_last_value(s.seqrelid) end as last
from wanted w
join drawn on drawn.relation = w.oid
join pg_attribute a on a.attrelid = w.oid and a.attnum = drawn.number
join pg_sequence s on s.seqrelid = drawn.sequence
join pg_class c on c.oid = s.seqrelid
join pg_namespace n on n.oid = c.relnamespace
order by 1, 2, 3;
