-- Purpose:    what this database knows of itself and of the shards it holds.
-- Settings:   shardids.cluster (uuid), shardids.node (name), shardids.engine (postgresql if unset)
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids.

create table shardids.node (
  only_row      boolean  primary key default true check (only_row),
  name          text     not null,
  cluster       uuid     not null,
  engine        text     not null default 'postgresql' check (engine in ('postgresql', 'citus')),
  on_copy       text     not null default 'refuse' check (on_copy in ('refuse', 'warn')),
  -- A draw looks at max_ahead only when its tick is a minute ahead of the clock.
  max_ahead     interval not null default '1 hour' check (max_ahead between '1 minute' and '10 years'),
  safety_margin interval not null default '10 seconds' check (safety_margin >= '1 second'),
  max_past      interval not null default '1 minute',
  -- A year, less some days: a mistyped year must not pass, and a server that slept for a season wakes by itself.
  max_step      interval not null default '360 days' check (max_step between '1 day' and '100 years'),
  clock_confirmed_at timestamptz,
  homes_version bigint   not null default 0,
  max_reserve   integer  not null default 4194304 check (max_reserve between 1 and 16777216),
  sees_all      boolean  not null default pg_has_role(current_user, 'pg_read_all_stats', 'usage'),
  -- A fence or an activation after a jump leads by up to six margins; none must lead past what draws may be ahead.
  constraint node_margin_within_max_ahead check (safety_margin * 6 <= max_ahead),
  constraint node_max_past_within_max_ahead check (max_past <= max_ahead)
);

comment on table shardids.node is 'This database as a node of a shardids cluster, and its settings';
comment on column shardids.node.engine is 'citus: this database is a Citus coordinator, and its shards'' schemas are distributed';
comment on column shardids.node.on_copy is 'What a copied shard does until it is activated: refuse to draw, or warn and draw';
comment on column shardids.node.max_ahead is 'How far a shard''s IDs may run ahead of this server''s clock';
comment on column shardids.node.safety_margin is 'How far IDs jump ahead of the clock after a restart; up to three times as far after several, and four times after a promotion';
comment on column shardids.node.max_past is 'How far ahead of this server''s clock an ID may be that shardids.advance_past() goes past; six times safety_margin at least';
comment on column shardids.node.max_step is 'How far the clock may go ahead at once, since any shard drew, before it has to be confirmed';
comment on column shardids.node.clock_confirmed_at is 'This server''s clock when shardids node confirm-clock compared it with others';
comment on column shardids.node.homes_version is 'The version of the catalog''s directory of keys that shardids.key_home was last brought to';
comment on column shardids.node.max_reserve is 'How many IDs one call may reserve';

comment on column shardids.node.sees_all is 'Whether the owner could read all statistics at installation: see shardids.incarnation';

insert into shardids.node (name, cluster, engine)
values (current_setting('shardids.node'), current_setting('shardids.cluster')::uuid,
        coalesce(nullif(current_setting('shardids.engine', true), ''), 'postgresql'));

create table shardids.shard (
  id              integer     primary key check (id between 0 and (1 << shardids.shard_bits()) - 1),
  schema          name        not null unique,
  state           text        not null default 'fenced' check (state in ('active', 'fenced', 'moved')),
  moved_to        text        check ((moved_to is null) = (state <> 'moved')),
  high_water_tick bigint      not null default -1,
  unfences        bigint,
  id_counter      regclass    not null,
  id_offset       regclass    not null,
  server          text,
  timeline        integer,
  incarnation     bigint,
  changed_in      xid8        not null default pg_current_xact_id(),
  activated_at    timestamptz,
  arrived         text        check (arrived in ('tables', 'rows', 'all')),
  issuer          text
);

comment on table shardids.shard is 'The shards of this database; change it with shardids.fence and shardids.activate only';
comment on column shardids.shard.high_water_tick is 'No tick up to this one is issued again';
comment on column shardids.shard.issuer is 'The function that issues the shard''s IDs since shardids key function --back: its body has a mark';
comment on column shardids.shard.unfences is 'The fenced value of id_offset that the last activation releases';
comment on column shardids.shard.server is 'shardids.server() when the shard was activated';
comment on column shardids.shard.timeline is 'WAL timeline when the shard was activated';
comment on column shardids.shard.incarnation is 'shardids.incarnation() when the shard was last fenced or activated';
comment on column shardids.shard.changed_in is 'The transaction that last fenced or activated the shard';
comment on column shardids.shard.arrived is
  'While the shard is moved here: tables and keys are there, also rows by pg_dump, or also indexes and constraints';

create table shardids.skipped (
  shard      integer not null check (shard between 0 and (1 << shardids.shard_bits()) - 1),
  first_tick bigint  not null,
  last_tick  bigint  not null check (last_tick >= first_tick),
  primary key (shard, first_tick)
);

comment on table shardids.skipped is
  'Ticks that shards of the cluster issued by a wrong clock, and pass over when their time comes; the same on every node';

-- See shardids.note_step.
create sequence shardids.step_1;
create sequence shardids.step_2;
create sequence shardids.step_3;
create sequence shardids.step_4;
create sequence shardids.before_1;
create sequence shardids.before_2;
create sequence shardids.before_3;
create sequence shardids.before_4;
create sequence shardids.step_dropped;
create sequence shardids.step_latest;
comment on sequence shardids.step_latest is 'The latest time to which the clock went ahead by more than an hour at once, in ms since the epoch';
comment on sequence shardids.before_1 is 'The latest time below step_1 that a shard of the node had reached before its clock went to step_1 or past it';
comment on sequence shardids.step_dropped is 'The latest such time that is in none of step_1 to step_4';
