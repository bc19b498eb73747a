-- Purpose:    pins: shards, and shards of keys, that no move takes away from their node. Part of the catalog.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.
--
-- A pin is written, and a move entered, under the lock of the row of shardids_catalog.cluster: who comes second finds the other.

create table shardids_catalog.shard_pin (
  shard integer     primary key constraint shard_pin_shard references shardids_catalog.placement (shard),
  node  text        constraint shard_pin_node references shardids_catalog.node (name) on update cascade on delete set null,
  since timestamptz not null default now()
);

comment on table shardids_catalog.shard_pin is 'Shards that no move takes away from their node';
comment on column shardids_catalog.shard_pin.node is 'The only node that the shard may be moved to; null, also once that node was removed: it stays where it is';

create table shardids_catalog.key_pin (
  kind  text        collate "C" not null,
  key   text        collate "C" not null,
  since timestamptz not null default now(),
  primary key (kind, key)
);

comment on table shardids_catalog.key_pin is 'Keys whose shard, as the directory or the hash names it, no move takes away from its node';
comment on column shardids_catalog.key_pin.kind is 'As in shardids_catalog.key_home';
