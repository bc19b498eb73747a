-- Purpose:    what an adoption has to know of tables, of the source as well as of nodes: a row for each. Nothing is installed.
-- Settings:   shardids.names: a JSON array of the tables' names with schemas, each quoted where SQL needs it.
-- Locks:      none.
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
  join pg_class c on c.oid = l.relid and c.relkind <> 'p')
select w.name,
       n.nspname::text as schema,
       c.relname::text as table,
       c.relkind::text as kind,
       c.relpersistence::text as persistence,
       exists (select from pg_inherits i join pg_class p on p.oid = i.inhparent
               where i.inhrelid = c.oid or (i.inhparent = c.oid and c.relkind <> 'p')) as is_inherited,
       pg_has_role(current_user, c.relowner, 'usage') as is_own,
       -- All that store rows, and those between them and the root: each needs a trigger.
       array(select q.relid::regclass::text from pg_partition_tree(w.oid) q
             union select w.oid::regclass::text order by 1) as parts,
       -- The columns that every part logs of a row that is updated or deleted; null: all.
       (select case when bool_and(l.relreplident = 'f') then null
                    else array(
                      select a.attname::text from pg_attribute a
                      where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                        and not exists (
                          select from leaf m
                          where m.root = w.oid and m.relreplident <> 'f'
                            and not exists (
                              select from pg_index i join pg_attribute b on b.attrelid = m.oid and b.attnum = any (i.indkey)
                              where i.indrelid = m.oid and b.attname = a.attname
                                and case m.relreplident when 'd' then i.indisprimary else i.indisreplident end)))
               end
        from leaf l where l.root = w.oid) as identity,
       exists (select from leaf l where l.root = w.oid and l.relreplident = 'f') as has_full_identity,
       exists (select from leaf l where l.root = w.oid and l.reltoastrelid <> 0) as has_toast,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod), 'not_null', a.attnotnull,
                  'labels', (select jsonb_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = a.atttypid),
                  'short_type', t.typname, 'is_generated', a.attgenerated <> '', 'is_identity', a.attidentity <> '',
                  'default', pg_get_expr(d.adbin, d.adrelid),
                  'is_deterministic', coalesce(k.collisdeterministic, true)) order by a.attnum)
         from pg_attribute a
         join pg_type t on t.oid = a.atttypid
         left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
         left join pg_collation k on k.oid = a.attcollation
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), '[]') as columns,
       array(select a.attname::text from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)
             where i.indrelid = c.oid and i.indisprimary order by array_position(i.indkey::int2[], a.attnum)) as primary_key
from wanted w
join pg_class c on c.oid = w.oid
join pg_namespace n on n.oid = c.relnamespace
order by w.name;
