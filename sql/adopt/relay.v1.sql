-- Purpose:    the schema of a relay: a database that follows one that is adopted, gives each row its shard, and that the
--             nodes follow. The functions of triggers, which adopt/relay_tables.py writes, are here as well.
-- Settings:   shardids.adoption: the name of the adoption, with which its objects are found again.
-- Locks:      none beyond those of CREATE.
-- Privileges: ownership of schema shardids_relay; to subscribe: superuser, or pg_create_subscription.

-- Errors are raised again: the context of the original holds the whole statement, and that a password. Transactions are
-- applied one after the other: what a row refers to is that which it referred to at the source.
create function shardids_relay.follow(name name, conninfo text, options text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_subscription s join pg_database d on d.oid = s.subdbid
                 where s.subname = name and d.datname = current_database()) then
    execute format('create subscription %1$I connection %2$L publication %1$I '
                   'with (create_slot = false, binary = false, streaming = off, %3$s)', name, conninfo, options);
  end if;
exception when others then
  raise exception using errcode = sqlstate, message = sqlerrm;
end
$$;

comment on function shardids_relay.follow(name, text, text) is 'Subscribes to a publication of the database that is adopted';

create function shardids_relay.unfollow(name name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from pg_subscription s join pg_database d on d.oid = s.subdbid
             where s.subname = name and d.datname = current_database()) then
    execute format('alter subscription %I disable', name);
    execute format('alter subscription %I set (slot_name = none)', name);
    execute format('drop subscription %I', name);
  end if;
end
$$;

comment on function shardids_relay.unfollow(name) is 'Drops a subscription of follow';

-- The schema goes last: an adoption that is undone again finds what is left by it.
create function shardids_relay.drop_tables() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  adoption constant text := obj_description('shardids_relay'::regnamespace, 'pg_namespace');
  name text;
begin
  for name in
    select c.oid::regclass from pg_class c
    join pg_description d on d.classoid = 'pg_class'::regclass and d.objoid = c.oid and d.objsubid = 0
    where c.relkind = 'r' and d.description = adoption
  loop
    execute format('drop table %s', name);
  end loop;
  for name in
    select n.nspname from pg_namespace n
    join pg_description d on d.classoid = 'pg_namespace'::regclass and d.objoid = n.oid
    where d.description = adoption and n.nspname <> 'shardids_relay'
      and not exists (select from pg_depend e where e.refclassid = 'pg_namespace'::regclass and e.refobjid = n.oid)
  loop
    execute format('drop schema %I', name);
  end loop;
end
$$;

comment on function shardids_relay.drop_tables() is 'Drops the tables that an adoption has made on the relay, and their schemas if nothing else is in them';

revoke execute on function
  shardids_relay.follow(name, text, text), shardids_relay.unfollow(name), shardids_relay.drop_tables()
  from public;

do $$
begin
  execute format('comment on schema shardids_relay is %L', current_setting('shardids.adoption'));
end
$$;
