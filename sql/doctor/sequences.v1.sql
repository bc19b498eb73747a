-- Purpose:    what shardids doctor asks of the sequences of the generators: those that are not as shardids creates them.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with engine as (
  select c.relowner as owner from pg_class c where c.oid = 'shardids.node'::regclass)
select s.id as shard,
       c.relname::text as name,
       array_remove(array[
         case when q.seqcache <> 1 then format('cache %s', q.seqcache) end,
         case when q.seqincrement <> case c.relname when 'id_offset' then 16 else 1 end then format('increment by %s', q.seqincrement) end,
         case when q.seqcycle then 'cycle' end,
         case when q.seqtypid <> 'int8'::regtype or q.seqmax <> 9223372036854775807 then format('maxvalue %s', q.seqmax) end,
         case when c.relpersistence <> 'p' then 'unlogged' end,
         case when c.relowner <> engine.owner then format('owner %I', pg_get_userbyid(c.relowner)) end], null) as differences,
       pg_get_userbyid(engine.owner)::text as owner
from engine
cross join shardids.shard s
join pg_namespace n on n.nspname = s.schema
join pg_class c on c.relnamespace = n.oid and c.relkind = 'S' and c.relname in ('id_counter', 'id_offset')
join pg_sequence q on q.seqrelid = c.oid
where s.state <> 'moved'
  and (q.seqcache <> 1 or q.seqincrement <> case c.relname when 'id_offset' then 16 else 1 end or q.seqcycle or q.seqtypid <> 'int8'::regtype or q.seqmax <> 9223372036854775807
       or c.relpersistence <> 'p' or c.relowner <> engine.owner)
order by 1, 2;
