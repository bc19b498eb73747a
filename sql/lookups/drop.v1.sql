-- Purpose:    drops a look-up's claims, functions and triggers in a shard (shardids lookup drop). Repeatable.
-- Settings:   shardids.schema, the shard's schema; shardids.table; shardids.claims, the name of all that is dropped
-- Locks:      ACCESS EXCLUSIVE on the claims and on the table until commit.
-- Privileges: ownership of what is dropped.

do $do$
declare
  object record;
begin
  for object in
    select format('drop trigger %I on %s', g.tgname, g.tgrelid::regclass) as statement
    from pg_trigger g
    where g.tgname = current_setting('shardids.claims') and g.tgfoid = 'shardids.refuse_unclaimed'::regproc
      and g.tgparentid = 0 and g.tgrelid in (
        select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = current_setting('shardids.schema'))
    union all
    select format('drop function %s', p.oid::regprocedure) from pg_proc p
    where p.proname = current_setting('shardids.claims')
      and p.pronamespace = (select n.oid from pg_namespace n where n.nspname = current_setting('shardids.schema'))
    union all
    select format('drop table if exists %I.%I', current_setting('shardids.schema'), current_setting('shardids.claims'))
  loop
    execute object.statement;
  end loop;
end
$do$;
