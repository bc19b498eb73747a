-- Purpose:    what shardids doctor asks of indexes: those that are invalid and that nobody is at work on; shards
--             that are alike in one row.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select i.relname::text as index_name,
       c.relname::text as table_name,
       array_agg(s.id order by s.id) as shards
from shardids.shard s
join pg_namespace n on n.nspname = s.schema
join pg_class c on c.relnamespace = n.oid
join pg_index x on x.indrelid = c.oid and not x.indisvalid
join pg_class i on i.oid = x.indexrelid
where s.state <> 'moved'
  -- CREATE INDEX CONCURRENTLY and REINDEX hold this lock on the table while they build.
  and not exists (
    select from pg_locks l
    where l.locktype = 'relation' and l.relation = c.oid and l.mode = 'ShareUpdateExclusiveLock' and l.granted
      and l.database = (select oid from pg_database where datname = current_database()))
group by 1, 2
order by 1, 2;
