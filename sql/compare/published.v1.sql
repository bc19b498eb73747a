-- Purpose:    the function that Instagram Engineering published in 2012 ("Sharding & IDs at Instagram"), to be
--             measured: the same statements on the same clock. With it, the same with its clock read tidied up:
--             no numeric, no queries. Both hand IDs out twice: not for use.
-- Settings:   shardids.shard, the shard's number; 5 if it is not set. shardids.schema, where the function and its
--             sequence are made; published if it is not set.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the database.

do $do$
declare
  shard constant integer := coalesce(nullif(current_setting('shardids.shard', true), ''), '5');
  schema constant name := coalesce(nullif(current_setting('shardids.schema', true), ''), 'published');
begin
  execute format('create schema if not exists %I', schema);
  execute format('create sequence if not exists %I.table_id_seq', schema);
  execute format($format$
create or replace function %2$I.next_id(out result bigint) language plpgsql as $$
declare
  our_epoch bigint := 1314220021721;
  seq_id bigint;
  now_millis bigint;
  shard_id int := %1$s;
begin
  select nextval('%2$I.table_id_seq') %% 1024 into seq_id;
  select floor(extract(epoch from clock_timestamp()) * 1000) into now_millis;
  result := (now_millis - our_epoch) << 23;
  result := result | (shard_id << 10);
  result := result | (seq_id);
end
$$$format$, shard, schema);

  execute format($format$
create or replace function %2$I.next_id_tidied() returns bigint language plpgsql as $$
begin
  return (((date_part('epoch', clock_timestamp()) * 1000)::bigint - 1314220021721) << 23)
         | (%1$s << 10) | (nextval('%2$I.table_id_seq') & 1023);
end
$$$format$, shard, schema);
end
$do$;
