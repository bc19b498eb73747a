-- Purpose:    takes the generator away from a shard. Its schema stays, with the application's tables; the
--             drop fails while a column's default still calls next_id().
-- Settings:   shardids.shard, set by shardids.enter_shard(shard)
-- Locks:      those of DROP.
-- Privileges: membership in the owner of schema shardids.

do $do$
declare
  shard constant integer := current_setting('shardids.shard');
  schema constant text := shardids.schema_of(shard);
begin
  perform shardids.fence(shard);
  execute format('drop function %1$I.next_id(), %1$I.next_ids(integer)', schema);
  execute format('drop sequence %1$I.id_counter, %1$I.id_offset', schema);
  delete from shardids.shard s where s.id = shard;
end
$do$;
