-- Purpose:    the node's copy of the directory of keys (catalog/homes.v1.sql), so that SQL can ask it.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids.

create table shardids.key_home (
  kind    text        collate "C" not null,
  key     text        collate "C" not null,
  shard   integer     not null,
  since   timestamptz not null,
  version bigint      not null,
  primary key (kind, key)
);

-- The shard that a key has left refuses rows of it with SQLSTATE 'SI017', whose detail ends with the new shard: "shard 900".
comment on table shardids.key_home is
  'Keys whose rows live in another shard than that of their hash: as the catalog had them at homes_version of shardids.node';

create function shardids.home_of(kind text, key text) returns integer
language sql stable strict parallel safe
return (select h.shard from shardids.key_home h where h.kind = home_of.kind and h.key = home_of.key);

comment on function shardids.home_of(text, text) is
  'The shard that the directory of keys has for a key, by the kind text, bigint, uuid or bytea; null: that of shardids.shard_for_key';
