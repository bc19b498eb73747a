-- Purpose:    the catalog: the layout of the cluster, its nodes, and which node holds which shard.
--             It never holds a password.
-- Settings:   shardids.cluster (uuid), shardids.layout_name, shardids.epoch_ms, shardids.time_bits,
--             shardids.shard_bits, shardids.sequence_bits, shardids.schema_prefix, shardids.shard_count,
--             shardids.engine (postgresql if unset)
-- Locks:      none beyond those of CREATE. Every change of nodes, regions or placement locks the row of
--             cluster until commit, so that versions are handed out in the order of the commits.
-- Privileges: CREATE on the database.

create schema if not exists shardids_catalog;

create table shardids_catalog.cluster (
  only_row      boolean     primary key default true check (only_row),
  id            uuid        not null,
  layout_name   text        not null,
  epoch_ms      bigint      not null,
  time_bits     integer     not null,
  shard_bits    integer     not null,
  sequence_bits integer     not null,
  schema_prefix text        not null,
  shard_count   integer     not null check (shard_count between 1 and 1 << shard_bits),
  engine        text        not null default 'postgresql' check (engine in ('postgresql', 'citus')),
  old_ids_below bigint      check (old_ids_below > 0),
  version       bigint      not null default 1,
  homes_version bigint      not null default 0,
  homes_reset   bigint      not null default 0,
  unsettled_version bigint  not null default 0,
  created_at    timestamptz not null default now()
);

comment on table shardids_catalog.cluster is 'The cluster; everything but the versions is fixed for good, old_ids_below once it is written';
comment on column shardids_catalog.cluster.engine is 'citus: this database is a Citus coordinator and the only node; Citus places the shards on its workers';
comment on column shardids_catalog.cluster.old_ids_below is 'IDs below it were issued before their tables were adopted, and say nothing of shards; null: no table was adopted';
comment on column shardids_catalog.cluster.version is 'Grows with every change of nodes, regions, placement or the directory of keys';
comment on column shardids_catalog.cluster.homes_version is 'The version of the last change of the directory of keys; 0: none';
comment on column shardids_catalog.cluster.unsettled_version is 'The version at which rows of a key last began to be in two shards, or ended to; 0: they never did';
comment on column shardids_catalog.cluster.homes_reset is 'The version at which the directory was last emptied by TRUNCATE: who has an older one reads it anew';

create table shardids_catalog.region (
  name        text        primary key,
  first_shard integer     not null,
  last_shard  integer     not null,
  created_at  timestamptz not null default now(),
  constraint region_shards check (first_shard between 0 and last_shard),
  constraint region_overlap exclude using gist (int4range(first_shard, last_shard, '[]') with &&)
);

comment on table shardids_catalog.region is 'Names for ranges of shards, which are to live on the nodes of their region alone';
comment on column shardids_catalog.region.last_shard is 'The last that belongs to it';

create table shardids_catalog.node (
  name     text        primary key,
  url      text        not null,
  added_at timestamptz not null default now(),
  region   text        constraint region_of_node references shardids_catalog.region (name)
);

comment on table shardids_catalog.node is 'The PostgreSQL databases that hold shards';
comment on column shardids_catalog.node.region is 'The region whose shards it takes; null: it takes the shards of no region';

create table shardids_catalog.placement (
  shard integer primary key,
  node  text    not null references shardids_catalog.node (name) on update cascade,
  state text    not null default 'creating' check (state in ('creating', 'active', 'lost'))
);

create index on shardids_catalog.placement (node);

comment on table shardids_catalog.placement is 'Which node holds which shard';
comment on column shardids_catalog.placement.state is 'creating: the node may not have it yet; lost: the node was replaced by a server that lacks it, and no client is sent there';

-- What a mover is about to do, written before it does it. A move without ended_at is under way or was interrupted;
-- its mover holds the advisory lock (1936220520, first 32 bits of the epoch) for as long as it lives, and writes only while
-- the epoch is its own.
create table shardids_catalog.move (
  id         bigint      generated always as identity primary key,
  shard      integer     not null,
  source     text        not null,
  target     text        not null,
  offline    boolean     not null,
  automatic  boolean     not null default false,
  size_bytes bigint,
  step       text        not null,
  epoch      uuid        not null default gen_random_uuid(),
  schema     text,
  high_water_tick bigint,
  started_at timestamptz not null default now(),
  ended_at   timestamptz,
  outcome    text        check (outcome in ('moved', 'aborted')),
  check ((ended_at is null) = (outcome is null)),
  check (target <> source)
);

create unique index on shardids_catalog.move (shard) where ended_at is null;

comment on table shardids_catalog.move is 'Moves of shards between nodes';
comment on column shardids_catalog.move.automatic is 'Whether rebalance --watch began it';
comment on column shardids_catalog.move.size_bytes is 'The size of the shard''s tables and indexes when the move began; null: not known';
comment on column shardids_catalog.move.step is 'The last step that was begun';
comment on column shardids_catalog.move.epoch is 'Of the leases of the command that works at the move, or last did';
comment on column shardids_catalog.move.high_water_tick is 'The tick above which the target issues IDs, once it is the owner';
comment on column shardids_catalog.move.schema is 'What pg_dump gave for the shard when the target''s tables were made; null when the move is over';

