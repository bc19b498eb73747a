-- Purpose:    what shardids doctor asks of a sharding key: which shards have the column, of which type, how many
--             pages its table has, and which column it refers to.
-- Settings:   shardids.table_name, shardids.column_name
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables. Columns that may not be read are left out.

select s.id as shard, format_type(a.atttypid, null) as type, t.typtype = 'e' as is_enum,
       coalesce(l.collisdeterministic, true) as is_deterministic, c.relpages as pages,
       r.relname as refers_to, r.attname as referred
from shardids.shard s
join pg_namespace n on n.nspname = s.schema
join pg_class c on c.relnamespace = n.oid and c.relname = current_setting('shardids.table_name') and c.relkind in ('r', 'p')
join pg_attribute a on a.attrelid = c.oid and a.attname = current_setting('shardids.column_name')
  and a.attnum > 0 and not a.attisdropped
join pg_type t on t.oid = a.atttypid
left join pg_collation l on l.oid = a.attcollation
left join lateral (
  select f.relname, b.attname
  from pg_constraint k
  join pg_class f on f.oid = k.confrelid and f.relnamespace = n.oid
  join pg_attribute b on b.attrelid = f.oid and b.attnum = k.confkey[1]
  where k.conrelid = c.oid and k.contype = 'f' and k.conkey = array[a.attnum]
  order by k.conname limit 1) r on true
where s.state <> 'moved'
order by 1;
