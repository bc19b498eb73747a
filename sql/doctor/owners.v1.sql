-- Purpose:    what shardids doctor asks of schema shardids and the shards' schemas: those that belong to another role than
--             the engine, whose owner is that of its tables.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select s.id as shard, n.nspname::text as schema, pg_get_userbyid(n.nspowner)::text as role,
       pg_get_userbyid(engine.relowner)::text as owner
from pg_class engine
join pg_namespace n on n.nspowner <> engine.relowner
left join shardids.shard s on s.schema = n.nspname
where engine.oid = 'shardids.node'::regclass
  and (n.nspname = 'shardids' or s.state <> 'moved')
order by 1 nulls first;
