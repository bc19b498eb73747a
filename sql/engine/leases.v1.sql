-- Purpose:    leases: which command may change a shard of this node. A move holds the shard's lease on both of its nodes.
-- Locks:      take_leases: advisory lock (1936220533, shard), exclusive, until commit, for each lease that is taken over.
--             require_lease: the same, shared. enter_lease: the same, exclusive.
-- Privileges: CREATE on schema shardids; to call them, membership in its owner.
--
-- A lease is a row: it outlives the process that holds it, and no transaction has to stay open for it. Its epoch is drawn
-- once by each command. A transaction that changes a shard first requires the lease by its epoch, and keeps it until it ends:
-- so a process that was stopped, and wakes when another has taken the lease over, changes nothing. Whether a holder lives
-- shows in the catalog, where it holds advisory lock (1936220520, first 32 bits of the epoch).

create table shardids.lease (
  shard    integer     primary key check (shard between 0 and (1 << shardids.shard_bits()) - 1),
  epoch    uuid        not null,
  purpose  text        not null,
  holder   text        not null,
  began_at timestamptz not null default clock_timestamp()
);

comment on table shardids.lease is 'The commands that are changing shards of this node; change it with shardids.take_leases and shardids.return_leases only';
comment on column shardids.lease.epoch is 'Drawn once by each command';
comment on column shardids.lease.holder is 'The user, machine and process of the command';

-- In the order of the shards, so that two commands do not wait for each other. Of ended: nobody begins a transaction under
-- such a lease once it is taken over, and one that is under way keeps it from being taken.
create function shardids.take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[])
returns table (shard integer, other_epoch uuid, other_purpose text, other_holder text, other_began_at timestamptz, pid integer)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  wanted integer;
  held shardids.lease;
begin
  foreach wanted in array array(select distinct s from unnest(shards) s order by s) loop
    loop
      insert into shardids.lease (shard, epoch, purpose, holder)
      values (wanted, take_leases.epoch, take_leases.purpose, take_leases.holder) on conflict do nothing;
      exit when found;
      select l.* into held from shardids.lease l where l.shard = wanted for update;
      -- Otherwise it was returned meanwhile.
      exit when found;
    end loop;
    continue when held.shard is distinct from wanted or held.epoch = take_leases.epoch;
    if held.epoch = any (ended) and pg_try_advisory_xact_lock(1936220533, wanted) then
      update shardids.lease l
      set epoch = take_leases.epoch, purpose = take_leases.purpose, holder = take_leases.holder, began_at = clock_timestamp()
      where l.shard = wanted;
      continue;
    end if;
    shard := wanted;
    other_epoch := held.epoch;
    other_purpose := held.purpose;
    other_holder := held.holder;
    other_began_at := held.began_at;
    pid := (select min(l.pid) from pg_locks l
            where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid = 1936220533 and l.objid = wanted::oid
              and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    return next;
  end loop;
end
$$;

comment on function shardids.take_leases(integer[], uuid, text, text, uuid[]) is
  'Takes the leases of shards that nobody holds, or one of the ended epochs; returns those of others, with a session that works under one';

create function shardids.return_leases(shards integer[], epoch uuid) returns void
language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  delete from shardids.lease l where l.shard = any (shards) and l.epoch = return_leases.epoch;
end;

comment on function shardids.return_leases(integer[], uuid) is 'Returns the leases of shards, as far as they are of this epoch';

create function shardids.refuse_lease(shard integer, epoch uuid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  held shardids.lease;
  node constant text := (select n.name from shardids.node n);
begin
  select l.* into held from shardids.lease l where l.shard = refuse_lease.shard;
  if epoch is null and held.shard is null then
    return;
  elsif epoch is null then
    raise exception using errcode = 'SI008',
      message = format('shard %s is being changed: %s by %s [node "%s"]', shard, held.purpose, held.holder, node),
      hint = 'Wait until it has ended; if its process is gone, the next shardids command that changes the shard takes its lease over.';
  elsif held.epoch is distinct from epoch then
    raise exception using errcode = 'SI015',
      message = format('shard %s: this command no longer holds the shard''s lease%s [node "%s"]', shard,
        case when held.shard is null then '' else format(', which was taken over: %s by %s', held.purpose, held.holder) end, node),
      hint = 'Its process was stopped, or cut off from the catalog, for so long that it counted as gone. Nothing more was changed.';
  end if;
end
$$;

comment on function shardids.refuse_lease(integer, uuid) is
  'Refuses unless the lease of a shard is of this epoch, or with null unless nobody holds it; the caller has the advisory lock';

-- Several sessions of a move work at once.
create function shardids.require_lease(shard integer, epoch uuid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not pg_try_advisory_xact_lock_shared(1936220533, shard) then
    perform shardids.wait_for_lock(1936220533, shard, shared => true);
  end if;
  perform shardids.refuse_lease(shard, epoch);
end
$$;

comment on function shardids.require_lease(integer, uuid) is
  'Refuses unless the lease of a shard is of this epoch, and keeps it so until the end of the transaction';

create function shardids.enter_lease(shard integer, epoch uuid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not pg_try_advisory_xact_lock(1936220533, shard) then
    raise exception using errcode = 'SI008',
      message = format('shard %s is being changed by another session%s [node "%s"]', shard,
        (select string_agg(format(' (%sprocess %s)', nullif(a.application_name, '') || ', ', a.pid), '')
         from pg_locks l join pg_stat_activity a using (pid)
         where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
           and l.classid = 1936220533 and l.objid = shard::oid and l.objsubid = 2 and l.granted),
        (select n.name from shardids.node n)),
      hint = 'Wait until it has ended, and run the command again.';
  end if;
  perform shardids.refuse_lease(shard, epoch);
end
$$;

comment on function shardids.enter_lease(integer, uuid) is
  'As require_lease, for a session that works alone; with null it needs no lease, and nobody may hold one';

revoke execute on function
  shardids.take_leases(integer[], uuid, text, text, uuid[]), shardids.return_leases(integer[], uuid),
  shardids.refuse_lease(integer, uuid), shardids.require_lease(integer, uuid), shardids.enter_lease(integer, uuid)
  from public;
