-- Purpose:    what the shards of a node have recorded of the revisions that they ran, and what the node has (shards is
--             null): the comment of the version table's column, without its first word. Nothing is installed.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with version_table as (
  select s.id as shard, c.oid
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  join pg_class c on c.relnamespace = n.oid and c.relname = 'alembic_version' and c.relkind = 'r'
  where s.state <> 'moved'
  union all
  select null, to_regclass('public.alembic_node_version'))
select substr(d.description, length('shardids: ') + 1) as hashes,
       array_agg(v.shard order by v.shard) filter (where v.shard is not null) as shards
from version_table v
join pg_attribute a on a.attrelid = v.oid and a.attname = 'version_num'
join pg_description d on d.classoid = 'pg_class'::regclass and d.objoid = v.oid and d.objsubid = a.attnum
where starts_with(d.description, 'shardids: ')
group by v.shard is null, 1;
