-- Purpose:    how tables are defined: a row for each, its parts as JSON. What is of a partition alone is left out.
-- Settings:   shardids.names: a JSON array of the tables' names with schemas, each quoted where SQL needs it.
--             shardids.is_whole: true for all that is needed to make tables like them; otherwise for what rows and changes need.
-- Locks:      of whole definitions each table for the moment of reading its constraints and indexes: ACCESS SHARE.
-- Privileges: none.

with wanted as (
  select n.name, to_regclass(n.name) as oid from jsonb_array_elements_text(current_setting('shardids.names')::jsonb) n (name)),
leaf as (
  select w.oid as root, c.*
  from wanted w
  cross join lateral (
    select p.relid from pg_partition_tree(w.oid) p where p.isleaf
    union
    select w.oid) l
  join pg_class c on c.oid = l.relid and c.relkind <> 'p'),
-- All that logs changed rows, and a partitioned table, whose own identity is announced to those that take in its changes.
member as (
  select l.root, l.oid, l.relreplident from leaf l
  union all
  select c.oid, c.oid, c.relreplident from wanted w join pg_class c on c.oid = w.oid and c.relkind = 'p'),
-- Indexes that replication finds a changed row by, and not the columns that one only includes.
finding as (
  select m.oid as relation, i.indisprimary, i.indisreplident,
         array(select a.attname::text from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) with ordinality k (number, place)
               join pg_attribute a on a.attrelid = m.oid and a.attnum = k.number
               order by k.place) as columns
  from member m
  join pg_index i on i.indrelid = m.oid and i.indisunique and i.indimmediate and i.indisvalid and i.indpred is null
    and i.indexprs is null),
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
       n.nspname::text as schema,
       c.relname::text as table,
       quote_ident(n.nspname) as schema_sql,
       quote_ident(c.relname) as table_sql,
       c.relkind::text as kind,
       -- That of a table one of whose partitions is unlogged is u.
       coalesce((select max(l.relpersistence::text) from leaf l where l.root = w.oid), c.relpersistence::text) as persistence,
       exists (select from leaf l where l.root = w.oid and l.relkind = 'f') as has_foreign_parts,
       exists (select from pg_inherits i join pg_class p on p.oid = i.inhparent
               where i.inhrelid = c.oid or (i.inhparent = c.oid and c.relkind <> 'p')) as is_inherited,
       pg_has_role(current_user, c.relowner, 'usage')
         and not exists (select from pg_partition_tree(w.oid) q join pg_class p on p.oid = q.relid
                         where not pg_has_role(current_user, p.relowner, 'usage')) as is_own,
       row_security_active(c.oid) as hides_rows,
       array(select distinct quote_ident(s.subname) from pg_subscription_rel r join pg_subscription s on s.oid = r.srsubid
             where r.srrelid = w.oid or r.srrelid in (select q.relid from pg_partition_tree(w.oid) q) order by 1) as subscriptions,
       -- All that store rows, and those between them and the root: each needs a trigger.
       array(select q.relid::regclass::text from pg_partition_tree(w.oid) q
             union select w.oid::regclass::text order by 1) as parts,
       array(select q.relid::bigint from pg_partition_tree(w.oid) q union select w.oid::bigint order by 1) as oids,
       -- A column's row in the catalogs is another once its values were computed anew; a partition's file is once it was
       -- truncated or written anew, its row of pg_inherits once it was detached and attached again.
       md5(concat_ws(' ',
         (select string_agg(a.xmin::text, ',' order by a.attnum)
          from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
         (select string_agg(format('%s/%s/%s', q.relid::oid, p.relfilenode, h.xmin), ',' order by q.relid)
          from pg_partition_tree(w.oid) q
          join pg_class p on p.oid = q.relid
          join pg_inherits h on h.inhrelid = q.relid
          where q.level > 0))) as storage_version,
       -- Without a key of the whole table, rows of two partitions may be the same in the columns that both log.
       case when c.relkind = 'p' and logged.columns is not null
                 and not exists (select from finding f where f.relation = c.oid and f.columns <@ logged.columns)
            then '{}' else logged.columns end as identity,
       (select quote_ident(x.relname) from pg_index i join pg_class x on x.oid = i.indexrelid
        where i.indrelid = c.oid and i.indisreplident) as identity_index,
       exists (select from leaf l where l.root = w.oid and l.relreplident = 'f') as has_full_identity,
       coalesce((select f.columns from finding f where f.relation = c.oid and f.indisprimary), '{}') as primary_key,
       exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and not i.indimmediate) as has_deferrable_key,
       c.relrowsecurity as has_row_security,
       obj_description(c.oid, 'pg_class') as comment,
       coalesce(c.reloptions, '{}') as options,
       (select coalesce(jsonb_agg(jsonb_build_object(
                 'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod), 'short_type', t.typname,
                 'builtin_type', case when t.typtype = 'b' and t.typnamespace = 'pg_catalog'::regnamespace and t.typcategory <> 'A'
                                      then t.typname end,
                 'labels', (select jsonb_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = a.atttypid),
                 'not_null', a.attnotnull, 'generated', a.attgenerated, 'is_identity', a.attidentity <> '',
                 'default', pg_get_expr(d.adbin, d.adrelid), 'is_deterministic', coalesce(l.collisdeterministic, true),
                 'set_null_by', (select min(k.conname) from pg_constraint k where k.conrelid = c.oid and k.contype = 'f'
                                 and k.confdeltype = 'n' and a.attnum = any (k.conkey)))
               || case when not whole.is_so then '{}' else jsonb_build_object(
                 'sql', quote_ident(a.attname),
                 -- From version 18 on, a NOT NULL may hold for new rows only.
                 'never_null', a.attnotnull and not exists (
                   select from pg_constraint k where k.conrelid = c.oid and k.contype = 'n' and k.conkey = array[a.attnum]
                     and not k.convalidated),
                 'sequences', coalesce((
                   select jsonb_agg(format('%I.%I', sn.nspname, s.relname) order by s.oid)
                   from drawn join pg_class s on s.oid = drawn.sequence join pg_namespace sn on sn.oid = s.relnamespace
                   where drawn.relation = c.oid and drawn.number = a.attnum), '[]'),
                 'collation', case when a.attcollation <> t.typcollation then a.attcollation::regcollation::text end,
                 'storage', case when a.attstorage <> t.typstorage then
                   case a.attstorage when 'p' then 'plain' when 'e' then 'external' when 'm' then 'main' else 'extended' end end,
                 'compression', case a.attcompression when 'p' then 'pglz' when 'l' then 'lz4' end,
                 'statistics', nullif(a.attstattarget, -1),
                 'comment', col_description(c.oid, a.attnum)) end order by a.attnum), '[]')
        from pg_attribute a
        join pg_type t on t.oid = a.atttypid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        left join pg_collation l on l.oid = a.attcollation
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as columns,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'name', quote_ident(k.conname), 'kind', k.contype, 'definition', pg_get_constraintdef(k.oid), 'is_valid', k.convalidated,
                  'columns', coalesce((select jsonb_agg(a.attname order by p.place)
                              from unnest(k.conkey) with ordinality p (number, place)
                              join pg_attribute a on a.attrelid = k.conrelid and a.attnum = p.number), '[]'),
                  'referenced', (select format('%I.%I', fn.nspname, f.relname) from pg_class f
                                 join pg_namespace fn on fn.oid = f.relnamespace where f.oid = k.confrelid),
                  'referenced_columns', coalesce((select jsonb_agg(a.attname order by p.place)
                                         from unnest(k.confkey) with ordinality p (number, place)
                                         join pg_attribute a on a.attrelid = k.confrelid and a.attnum = p.number), '[]'),
                  'comment', obj_description(k.oid, 'pg_constraint')) order by k.contype <> 'p', k.conname)
         from pg_constraint k
         where whole.is_so and k.conrelid = c.oid and k.conparentid = 0 and k.contype in ('p', 'u', 'c', 'x', 'f')), '[]') as constraints,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'name', quote_ident(x.relname), 'definition', pg_get_indexdef(i.indexrelid), 'is_valid', i.indisvalid and i.indisready,
                  'comment', obj_description(i.indexrelid, 'pg_class')) order by x.relname)
         from pg_index i
         join pg_class x on x.oid = i.indexrelid
         where whole.is_so and i.indrelid = c.oid
           and not exists (select from pg_constraint k where k.conindid = i.indexrelid and k.contype in ('p', 'u', 'x'))), '[]')
         as indexes,
       coalesce((select g.list from grants g where whole.is_so and g.relation = c.oid), '[]') as grants,
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
         from (select distinct drawn.sequence from drawn where whole.is_so and drawn.relation = c.oid) o
         join pg_sequence s on s.seqrelid = o.sequence
         join pg_class sc on sc.oid = o.sequence
         join pg_namespace sn on sn.oid = sc.relnamespace), '[]') as sequences
from wanted w
cross join (select current_setting('shardids.is_whole')::boolean) whole (is_so)
join pg_class c on c.oid = w.oid
join pg_namespace n on n.oid = c.relnamespace
cross join lateral (
  -- The columns that the table and every part log of a row that is updated or deleted; null: all.
  select case when bool_and(m.relreplident = 'f') then null
              else array(
                select a.attname::text from pg_attribute a
                where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                  and not exists (
                    select from member o
                    where o.root = w.oid and o.relreplident <> 'f'
                      and not exists (
                        select from finding f
                        where f.relation = o.oid and a.attname = any (f.columns)
                          and case o.relreplident when 'd' then f.indisprimary else f.indisreplident end)))
         end as columns
  from member m where m.root = w.oid) logged
order by w.name;