-- Written in the transaction that places the shard on its home, before that is activated. A loss without completed_at is under
-- way or was interrupted: it keeps the shard's lease, and node replace completes it.
create table shardids_catalog.loss (
  -- In one order with the moves.
  id              bigint      primary key default nextval('shardids_catalog.move_id_seq'),
  shard           integer     not null,
  node            text        not null,
  home            text        not null,
  high_water_tick bigint      not null,
  epoch           uuid        not null,
  accepted_at     timestamptz not null default clock_timestamp(),
  completed_at    timestamptz
);

create unique index on shardids_catalog.loss (shard) where completed_at is null;

comment on table shardids_catalog.loss is 'Shards that were lost with a node and whose loss was accepted, with the homes that they were given';
comment on column shardids_catalog.loss.node is 'The node that the shard was lost with';
comment on column shardids_catalog.loss.home is 'The node that has it since: its newest copy was there, or it was created there again, empty';
comment on column shardids_catalog.loss.high_water_tick is 'The tick above which the home issues IDs';
comment on column shardids_catalog.loss.epoch is 'Of the leases of the command that accepted the loss';
comment on column shardids_catalog.loss.completed_at is 'When the home was activated and old replication removed; null: not yet';

create table shardids_catalog.skipped (
  shard      integer     not null,
  first_tick bigint      not null,
  last_tick  bigint      not null check (last_tick >= first_tick),
  at         timestamptz not null default now(),
  primary key (shard, first_tick)
);

comment on table shardids_catalog.skipped is
  'Ticks that shards issued by a wrong clock, and pass over when their time comes: every node has the same in shardids.skipped';
comment on column shardids_catalog.skipped.at is 'When shardids shard reset-clock wrote it';

insert into shardids_catalog.cluster
  (id, layout_name, epoch_ms, time_bits, shard_bits, sequence_bits, schema_prefix, shard_count, engine)
select current_setting('shardids.cluster')::uuid, current_setting('shardids.layout_name'),
       current_setting('shardids.epoch_ms')::bigint, current_setting('shardids.time_bits')::integer,
       current_setting('shardids.shard_bits')::integer, current_setting('shardids.sequence_bits')::integer,
       current_setting('shardids.schema_prefix'), current_setting('shardids.shard_count')::integer,
       coalesce(nullif(current_setting('shardids.engine', true), ''), 'postgresql');

create function shardids_catalog.changed() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster set version = version + 1 returning version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;

comment on function shardids_catalog.changed() is 'Counts the version up and notifies channel shardids_placement';

create trigger changed after insert or update or delete on shardids_catalog.node
for each statement execute function shardids_catalog.changed();

create trigger changed after insert or update or delete on shardids_catalog.region
for each statement execute function shardids_catalog.changed();

create trigger changed after insert or update or delete on shardids_catalog.placement
for each statement execute function shardids_catalog.changed();

-- Not the installers' lock: where this database is a node too, granting there waits for that one. Any role that can connect
-- can hold it: so nobody waits for ever, and who does not get it is told whose it is.
create function shardids_catalog.wait_for_grants(patience interval default current_setting('lock_timeout')::interval) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '10s' as $$
begin
  if patience > '0' and patience < '10s' then
    perform set_config('lock_timeout', (extract(epoch from patience) * 1000)::integer::text, true);
  end if;
  perform pg_advisory_xact_lock(1936220519);
exception when lock_not_available then
  raise lock_not_available using
    message = format('advisory lock 1936220519, for grants in the catalog, is held by %s',
      coalesce((select string_agg(format('process %s of role "%s"', a.pid, a.usename), ', ')
                from pg_locks l join pg_stat_activity a using (pid)
                where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.classid = 0 and l.objid = 1936220519
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())), 'a session that has just ended')),
    hint = 'Try again. A session that holds it for long can be ended with pg_terminate_backend(pid).';
end
$$;

comment on function shardids_catalog.wait_for_grants(interval) is 'Takes the lock of who changes the catalog''s grants, or names its holder after 10 s';

revoke execute on function shardids_catalog.wait_for_grants(interval) from public;

-- What a router needs: to read. It can change nothing.
create function shardids_catalog.grant_usage(role name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform shardids_catalog.wait_for_grants();
  execute format('grant usage on schema shardids_catalog to %I', role);
  execute format(
    'grant select on shardids_catalog.cluster, shardids_catalog.node, shardids_catalog.region, shardids_catalog.placement,'
    ' shardids_catalog.query_node, shardids_catalog.old_id_rule, shardids_catalog.old_id_directory, shardids_catalog.old_id_list,'
    ' shardids_catalog.lookup, shardids_catalog.reference_writer, shardids_catalog.route, shardids_catalog.key_home,'
    ' shardids_catalog.key_home_gone, shardids_catalog.moved_key, shardids_catalog.moved_id_list to %I', role);
  execute format('grant select (source, target, is_unsettled, ended_at) on shardids_catalog.key_move to %I', role);
  execute format('grant execute on function shardids_catalog.shard_for_key(text, text), shardids_catalog.percent_decoded(text) to %I', role);
end
$$;

comment on function shardids_catalog.grant_usage(name) is 'Lets a role read the catalog';

revoke execute on function shardids_catalog.grant_usage(name) from public;
