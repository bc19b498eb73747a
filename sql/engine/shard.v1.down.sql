-- Purpose:    takes the generator away from a shard. Its schema stays, with the application's tables; the
--             drop fails while a column's default still calls next_id(). Refuses while the shard's IDs are
--             ahead of the clock: a generator made anew starts at the clock.
-- Settings:   shardids.shard, set by shardids.enter_shard(shard)
-- Locks:      those of DROP; SHARE ROW EXCLUSIVE on the sequences before that. They keep draws waiting, not fenced,
--             so that a failure leaves the shard as it was.
-- Privileges: membership in the owner of schema shardids.

do $do$
declare
  shard constant integer := current_setting('shardids.shard');
  schema constant text := shardids.schema_of(shard);
  ahead_ms bigint;
begin
  if not exists (select from shardids.shard s where s.id = shard) then
    perform shardids.refuse('SI001', shard);
  end if;
  execute format('drop function %1$I.next_id(), %1$I.next_ids(integer), %1$I.late_id_%2$s(regclass), %1$I.set_aside_%2$s(regclass, integer, bigint)', schema, shard);
  -- Changes nothing; its lock conflicts with that of nextval.
  execute format('alter sequence %I.id_offset owned by none', schema);
  execute format('alter sequence %I.id_counter owned by none', schema);
  -- A step leads by less than 16 ms; that passes.
  for attempt in 1..3 loop
    select greatest(s.high_water_tick >> shardids.sequence_bits(),
                    shardids.offset_ms(pg_sequence_last_value(s.id_offset))
                    + (pg_sequence_last_value(s.id_counter) >> shardids.sequence_bits()))
           - shardids.ms_of(clock_timestamp()) into ahead_ms
    from shardids.shard s where s.id = shard;
    exit when ahead_ms not between 0 and 16;
    perform pg_sleep((ahead_ms + 1) / 1000.0);
  end loop;
  if ahead_ms >= 0 then
    perform shardids.refuse('SI005', shard, ahead_ms);
  end if;
  execute format('drop sequence %1$I.id_counter, %1$I.id_offset', schema);
  delete from shardids.shard s where s.id = shard;
end
$do$;
