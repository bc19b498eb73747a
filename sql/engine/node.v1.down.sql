-- Purpose:    takes the engine away from a database without shards; refuses while there are any.
-- Locks:      ACCESS EXCLUSIVE on shardids.shard and shardids.node.
-- Privileges: ownership of schema shardids.

-- Refuses while there are reference tables.
drop schema shardids_ref;

-- Views over its shards, for the query node.
drop schema if exists shardids_local cascade;

do $do$
declare
  held bigint;
  object record;
begin
  lock table shardids.shard;
  select count(*) into held from shardids.shard;
  if held > 0 then
    raise exception using
      errcode = 'SI007', message = format('node "%s" holds %s shards; its engine stays', (select name from shardids.node), held),
      hint = 'Move or drop the shards first.';
  end if;
  drop function shardids.return_leases(integer[], uuid), shardids.home_of(text, text);
  drop table shardids.key_home, shardids.shard, shardids.node, shardids.skipped, shardids.lease, shardids.key_change, shardids.key_return,
    shardids.index_aside, shardids.key_arrival;
  drop sequence shardids.step_1, shardids.step_2, shardids.step_3, shardids.step_4,
    shardids.before_1, shardids.before_2, shardids.before_3, shardids.before_4, shardids.step_dropped, shardids.step_latest;
  -- Later functions depend on earlier ones.
  for object in
    select p.oid::regprocedure as name from pg_proc p
    where p.pronamespace = 'shardids'::regnamespace order by p.oid desc
  loop
    execute format('drop function %s', object.name);
  end loop;
end
$do$;
