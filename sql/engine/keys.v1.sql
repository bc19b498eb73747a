-- Purpose:    the shard that a key belongs to: the pure hash that every client computes.
-- Locks:      none.
-- Privileges: CREATE on schema shardids.
--
-- The first eight bytes of the SHA-256 of the key's type and bytes, without a sign, modulo the count. It never changes: every row's
-- shard would. The functions are immutable although convert_to is only stable: PostgreSQL's own conversion to UTF8 stays as it is.

create function shardids.refused_count(shard_count integer) returns integer
language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = 'SI007', message = format('shard_count must be 1 to 65536, not %s', shard_count),
    hint = 'The number of shards is in shardids_catalog.cluster.';
end
$$;

create function shardids.shard_for_hash(digest bytea, shard_count integer) returns integer
language sql immutable strict parallel safe
return mod(('x' || encode(substr(digest, 1, 8), 'hex'))::bit(64)::bigint
           + case when get_byte(digest, 0) > 127 then 18446744073709551616 else 0::numeric end,
           case when shard_count between 1 and 65536 then shard_count else shardids.refused_count(shard_count) end)::integer;

create function shardids.shard_for_key(key text, shard_count integer) returns integer
language sql immutable strict parallel safe
return shardids.shard_for_hash(sha256(convert_to('s:' || key, 'UTF8')), shard_count);

create function shardids.shard_for_key(key bigint, shard_count integer) returns integer
language sql immutable strict parallel safe
return shardids.shard_for_hash(sha256(convert_to('i:' || key, 'UTF8')), shard_count);

create function shardids.shard_for_key(key uuid, shard_count integer) returns integer
language sql immutable strict parallel safe
return shardids.shard_for_hash(sha256('\x753a'::bytea || uuid_send(key)), shard_count);

create function shardids.shard_for_key(key bytea, shard_count integer) returns integer
language sql immutable strict parallel safe
return shardids.shard_for_hash(sha256('\x623a'::bytea || key), shard_count);

comment on function shardids.refused_count(integer) is 'Refuses a number of shards that no cluster has';
comment on function shardids.shard_for_hash(bytea, integer) is 'The first eight bytes of a hash, without a sign, modulo the number of shards';
comment on function shardids.shard_for_key(text, integer) is 'The shard of a key, by its hash, in a cluster of so many shards';
comment on function shardids.shard_for_key(bigint, integer) is 'The shard of a key, by its hash, in a cluster of so many shards';
comment on function shardids.shard_for_key(uuid, integer) is 'The shard of a key, by its hash, in a cluster of so many shards';
comment on function shardids.shard_for_key(bytea, integer) is 'The shard of a key, by its hash, in a cluster of so many shards';
