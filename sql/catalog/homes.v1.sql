-- Purpose:    the directory of keys: keys whose rows live in another shard than that of their hash. Part of the catalog; every
--             node has a copy in shardids.key_home.
-- Locks:      none beyond those of CREATE. Every change locks the row of shardids_catalog.cluster until commit, so that versions
--             are handed out in the order of the commits.
-- Privileges: CREATE on schema shardids_catalog.

create function shardids_catalog.plain_digest(kind text, key text) returns bytea
language sql immutable strict parallel safe
return case kind
         when 'text' then sha256(convert_to('s:' || key, 'UTF8'))
         when 'bigint' then sha256(convert_to('i:' || key, 'UTF8'))
         when 'uuid' then sha256('\x753a'::bytea || uuid_send(key::uuid))
         when 'bytea' then sha256('\x623a'::bytea || decode(key, 'hex')) end;

comment on function shardids_catalog.plain_digest(text, text) is 'The hash of a key and its type, as shardids.shard_for_key has it';

-- The first 16 bytes of the hash that clients compare. The function is immutable although convert_to is only stable: PostgreSQL's
-- own conversion to UTF8 stays as it is. A region's keys are others than those of all shards.
create function shardids_catalog.key_digest(kind text, key text) returns bytea
language sql immutable strict parallel safe
return substr(
  case when strpos(kind, '@') = 0 then shardids_catalog.plain_digest(kind, key)
       else sha256(convert_to(substr(kind, strpos(kind, '@')) || ':', 'UTF8')
                   || shardids_catalog.plain_digest(split_part(kind, '@', 1), key)) end, 1, 16);

comment on function shardids_catalog.key_digest(text, text) is 'The hash by which clients find a key in the directory';

create table shardids_catalog.key_home (
  kind    text        collate "C" not null
                      constraint key_home_kind check (kind ~ '^(text|bigint|uuid|bytea)(@[A-Za-z][A-Za-z0-9_.-]{0,39})?$'),
  key     text        collate "C" not null constraint key_home_length check (octet_length(key) <= 1024),
  shard   integer     not null constraint key_home_shard references shardids_catalog.placement (shard),
  since   timestamptz not null default now(),
  digest  bytea       not null generated always as (shardids_catalog.key_digest(kind, key)) stored,
  version bigint      not null default 0,
  primary key (kind, key),
  constraint key_home_key check (
    case split_part(kind, '@', 1)
      when 'text' then true
      when 'bigint' then key ~ '^(0|-?[1-9][0-9]{0,18})$'
      when 'uuid' then key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
      when 'bytea' then key ~ '^([0-9a-f]{2})*$'
    end)
);

create index on shardids_catalog.key_home (shard);
create index on shardids_catalog.key_home (version);

comment on table shardids_catalog.key_home is 'The directory of keys: those whose rows live in another shard than that of their hash';
comment on column shardids_catalog.key_home.kind is 'The type of the key: text, bigint, uuid or bytea; after an @ the region whose key it is';
comment on column shardids_catalog.key_home.key is 'The key as text: a number in decimal, a UUID in lower case with hyphens, bytes in hex';
comment on column shardids_catalog.key_home.version is 'That of shardids_catalog.cluster when the entry was last written';

create table shardids_catalog.key_home_gone (
  kind    text   collate "C" not null,
  key     text   collate "C" not null,
  digest  bytea  not null,
  version bigint not null,
  primary key (kind, key)
);

create index on shardids_catalog.key_home_gone (version);

comment on table shardids_catalog.key_home_gone is 'Keys that were in the directory, for those who read only its changes';

create function shardids_catalog.lock_homes() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform from shardids_catalog.cluster for update;
  return null;
end
$$;

create function shardids_catalog.stamp_home() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  select c.version + 1 into new.version from shardids_catalog.cluster c;
  return new;
end
$$;

create function shardids_catalog.keep_gone_home() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into shardids_catalog.key_home_gone (kind, key, digest, version)
  select old.kind, old.key, old.digest, c.version + 1 from shardids_catalog.cluster c
  on conflict on constraint key_home_gone_pkey do update set version = excluded.version;
  return null;
end
$$;

create function shardids_catalog.homes_changed() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster c
  set version = c.version + 1, homes_version = c.version + 1,
      homes_reset = case tg_op when 'TRUNCATE' then c.version + 1 else c.homes_reset end
  returning c.version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;

comment on function shardids_catalog.lock_homes() is 'Makes those who change the directory of keys take turns';
comment on function shardids_catalog.stamp_home() is 'Gives an entry of the directory its version';
comment on function shardids_catalog.keep_gone_home() is 'Remembers a key that is taken out of the directory';
comment on function shardids_catalog.homes_changed() is 'Counts the versions up and notifies channel shardids_placement';

create trigger locked before insert or update or delete or truncate on shardids_catalog.key_home
for each statement execute function shardids_catalog.lock_homes();

create trigger stamped before insert or update on shardids_catalog.key_home
for each row execute function shardids_catalog.stamp_home();

create trigger gone after delete on shardids_catalog.key_home
for each row execute function shardids_catalog.keep_gone_home();

create trigger renamed after update of kind, key on shardids_catalog.key_home
for each row when (old.kind <> new.kind or old.key <> new.key) execute function shardids_catalog.keep_gone_home();

create trigger changed after insert or update or delete or truncate on shardids_catalog.key_home
for each statement execute function shardids_catalog.homes_changed();
