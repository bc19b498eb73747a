-- Purpose:    the database that has a view of every table over all shards: part of the catalog.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

create table shardids_catalog.query_node (
  only_row  boolean     primary key default true check (only_row),
  node      text        references shardids_catalog.node (name) on update cascade,
  url       text,
  sharded   text[]      not null,
  reference text[]      not null,
  made_at   timestamptz not null default now(),
  check ((node is null) <> (url is null))
);

comment on table shardids_catalog.query_node is 'The query node: the database with a view of every table over all shards, in schema shardids_query';
comment on column shardids_catalog.query_node.node is 'The node that is the query node, if it is one';
comment on column shardids_catalog.query_node.url is 'The database that is the query node, if that is not a node; without a password';
comment on column shardids_catalog.query_node.sharded is 'Tables whose rows are each in one shard, though no ID in them says so';
comment on column shardids_catalog.query_node.reference is 'Tables that have the same rows in every shard';
