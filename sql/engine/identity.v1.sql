-- Purpose:    which server this is, and which of its incarnations: how a copy and a restart are noticed.
-- Locks:      none.
-- Privileges: CREATE on schema shardids. With pg_read_all_stats (or superuser) a crash of one backend,
--             after which the server recovers without a new postmaster, is told from normal running.
--
-- server() and offset_base() are constant as long as a session lasts, and only for that. They are
-- declared immutable so that a PL/pgSQL function's cached expressions fold them into constants: the
-- check that every draw makes of them costs one addition. Never use them in an index or a stored value.

create function shardids.server() returns text
language plpgsql immutable parallel safe security definer set search_path = pg_catalog, pg_temp as $$
begin
  -- The table has another OID once a dump of the whole database was restored in the original's place.
  return format('%s/%s/%s', (select system_identifier from pg_control_system()),
                (select oid from pg_database where datname = current_database()),
                'shardids.shard'::regclass::oid);
end
$$;

comment on function shardids.server() is
  'System identifier of this server, OID of this database, and OID of table shardids.shard';

-- The value of a shard's id_offset is incarnation() + offset in ms. Above the 42 bits of the largest offset are 21 of a mark of the
-- server's present incarnation: the two lowest bits of the timeline, and 19 of a hash, 64 at least. An id_offset written in
-- another incarnation or on another server reads as a time outside of the layout, so the draw goes to advance(), which looks closer.
create function shardids.incarnation() returns bigint
language plpgsql volatile parallel safe security definer set search_path = pg_catalog, pg_temp as $$
declare
  -- A right that the owner gets after the installation makes no other incarnation. One that it loses makes one other.
  sees_all boolean := (select n.sees_all from shardids.node n)
                      and pg_has_role(current_user, 'pg_read_all_stats', 'usage');
  checkpointer_start timestamptz;
begin
  -- Right after a crash the first sessions may come before the new checkpointer is listed; one that went
  -- on without it would disagree with all later ones.
  while sees_all and checkpointer_start is null loop
    select backend_start into checkpointer_start from pg_stat_activity where backend_type = 'checkpointer';
    if checkpointer_start is null then
      perform pg_sleep(0.001), pg_stat_clear_snapshot();
    end if;
  end loop;
  return ((case when pg_is_in_recovery() then 0 else shardids.timeline() & 3 end::bigint << 19)
          + greatest(64, hashtextextended(
              concat_ws(' ', shardids.server(), extract(epoch from pg_postmaster_start_time()),
                        extract(epoch from checkpointer_start)), 0) & 524287)) << 42;
end
$$;

comment on function shardids.incarnation() is 'What this incarnation of the server adds to the stored offset of a shard';

create function shardids.offset_base() returns bigint
language plpgsql immutable parallel safe security definer set search_path = pg_catalog, pg_temp as $$
begin
  return shardids.incarnation();
end
$$;

comment on function shardids.offset_base() is 'shardids.incarnation() when the session first asked';

create function shardids.timeline() returns integer
language sql volatile parallel safe
return ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;

comment on function shardids.timeline() is 'WAL timeline of this server; it changes when a standby is promoted';
