-- Purpose:    what shardids doctor asks twice: how far the generator of each shard has come. Nothing is installed.
-- Settings:   shardids.first_shard, shardids.last_shard: which shards, both included
-- Locks:      ROW EXCLUSIVE on the shards' sequences until the end of the transaction, as nextval takes it: ask
--             for some hundred shards at a time, or the server's lock table may be full.
-- Privileges: those of the owner of schema shardids.

select s.id as shard,
       coalesce(pg_sequence_last_value(counter.oid), 0) as drawn,
       shardids.offset_ms(coalesce(pg_sequence_last_value(id_offset.oid), -1)) as offset_ms,
       shardids.ms_of(clock_timestamp()) as clock_ms,
       s.high_water_tick,
       -- From its activation to its first draw a shard has the offset of a fence.
       coalesce(pg_sequence_last_value(id_offset.oid) >= 0, false) as has_drawn,
       -- A fence that was rolled back holds, though the row says active.
       coalesce(pg_sequence_last_value(id_offset.oid) < 0
                and s.unfences is distinct from pg_sequence_last_value(id_offset.oid), false) as is_fenced
from shardids.shard s
join pg_class counter on counter.oid = s.id_counter
join pg_class id_offset on id_offset.oid = s.id_offset
where s.id between current_setting('shardids.first_shard')::integer and current_setting('shardids.last_shard')::integer
order by 1;
