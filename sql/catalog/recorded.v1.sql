-- Purpose:    the state that shards and nodes are to be in: what shardids doctor compares them with.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

-- By revision, since a run of migrations brings shards from one to the next, and by the server's version, since servers
-- write definitions differently.
create table shardids_catalog.recorded_schema (
  revision       text        not null,
  server_version integer     not null,
  objects        jsonb       not null,
  recorded_at    timestamptz not null default clock_timestamp(),
  recorded_by    text        not null,
  primary key (revision, server_version)
);

comment on table shardids_catalog.recorded_schema is 'The objects, with their states, that a shard at a revision has to have';
comment on column shardids_catalog.recorded_schema.revision is 'What alembic_version says, base if it is empty; empty where a shard has no such table';
comment on column shardids_catalog.recorded_schema.server_version is 'The major version of the server that wrote the definitions';
comment on column shardids_catalog.recorded_schema.objects is 'Kind, name and definition of each object, as catalog/objects.v1.sql writes them; beside it the definition without the shard''s number';
comment on column shardids_catalog.recorded_schema.recorded_by is 'The command that recorded it';

create table shardids_catalog.recorded_node (
  node        text        primary key references shardids_catalog.node (name) on update cascade on delete cascade,
  contract    jsonb       not null,
  recorded_at timestamptz not null default clock_timestamp(),
  recorded_by text        not null
);

comment on table shardids_catalog.recorded_node is 'The settings and objects outside of shards that a node has to have';
comment on column shardids_catalog.recorded_node.contract is 'Kind, name and definition of each, as catalog/contract.v1.sql writes them';
