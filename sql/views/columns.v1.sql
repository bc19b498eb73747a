-- Purpose:    the columns of a table in every shard of a node, for views over all shards. A type of the shard's own
--             schema is another in each shard: it is read as text. Old copies are among them, for a shard that is just
--             being moved is placed where it has stopped already. Nothing is installed.
-- Settings:   shardids.table_name
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select s.id as shard,
       array_agg(a.attname::text order by a.attnum) as names,
       array_agg(case when t.typnamespace = n.oid then 'text' else format_type(a.atttypid, a.atttypmod) end order by a.attnum)
         as types,
       array_agg(t.typnamespace = n.oid order by a.attnum) as are_cast
from shardids.shard s
join pg_namespace n on n.nspname = s.schema
join pg_class c on c.relnamespace = n.oid and c.relname = current_setting('shardids.table_name') and c.relkind in ('r', 'p', 'v')
join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
-- Arrays of such a type, too.
join pg_type declared on declared.oid = a.atttypid
join pg_type t on t.oid = case when declared.typelem <> 0 and declared.typlen = -1 then declared.typelem else declared.oid end
group by s.id
order by s.id;
