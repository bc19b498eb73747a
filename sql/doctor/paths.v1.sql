-- Purpose:    what shardids doctor asks of search_path: settings of roles and of the database, and objects that hide
--             those of the shards from a session that does not name the schema.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with setting as (
  select r.rolname::text as role, r.rolcanlogin, substr(c.value, length('search_path=') + 1) as path,
         coalesce(d.datname, '')::text as database
  from pg_db_role_setting s
  left join pg_database d on d.oid = s.setdatabase
  cross join lateral unnest(s.setconfig) c (value)
  left join pg_roles r on r.oid = s.setrole
  where s.setdatabase in (0, (select oid from pg_database where datname = current_database()))
    and starts_with(c.value, 'search_path=')),
front as (
  select n.oid, n.nspname
  from pg_namespace n
  where (n.nspname = 'public'
         or exists (select from pg_roles r where r.rolname = n.nspname and r.rolcanlogin)
         or exists (select from setting s, regexp_split_to_table(s.path, '\s*,\s*') part
                    where part in (n.nspname, quote_ident(n.nspname))))
    and n.nspname <> 'pg_catalog'
    and not exists (select from shardids.shard s where s.schema = n.nspname)),
shard as (
  select s.id, n.oid as namespace
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  where s.state <> 'moved')
-- A path that leads into a shard.
select 'setting' as kind, coalesce(s.role, '') as name, s.path, s.database, array_agg(sh.id order by sh.id) as shards
from setting s
join shardids.shard sh on sh.schema in (select trim(both '"' from part) from regexp_split_to_table(s.path, '\s*,\s*') part)
group by s.role, s.path, s.database
union all
-- A table in front of the shards' own.
select 'table', format('%I.%I', f.nspname, c.relname), null, '', array_agg(s.id order by s.id)
from front f
join pg_class c on c.relnamespace = f.oid and c.relkind in ('r', 'p', 'v', 'm', 'f')
join pg_class own on own.relname = c.relname and own.relkind in ('r', 'p')
join shard s on s.namespace = own.relnamespace
where c.relname not in ('shardids_version', 'shardids_load', 'alembic_version') and c.relname not like 'shardids\_lookup\_%'
group by f.nspname, c.relname
union all
select 'function', format('%I.%s(%s)', f.nspname, p.proname, pg_get_function_identity_arguments(p.oid)), null, '', '{}'
from front f
join pg_proc p on p.pronamespace = f.oid and p.proname in ('next_id', 'next_ids')
order by 1, 2;
