-- Purpose:    schema shardids and the layout of the IDs, as immutable functions that the planner folds
--             into constants.
-- Settings:   shardids.epoch_ms, shardids.time_bits, shardids.shard_bits, shardids.sequence_bits,
--             shardids.schema_prefix
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the database.

create schema if not exists shardids;

do $do$
declare
  setting record;
begin
  for setting in
    values ('epoch_ms', 'bigint'), ('time_bits', 'integer'), ('shard_bits', 'integer'),
           ('sequence_bits', 'integer'), ('schema_prefix', 'text')
  loop
    execute format(
      'create function shardids.%I() returns %s language sql immutable parallel safe return %L::%s',
      setting.column1, setting.column2, current_setting('shardids.' || setting.column1), setting.column2);
  end loop;
end
$do$;

comment on schema shardids is 'shardids: the ID generator of this database''s shards';
comment on function shardids.epoch_ms() is 'Milliseconds from 1970 to the time that an ID calls 0';
comment on function shardids.time_bits() is 'Width of an ID''s time field';
comment on function shardids.shard_bits() is 'Width of an ID''s shard field';
comment on function shardids.sequence_bits() is 'Width of an ID''s sequence field';
comment on function shardids.schema_prefix() is 'What a shard''s schema name starts with';

create function shardids.schema_of(shard integer) returns text
language sql immutable parallel safe
return shardids.schema_prefix() || lpad(shard::text, greatest(4, length(shard::text)), '0');

comment on function shardids.schema_of(integer) is 'Name of the schema of a logical shard';
