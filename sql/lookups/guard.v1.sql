-- Purpose:    makes the triggers of a look-up in a shard: statements that write the column have to be those of a session that
--             claims (shardids lookup backfill). On a partitioned or inherited table also on its parts. Repeatable.
-- Settings:   shardids.schema, the shard's schema; shardids.table and shardids.column; shardids.claims, the trigger's name
-- Locks:      SHARE ROW EXCLUSIVE on the tables until commit.
-- Privileges: ownership of the tables; EXECUTE on shardids.refuse_unclaimed().
--
-- A session begins its statement with a comment, since the trigger runs before the value is claimed, and since a setting of
-- the transaction would also let other statements of it pass, or cost a round trip. It protects from oversight: any client can write
-- the comment. Triggers of replicas (moves, subscriptions) and DELETE need no claim.

do $do$
declare
  name constant text := current_setting('shardids.claims');
  part regclass;
begin
  for part in
    with recursive tree (id) as (
      select format('%I.%I', current_setting('shardids.schema'), current_setting('shardids.table'))::regclass::oid
      union select h.inhrelid from pg_inherits h join tree t on t.id = h.inhparent)
    select t.id::regclass from tree t join pg_class c on c.oid = t.id where c.relkind in ('r', 'p')
  loop
    execute format(
      'create or replace trigger %I before insert or update of %I on %s for each statement'
      ' when (not starts_with(coalesce(current_query(), ''''), ''/* shardids claims */'')'
      ' and coalesce(current_setting(''shardids.unclaimed_writes'', true), '''') <> ''allowed'')'
      ' execute function shardids.refuse_unclaimed(%L, %L)',
      name, current_setting('shardids.column'), part, current_setting('shardids.column'),
      current_setting('shardids.table') || '.' || current_setting('shardids.column'));
  end loop;
end
$do$;
