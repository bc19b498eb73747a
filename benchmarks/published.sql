-- The function that Instagram Engineering published in 2012 ("Sharding & IDs at Instagram"), for shard 5:
-- the same statements on the same clock. With it, the same with its clock read tidied up: no numeric, no
-- queries. Both are here to be measured; both hand IDs out twice.
create schema published;
create sequence published.table_id_seq;

create function published.next_id(out result bigint) language plpgsql as $$
declare
  our_epoch bigint := 1314220021721;
  seq_id bigint;
  now_millis bigint;
  shard_id int := 5;
begin
  select nextval('published.table_id_seq') % 1024 into seq_id;
  select floor(extract(epoch from clock_timestamp()) * 1000) into now_millis;
  result := (now_millis - our_epoch) << 23;
  result := result | (shard_id << 10);
  result := result | (seq_id);
end
$$;

create function published.next_id_tidied() returns bigint language plpgsql as $$
begin
  return (((date_part('epoch', clock_timestamp()) * 1000)::bigint - 1314220021721) << 23)
         | (5 << 10) | (nextval('published.table_id_seq') & 1023);
end
$$;
