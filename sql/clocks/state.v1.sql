-- Purpose:    what shardids shard reset-clock asks of a shard: how far it leads, and whether it has ticks to pass over. Nothing is
--             installed.
-- Settings:   shardids.of_shard: the shard
-- Locks:      ROW EXCLUSIVE on the shard's sequences until the end of the transaction, as nextval takes it.
-- Privileges: those of the owner of schema shardids.

select s.state,
       greatest(s.high_water_tick >> shardids.sequence_bits(),
                shardids.offset_ms(coalesce(pg_sequence_last_value(s.id_offset), -1))
                + (coalesce(pg_sequence_last_value(s.id_counter), 0) >> shardids.sequence_bits()))
         - shardids.ms_of(clock_timestamp()) as lead_ms,
       (extract(epoch from n.max_ahead) * 1000)::bigint as max_ahead_ms,
       shardids.skips_from(s.id) is not null as has_ticks_to_pass,
       -- next_id() with a bound: see shardids.define_next_id.
       coalesce(pg_get_function_sqlbody(to_regprocedure(format('%I.next_id()', s.schema))) ~* 'nullif', false) as is_bounded
from shardids.shard s, shardids.node n
where s.id = current_setting('shardids.of_shard')::integer;
