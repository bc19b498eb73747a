-- Purpose:    how tables are made, for tables like them elsewhere: a row for each, its parts as JSON. What is of a partition
--             alone is left out.
-- Settings:   shardids.names: a JSON array of the tables' names with schemas, each quoted where SQL needs it.
-- Locks:      each table for the moment of reading its constraints and indexes: ACCESS SHARE.
-- Privileges: none.

with wanted as (
  select n.name, to_regclass(n.name) as oid from jsonb_array_elements_text(current_setting('shardids.names')::jsonb) n (name)),
drawn as (
  -- Of an identity: the sequence depends on the column. Of a default: the default depends on the sequence.
  select d.refobjid as relation, d.refobjsubid as number, d.objid as sequence
  from pg_depend d
  join pg_class s on s.oid = d.objid and s.relkind = 'S'
  where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i' and d.refobjsubid > 0
  union
  select f.adrelid, f.adnum, d.refobjid
  from pg_attrdef f
  join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid and d.refclassid = 'pg_class'::regclass
  join pg_class s on s.oid = d.refobjid and s.relkind = 'S'),
granted as (
  select c.oid as relation, null::name as column, a.grantee, a.privilege_type, a.is_grantable
  from pg_class c cross join lateral aclexplode(c.relacl) a
  where a.grantee <> c.relowner
  union all
  select c.oid, t.attname, a.grantee, a.privilege_type, a.is_grantable
  from pg_class c
  join pg_attribute t on t.attrelid = c.oid and t.attnum > 0 and not t.attisdropped
  cross join lateral aclexplode(t.attacl) a
  where a.grantee <> c.relowner),
grants as (
  select g.relation,
         jsonb_agg(jsonb_build_object(
           'role', case when g.grantee <> 0 then quote_ident(pg_get_userbyid(g.grantee)) end, 'privilege', g.privilege_type,
           'column', quote_ident(g.column), 'may_grant', g.is_grantable) order by g.grantee, g.privilege_type, g.column) as list
  from granted g
  group by g.relation)
select w.name,
       quote_ident(n.nspname) as schema,
       quote_ident(c.relname) as table,
       obj_description(c.oid, 'pg_class') as comment,
       coalesce(c.reloptions, '{}') as options,
       c.relrowsecurity as has_row_security,
       c.relkind = 'p' as is_partitioned,
       (select coalesce(jsonb_agg(jsonb_build_object(
                 'name', a.attname, 'sql', quote_ident(a.attname), 'type', format_type(a.atttypid, a.atttypmod),
                 'is_narrow', a.atttypid in ('int2'::regtype, 'int4'::regtype),
                 -- From version 18 on, a NOT NULL may hold for new rows only.
                 'not_null', a.attnotnull and not exists (
                   select from pg_constraint k where k.conrelid = c.oid and k.contype = 'n' and k.conkey = array[a.attnum]
                     and not k.convalidated),
                 'default', pg_get_expr(d.adbin, d.adrelid),
                 'generated', a.attgenerated, 'is_identity', a.attidentity <> '',
                 'sequences', coalesce((
                   select jsonb_agg(format('%I.%I', sn.nspname, s.relname) order by s.oid)
                   from drawn join pg_class s on s.oid = drawn.sequence join pg_namespace sn on sn.oid = s.relnamespace
                   where drawn.relation = c.oid and drawn.number = a.attnum), '[]'),
                 'collation', case when a.attcollation <> t.typcollation then a.attcollation::regcollation::text end,
                 'storage', case when a.attstorage <> t.typstorage then
                   case a.attstorage when 'p' then 'plain' when 'e' then 'external' when 'm' then 'main' else 'extended' end end,
                 'compression', case a.attcompression when 'p' then 'pglz' when 'l' then 'lz4' end,
                 'statistics', nullif(a.attstattarget, -1),
                 'comment', col_description(c.oid, a.attnum)) order by a.attnum), '[]')
        from pg_attribute a
        join pg_type t on t.oid = a.atttypid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as columns,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'name', quote_ident(k.conname), 'kind', k.contype, 'definition', pg_get_constraintdef(k.oid), 'is_valid', k.convalidated,
                  'columns', (select jsonb_agg(a.attname order by p.place)
                              from unnest(k.conkey) with ordinality p (number, place)
                              join pg_attribute a on a.attrelid = k.conrelid and a.attnum = p.number),
                  'referenced', (select format('%I.%I', fn.nspname, f.relname) from pg_class f
                                 join pg_namespace fn on fn.oid = f.relnamespace where f.oid = k.confrelid),
                  'referenced_columns', (select jsonb_agg(a.attname order by p.place)
                                         from unnest(k.confkey) with ordinality p (number, place)
                                         join pg_attribute a on a.attrelid = k.confrelid and a.attnum = p.number),
                  'comment', obj_description(k.oid, 'pg_constraint')) order by k.contype <> 'p', k.conname)
         from pg_constraint k
         where k.conrelid = c.oid and k.conparentid = 0 and k.contype in ('p', 'u', 'c', 'x', 'f')), '[]') as constraints,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'name', quote_ident(x.relname), 'definition', pg_get_indexdef(i.indexrelid), 'is_valid', i.indisvalid and i.indisready,
                  'comment', obj_description(i.indexrelid, 'pg_class')) order by x.relname)
         from pg_index i
         join pg_class x on x.oid = i.indexrelid
         where i.indrelid = c.oid
           and not exists (select from pg_constraint k where k.conindid = i.indexrelid and k.contype in ('p', 'u', 'x'))), '[]')
         as indexes,
       coalesce((select g.list from grants g where g.relation = c.oid), '[]') as grants,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'schema', quote_ident(sn.nspname), 'name', quote_ident(sc.relname), 'type', format_type(s.seqtypid, null),
                  'start', s.seqstart, 'increment', s.seqincrement, 'least', s.seqmin, 'greatest', s.seqmax,
                  'cache', s.seqcache, 'cycles', s.seqcycle, 'comment', obj_description(sc.oid, 'pg_class'),
                  'owner', (select a.attname from pg_depend d
                            join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
                            where d.classid = 'pg_class'::regclass and d.objid = sc.oid and d.refobjid = c.oid
                              and d.deptype in ('a', 'i')),
                  'grants', coalesce((select g.list from grants g where g.relation = sc.oid), '[]')) order by sc.relname)
         from (select distinct drawn.sequence from drawn where drawn.relation = c.oid) o
         join pg_sequence s on s.seqrelid = o.sequence
         join pg_class sc on sc.oid = o.sequence
         join pg_namespace sn on sn.oid = sc.relnamespace), '[]') as sequences
from wanted w
join pg_class c on c.oid = w.oid
join pg_namespace n on n.oid = c.relnamespace
order by w.name;
