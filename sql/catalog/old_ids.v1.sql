-- Purpose:    how the rows of adopted tables are found by old IDs: keys that were issued before the table was adopted.
--             Part of the catalog; shardids_catalog.cluster.old_ids_below says which IDs are old.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

create table shardids_catalog.old_id_rule (
  table_name text primary key,
  id_column  text not null,
  rule       text not null check (rule in ('key', 'directory', 'fan-out'))
);

comment on table shardids_catalog.old_id_rule is 'The adopted tables, and how an ID that was issued before finds its shard';
comment on column shardids_catalog.old_id_rule.table_name is 'The table, as it is named in every shard';
comment on column shardids_catalog.old_id_rule.rule is 'key: by the hash of the ID; directory: by shardids_catalog.old_id_directory; fan-out: by asking every shard';

create table shardids_catalog.old_id_directory (
  table_name text   not null references shardids_catalog.old_id_rule (table_name) on update cascade on delete cascade,
  chunk      bigint not null,
  shards     bytea  not null check (length(shards) <= 8192 and length(shards) % 2 = 0),
  primary key (table_name, chunk)
);

comment on table shardids_catalog.old_id_directory is 'The shards of old IDs, 4,096 consecutive IDs a row';
comment on column shardids_catalog.old_id_directory.chunk is 'The IDs, shifted right by 12 bits';
comment on column shardids_catalog.old_id_directory.shards is 'Two bytes an ID, the higher first: its shard, or 65535 if no row had it; none for those past the end';

-- IDs that lie far apart: a chunk with a few of them would be mostly empty.
create table shardids_catalog.old_id_list (
  table_name text   not null references shardids_catalog.old_id_rule (table_name) on update cascade on delete cascade,
  first      bigint not null,
  ids        bytea  not null check (length(ids) >= 8 and length(ids) <= 8192 and length(ids) % 8 = 0),
  shards     bytea  not null check (length(shards) * 4 = length(ids)),
  primary key (table_name, first)
);

comment on table shardids_catalog.old_id_list is 'The shards of old IDs that lie far apart, up to 1,024 a row';
comment on column shardids_catalog.old_id_list.first is 'The lowest ID of the row';
comment on column shardids_catalog.old_id_list.ids is 'In order, eight bytes an ID, the highest first, two''s complement';
comment on column shardids_catalog.old_id_list.shards is 'Two bytes an ID, the higher first: its shard';

create table shardids_catalog.old_id_filling (
  table_name text   not null references shardids_catalog.old_id_rule (table_name) on update cascade on delete cascade,
  node       text   not null,
  last       bigint not null,
  primary key (table_name, node)
);

comment on table shardids_catalog.old_id_filling is 'Directories that are being filled: the last ID of each node that is in it';

create trigger changed after insert or update or delete on shardids_catalog.old_id_rule
for each statement execute function shardids_catalog.changed();
