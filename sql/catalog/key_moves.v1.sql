-- Purpose:    the journal of moves of keys between shards: part of the catalog.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.
--
-- What a mover is about to do, written before it does it. A move without ended_at is under way or was interrupted: it keeps the
-- leases of both shards. While is_unsettled, the key's rows may be in both shards, or in one of them in part, and statements over
-- several shards are refused.

create table shardids_catalog.key_move (
  id           bigint      generated always as identity primary key,
  kind         text        collate "C" not null,
  key          text        collate "C" not null,
  source       integer     not null,
  target       integer     not null,
  choices      jsonb       not null,
  step         text        not null,
  is_unsettled boolean     not null default false,
  epoch        uuid        not null,
  rows         bigint,
  started_at   timestamptz not null default now(),
  switched_at  timestamptz,
  ended_at     timestamptz,
  outcome      text        check (outcome in ('moved', 'aborted')),
  check ((ended_at is null) = (outcome is null)),
  check (target <> source)
);

create unique index on shardids_catalog.key_move (kind, key) where ended_at is null;
create index on shardids_catalog.key_move (source) where ended_at is null;
create index on shardids_catalog.key_move (target) where ended_at is null;

comment on table shardids_catalog.key_move is 'Moves of keys, with their rows, between shards';
comment on column shardids_catalog.key_move.choices is 'What the caller said: the root with its column, further columns that hold its key, tables that stay';
comment on column shardids_catalog.key_move.step is 'The last step that was begun';
comment on column shardids_catalog.key_move.is_unsettled is 'Whether rows of the key may be in both shards, or only some of them in one';
comment on column shardids_catalog.key_move.epoch is 'Of the leases of the command that works at the move, or last did';
comment on column shardids_catalog.key_move.rows is 'How many rows the key had when its home was switched';
comment on column shardids_catalog.key_move.switched_at is 'When the directory of keys got the new home';

create function shardids_catalog.unsettled_changed() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster c set version = c.version + 1, unsettled_version = c.version + 1
  returning c.version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;

comment on function shardids_catalog.unsettled_changed() is 'Counts the versions up and notifies channel shardids_placement';

create trigger changed after update of is_unsettled on shardids_catalog.key_move
for each statement execute function shardids_catalog.unsettled_changed();
