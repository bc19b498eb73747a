-- Purpose:    the write barrier of a database that is being adopted: one function, one sequence, a trigger on each table.
-- Locks:      none beyond those of CREATE. Every write to a table with a barrier: advisory lock (1936220524, 0), shared,
--             until commit.
-- Privileges: ownership of schema shardids_adopt.
--
-- The barrier is closed while shardids_adopt.closed is 1, which is not transactional: no transaction is too old to see it.
-- Whoever holds the advisory lock exclusively knows that every transaction that has passed the barrier has ended.

create sequence shardids_adopt.closed as integer minvalue 0 maxvalue 1 start 0;

-- As the owner: whoever writes to a table need not have any right on this schema.
create function shardids_adopt.pass_barrier() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform pg_advisory_xact_lock_shared(1936220524, 0);
  if coalesce(pg_sequence_last_value('shardids_adopt.closed'::regclass), 0) <> 0 then
    raise exception using
      errcode = 'SI003',
      message = format('table %I.%I was taken into a cluster, and is no longer written to here', tg_table_schema, tg_table_name),
      hint = 'Connect to the cluster: its rows are in the shards.';
  end if;
  return null;
end
$$;

comment on function shardids_adopt.pass_barrier() is 'Lets writes pass as long as the cluster that adopts this database has not taken over';

revoke execute on function shardids_adopt.pass_barrier() from public;
