-- Purpose:    what an ID says, and the IDs that bound a time. All inlined into the calling query.
-- Locks:      none.
-- Privileges: CREATE on schema shardids.

-- A tick is (ms since the epoch << sequence_bits) | sequence.
create function shardids.id_of(tick bigint, shard integer) returns bigint
language sql immutable parallel safe
return ((((tick >> shardids.sequence_bits()) << shardids.shard_bits()) + shard) << shardids.sequence_bits())
       + (tick & ((1::bigint << shardids.sequence_bits()) - 1));

create function shardids.shard_of(id bigint) returns integer
language sql immutable parallel safe
return ((id >> shardids.sequence_bits()) & ((1::bigint << shardids.shard_bits()) - 1))::integer;

create function shardids.sequence_of(id bigint) returns integer
language sql immutable parallel safe
return (id & ((1::bigint << shardids.sequence_bits()) - 1))::integer;

create function shardids.tick_of(id bigint) returns bigint
language sql immutable parallel safe
return (((id >> (shardids.shard_bits() + shardids.sequence_bits())) & ((1::bigint << shardids.time_bits()) - 1)) << shardids.sequence_bits())
       + (id & ((1::bigint << shardids.sequence_bits()) - 1));

create function shardids.time_of(id bigint) returns timestamptz
language sql immutable parallel safe
return to_timestamp(
  (((id >> (shardids.shard_bits() + shardids.sequence_bits())) & ((1::bigint << shardids.time_bits()) - 1))
   + shardids.epoch_ms()) / 1000::double precision);

-- extract is only stable, for fields that depend on the time zone; the epoch does not.
create function shardids.ms_of(at timestamptz) returns bigint
language sql immutable parallel safe
return floor(extract(epoch from at) * 1000)::bigint - shardids.epoch_ms();

-- Times before the epoch or past the layout's end count as its first or last millisecond. The case is for
-- null, which greatest and least would pass over.
create function shardids.clamped_ms(at timestamptz) returns bigint
language sql immutable parallel safe
return case when at is not null then greatest(0, least(shardids.ms_of(at), (1::bigint << shardids.time_bits()) - 1)) end;

create function shardids.min_id(at timestamptz) returns bigint
language sql immutable parallel safe
return shardids.clamped_ms(at)
       << (shardids.shard_bits() + shardids.sequence_bits());

create function shardids.max_id(at timestamptz) returns bigint
language sql immutable parallel safe
return (shardids.clamped_ms(at)
        << (shardids.shard_bits() + shardids.sequence_bits()))
       + ((1::bigint << (shardids.shard_bits() + shardids.sequence_bits())) - 1);

comment on function shardids.id_of(bigint, integer) is 'The ID of a tick in a shard';
comment on function shardids.shard_of(bigint) is 'The shard in which an ID was born';
comment on function shardids.sequence_of(bigint) is 'The sequence field of an ID';
comment on function shardids.tick_of(bigint) is 'The tick of an ID';
comment on function shardids.time_of(bigint) is 'The time at which an ID was born, to the millisecond';
comment on function shardids.ms_of(timestamptz) is 'Milliseconds since the layout''s epoch, rounded down';
comment on function shardids.clamped_ms(timestamptz) is 'Milliseconds since the layout''s epoch, within the layout''s time';
comment on function shardids.min_id(timestamptz) is 'The lowest ID that any shard can issue in a millisecond';
comment on function shardids.max_id(timestamptz) is 'The highest ID that any shard can issue in a millisecond';
