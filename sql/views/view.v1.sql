-- Purpose:    which tables can be asked over all shards in one place: part of the catalog.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

create table shardids_catalog.view (
  name       text        primary key,
  table_name text        not null,
  id_column  text        not null,
  node       text        references shardids_catalog.node (name) on update cascade,
  url        text,
  made_at    timestamptz not null default now(),
  check ((node is null) <> (url is null))
);

comment on table shardids_catalog.view is 'Views over a table of all shards; they are in schema shardids_views of their database';
comment on column shardids_catalog.view.node is 'The node that has the view, if it is one';
comment on column shardids_catalog.view.url is 'The database that has the view, if that is not a node; without a password';
