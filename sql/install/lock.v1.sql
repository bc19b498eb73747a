-- Purpose:    what the installation of a tree of shardids' own objects begins with.
-- Locks:      advisory lock 1936220518 until the end of the transaction; whoever does not get it within 10 s, or the
--             session's lock_timeout if that is shorter, is told who holds it.
-- Privileges: none.

do $do$
declare
  patience constant text := pg_catalog.current_setting('lock_timeout');
begin
  if not patience::interval between '00:00:00.001' and '00:00:10' then
    perform pg_catalog.set_config('lock_timeout', '10s', true);
  end if;
  begin
    perform pg_catalog.pg_advisory_xact_lock(1936220518);
  exception when lock_not_available then
    raise lock_not_available using
      message = pg_catalog.format('the installers'' advisory lock 1936220518 is held by %s',
        coalesce((select pg_catalog.string_agg(pg_catalog.format('process %s of role "%s"', a.pid, a.usename), ', ')
                  from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a using (pid)
                  where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.classid = 0::oid and l.objid = 1936220518::oid
                    and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())),
                 'a session that has just ended')),
      hint = 'Try again. A session that holds it for long can be ended with pg_terminate_backend(pid).';
  end;
  perform pg_catalog.set_config('lock_timeout', patience, true);
  -- On Citus: shardids' own objects are the coordinator's alone. Elsewhere nobody reads the setting.
  perform pg_catalog.set_config('citus.enable_ddl_propagation', 'off', true);
end
$do$;
