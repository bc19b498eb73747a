-- Purpose:    IDs of rows that have left the shard they were born in, with their key: an ID leads to the key, the key to the shard.
--             Part of the catalog.
-- Locks:      none beyond those of CREATE. As with the directory of keys, changes that clients heed take turns.
-- Privileges: CREATE on schema shardids_catalog.

-- A key that moves on changes one row per origin here, however many IDs it has.
create table shardids_catalog.moved_key (
  origin  integer not null,
  slot    integer not null check (slot between 0 and 65534),
  kind    text    collate "C" not null,
  key     text    collate "C" not null,
  shard   integer not null constraint moved_key_shard references shardids_catalog.placement (shard),
  lowest  bigint,
  highest bigint,
  version bigint  not null default 0,
  primary key (origin, slot),
  constraint moved_key_once unique (kind, key, origin)
);

comment on table shardids_catalog.moved_key is 'Keys with rows whose IDs are of another shard, by that shard';
comment on column shardids_catalog.moved_key.slot is 'The number that stands for the key in shardids_catalog.moved_id_list';
comment on column shardids_catalog.moved_key.shard is 'Where the rows live; that of origin while a move is prepared, and after a move back';
comment on column shardids_catalog.moved_key.lowest is 'The lowest ID in the list; others of the origin are not looked for';

create table shardids_catalog.moved_id_list (
  origin integer not null,
  first  bigint  not null,
  ids    bytea   not null check (length(ids) >= 8 and length(ids) <= 8192 and length(ids) % 8 = 0),
  slots  bytea   not null check (length(slots) * 4 = length(ids)),
  primary key (origin, first)
);

comment on table shardids_catalog.moved_id_list is 'The keys of moved rows by their IDs, up to 1,024 a row';
comment on column shardids_catalog.moved_id_list.ids is 'In order, eight bytes an ID, the highest first, two''s complement';
comment on column shardids_catalog.moved_id_list.slots is 'Two bytes an ID, the higher first: the slot of its key in moved_key';

create trigger locked before insert or update of shard or delete on shardids_catalog.moved_key
for each statement execute function shardids_catalog.lock_homes();

create trigger stamped before insert or update of shard on shardids_catalog.moved_key
for each row execute function shardids_catalog.stamp_home();

-- Not of the bounds: IDs of a move that is prepared lead nowhere yet.
create trigger changed after insert or update of shard or delete on shardids_catalog.moved_key
for each statement execute function shardids_catalog.homes_changed();
