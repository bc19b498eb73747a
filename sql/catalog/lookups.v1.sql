-- Purpose:    the look-ups: columns whose values are unique over all shards. Part of the catalog. The claims themselves are
--             in the shards (lookups/claims.v1.sql).
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

create table shardids_catalog.lookup (
  table_name  text        not null,
  column_name text        not null,
  claims      text        not null constraint lookup_claims unique,
  is_ready    boolean     not null default false,
  created_at  timestamptz not null default now(),
  primary key (table_name, column_name)
);

comment on table shardids_catalog.lookup is 'Columns whose values are unique over all shards, and find the shard of their row';
comment on column shardids_catalog.lookup.table_name is 'The table, as it is named in every shard';
comment on column shardids_catalog.lookup.claims is 'The table with the claims, as it is named in every shard';
comment on column shardids_catalog.lookup.is_ready is 'Every row has a claim, so a value without a claim has no row';

create trigger changed after insert or update or delete on shardids_catalog.lookup
for each statement execute function shardids_catalog.changed();
