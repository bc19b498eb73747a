-- Purpose:    the columns of a database that sequences number: identity columns, columns whose default is a
--             nextval, and primary keys of one integer column that nothing numbers. With each, its sequence.
-- Settings:   shardids.schemas, names of schemas, divided by commas; all but the system's if it is not set.
-- Locks:      none beyond those of SELECT.
-- Privileges: none.

with looked_at as (
  select n.oid, n.nspname
  from pg_namespace n
  where case
    when nullif(current_setting('shardids.schemas', true), '') is null
      then n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    else n.nspname = any (string_to_array(current_setting('shardids.schemas', true), ','))
  end
), numbered as (
  -- Identity columns own their sequence by an internal dependency.
  select d.refobjid as table_oid, d.refobjsubid::smallint as attnum, d.objid as sequence_oid
  from pg_depend d join pg_class s on s.oid = d.objid and s.relkind = 'S'
  where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i'
  union
  -- A default depends on the sequence that it names.
  select a.adrelid, a.adnum, d.refobjid
  from pg_attrdef a
  join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = a.oid and d.refclassid = 'pg_class'::regclass
  join pg_class s on s.oid = d.refobjid and s.relkind = 'S'
), integer_keys as (
  select i.indrelid as table_oid, i.indkey[0] as attnum
  from pg_index i
  join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
  where i.indisprimary and i.indnkeyatts = 1
    and a.atttypid in ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype)
)
select l.nspname as schema, c.relname as table, a.attname as column,
       sn.nspname as sequence_schema, sc.relname as sequence,
       s.seqincrement as increment, s.seqmax as maximum, s.seqcycle as cycles,
       (case when a.atttypid = 'smallint'::regtype or s.seqtypid = 'smallint'::regtype then 32767
             when a.atttypid = 'integer'::regtype or s.seqtypid = 'integer'::regtype then 2147483647
             else 9223372036854775807 end)::bigint as type_limit
from (select table_oid, attnum from numbered union select table_oid, attnum from integer_keys) k
join pg_class c on c.oid = k.table_oid and c.relkind in ('r', 'p') and not c.relispartition
join looked_at l on l.oid = c.relnamespace
join pg_attribute a on a.attrelid = k.table_oid and a.attnum = k.attnum
left join numbered n on n.table_oid = k.table_oid and n.attnum = k.attnum
left join pg_sequence s on s.seqrelid = n.sequence_oid
left join pg_class sc on sc.oid = n.sequence_oid
left join pg_namespace sn on sn.oid = sc.relnamespace
order by 1, 2, a.attnum, 5;
