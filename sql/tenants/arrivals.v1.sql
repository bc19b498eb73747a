-- Purpose:    what moving one key's rows to another shard needs on the node that they arrive on.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids.

create table shardids.key_arrival (
  move bigint primary key,
  at   timestamptz not null default now()
);

comment on table shardids.key_arrival is
  'Moves of keys whose rows have arrived, written in the transaction of the rows: without it a standby took over that lacks them';
comment on column shardids.key_arrival.move is 'The number of the move in shardids_catalog.key_move; gone when the move has ended';
