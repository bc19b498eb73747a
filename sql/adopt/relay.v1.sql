-- Purpose:    the schema of a relay: a database that follows one that is adopted, gives each row its shard, and that the
--             nodes follow. The functions of its triggers are here as well.
-- Settings:   shardids.adoption: the name of the adoption, with which its objects are found again.
-- Locks:      none beyond those of CREATE.
-- Privileges: ownership of schema shardids_relay.

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

revoke execute on function shardids_relay.drop_tables() from public;

-- The rows of a table that is truncated at the source are deleted one by one, as the nodes delete them: a TRUNCATE there
-- would need every table that refers to it.
create function shardids_relay.empty() returns trigger
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format('delete from %s', tg_relid::regclass);
  return null;
end
$$;

comment on function shardids_relay.empty() is 'Deletes all rows of a table before it is truncated, for the nodes';

revoke execute on function shardids_relay.empty() from public;

do $$
begin
  execute format('comment on schema shardids_relay is %L', current_setting('shardids.adoption'));
end
$$;
