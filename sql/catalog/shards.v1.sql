-- Purpose:    the state of the shards of a node, and how far the generator of each has come. Nothing is installed, and no
--             sequence is advanced.
-- Settings:   shardids.first_shard: the lowest number; shardids.count: how many shards from there on
-- Locks:      ROW EXCLUSIVE on the shards' sequences until the end of the transaction, as nextval takes it: ask
--             for some hundred shards at a time, or the server's lock table may be full.
-- Privileges: USAGE on schema shardids, SELECT on its tables; SELECT or USAGE on the shards' sequences.

with s as materialized (
  select s.id, s.state, s.arrived, s.server, s.unfences, s.high_water_tick,
         -- Null where there is no such sequence any more: to join pg_class would read all of it.
         has_sequence_privilege(s.id_counter, 'usage, select') as may_read_counter,
         has_sequence_privilege(s.id_offset, 'usage, select') as may_read_offset,
         s.id_counter, s.id_offset
  from shardids.shard s
  where s.id >= current_setting('shardids.first_shard')::integer
  order by s.id limit current_setting('shardids.count')::integer),
seen as materialized (
  select s.*,
         case when s.state <> 'moved' and s.may_read_offset then pg_sequence_last_value(s.id_offset) end as value,
         case when s.state <> 'moved' and s.may_read_counter then coalesce(pg_sequence_last_value(s.id_counter), 0) end as drawn
  from s)
select s.id as shard,
       case when s.state = 'moved' then 'moved'
            when s.arrived is not null then 'arriving'
            when s.server is distinct from shardids.server() then 'copy'
            when s.state = 'fenced' then 'fenced'
            when not (coalesce(s.may_read_counter, true) and coalesce(s.may_read_offset, true)) then 'unreadable'
            when s.value is null or s.drawn is null then 'broken'
            -- A fence that was rolled back holds, though the row says active.
            when s.value < 0 and s.unfences is distinct from s.value then 'fenced'
            else 'active' end as state,
       s.id_counter::oid as counter,
       coalesce(s.drawn, 0) as drawn,
       shardids.offset_ms(s.value) as offset_ms,
       -- Once: converting it for each shard is a sixth of the whole.
       (select shardids.ms_of(clock_timestamp())) as clock_ms,
       s.high_water_tick,
       -- From its activation to its first draw a shard has the offset of a fence.
       coalesce(s.value >= 0, false) as has_drawn
from seen s
order by 1;
