-- Purpose:    the shards of a node that have moved away or whose sequences are gone: where they went, and whether their
--             schemas are there. Asked only if a reading found such shards. Nothing is installed.
-- Locks:      ACCESS SHARE on shardids.shard.
-- Privileges: USAGE on schema shardids, SELECT on shardids.shard.

select s.id as shard, s.moved_to, to_regnamespace(quote_ident(s.schema)) is not null as has_schema
from shardids.shard s
where s.state = 'moved' or not exists (select from pg_class c where c.oid = s.id_counter)
  or not exists (select from pg_class c where c.oid = s.id_offset);
