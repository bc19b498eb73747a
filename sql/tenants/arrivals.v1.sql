-- Purpose:    what moving one key's rows to another shard needs on the node that they arrive on.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids.

create table shardids.key_arrival (
  move    bigint primary key,
  at      timestamptz not null default now(),
  is_home boolean not null default false
);

comment on table shardids.key_arrival is
  'Moves of keys whose rows have arrived, written in the transaction of the rows: without it a standby took over that lacks them';
comment on column shardids.key_arrival.move is 'The number of the move in shardids_catalog.key_move; gone when the move has ended';
comment on column shardids.key_arrival.is_home is
  'The key lives here: set after the switch, so that a catalog which has lost the switch does not let the move begin again';
