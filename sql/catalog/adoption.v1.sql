-- Purpose:    the journal of adoptions: what shardids adopt is about to do, written before it does it.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.
--
-- An adoption without ended_at is under way or was interrupted; the process that works at it holds the advisory lock
-- 1936220523 for as long as it lives.

create table shardids_catalog.adoption (
  id          bigint      generated always as identity primary key,
  source      text        not null,
  plan        text        not null,
  shapes      jsonb       not null,
  step        text        not null,
  is_paused   boolean     not null default false,
  keeps_back  boolean     not null default false,
  compared    jsonb       not null default '{}',
  compared_at timestamptz,
  switched_at timestamptz,
  started_at  timestamptz not null default now(),
  ended_at    timestamptz,
  outcome     text        check (outcome in ('adopted', 'aborted', 'returned')),
  check ((ended_at is null) = (outcome is null))
);

create unique index adoption_under_way on shardids_catalog.adoption ((true)) where ended_at is null;

comment on table shardids_catalog.adoption is 'Databases that were, or are being, taken into the cluster';
comment on column shardids_catalog.adoption.source is 'The URL of the database, without its password';
comment on column shardids_catalog.adoption.plan is 'The plan, as shardids adopt plan writes it';
comment on column shardids_catalog.adoption.shapes is 'The tables of the source, as they have to stay until the switch';
comment on column shardids_catalog.adoption.step is 'The last step that was begun';
comment on column shardids_catalog.adoption.keeps_back is 'Whether changes of the shards are sent back to the source after the switch';
comment on column shardids_catalog.adoption.compared is
  'Tables that were last found to be the same, each with the version of its storage at the source and the timelines of the servers';
comment on column shardids_catalog.adoption.compared_at is 'When all rows were last found to be the same';
comment on column shardids_catalog.adoption.switched_at is 'When the shards took over; from then on there is no abort';
