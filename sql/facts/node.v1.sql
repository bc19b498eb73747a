-- Purpose:    what a reading asks of a node: one row, about its server and what others left there. Nothing is
--             installed.
-- Locks:      ACCESS SHARE on shardids.node.
-- Privileges: USAGE on schema shardids, SELECT on shardids.node.

with here as (
  select d.oid, case when not pg_is_in_recovery() then pg_current_wal_lsn() end as position
  from pg_database d where d.datname = current_database()),
slots as (
  select case when starts_with(r.slot_name, 'shardids_move_') then 'move'
              when starts_with(r.slot_name, 'shardids_adopt_') then 'adoption'
              when starts_with(r.slot_name, 'shardids_ref_') then 'reference'
              else 'other' end as kind,
         count(*) as slots,
         max(pg_wal_lsn_diff(h.position, coalesce(r.confirmed_flush_lsn, r.restart_lsn)))::bigint as lag_bytes,
         max(pg_wal_lsn_diff(h.position, r.restart_lsn))::bigint as kept_bytes,
         count(*) filter (where r.wal_status in ('unreserved', 'lost')) as lost
  from pg_replication_slots r
  join here h on r.datoid is null or r.datoid = h.oid
  group by 1),
-- What holds for everybody's new sessions. That of this session may be its role's, or older than the database's.
read_only as (
  select coalesce(
           (select split_part(o.option, '=', 2)::boolean
            from pg_db_role_setting r
            cross join unnest(r.setconfig) o (option)
            join here h on r.setdatabase in (0, h.oid)
            where r.setrole = 0 and starts_with(o.option, 'default_transaction_read_only=')
            order by r.setdatabase desc limit 1),
           (select p.reset_val::boolean
            from pg_settings p
            where p.name = 'default_transaction_read_only'
              and p.source in ('default', 'environment variable', 'configuration file', 'command line')),
           false) as is_default),
-- What copies a table has its own row, with relid.
subscriptions as (
  select case when starts_with(s.subname, 'shardids_move_') then 'move'
              when starts_with(s.subname, 'shardids_adopt_') then 'adoption'
              when starts_with(s.subname, 'shardids_ref_') then 'reference'
              else 'other' end as kind,
         count(*) as subscriptions,
         count(*) filter (where w.pid is null) as stopped,
         max(extract(epoch from clock_timestamp() - w.last_msg_receipt_time))::float8 as silent_s
  from pg_subscription s
  join here h on s.subdbid = h.oid
  left join pg_stat_subscription w on w.subid = s.oid and w.relid is null
  group by 1),
prepared as (
  select case when starts_with(x.gid, 'shardids:' || n.cluster || ':') then 'shardids' else 'other' end as kind,
         count(*) as transactions,
         max(extract(epoch from clock_timestamp() - x.prepared))::float8 as oldest_s
  from pg_prepared_xacts x
  cross join shardids.node n
  where x.database = current_database()
  group by 1)
select n.name,
       n.cluster,
       n.on_copy,
       (select p.source from pg_settings p where p.name = 'default_transaction_read_only') as read_only_source,
       current_database()::text as database,
       session_user::text as role,
       extract(epoch from n.max_ahead)::float8 as max_ahead_s,
       extract(epoch from n.safety_margin)::float8 as safety_margin_s,
       pg_is_in_recovery() as is_standby,
       not (pg_is_in_recovery() or (select r.is_default from read_only r)) as is_writable,
       (select coalesce(sum(d.numbackends), 0)::integer from pg_stat_database d where d.datid <> 0) as connections,
       current_setting('max_connections')::integer as most_connections,
       (select coalesce(json_object_agg(p.kind, json_build_array(p.transactions, p.oldest_s)), '{}') from prepared p) as prepared,
       (select coalesce(json_object_agg(s.kind, json_build_array(s.slots, s.lag_bytes, s.kept_bytes, s.lost)), '{}') from slots s) as slots,
       (select coalesce(json_object_agg(s.kind, json_build_array(s.subscriptions, s.stopped, s.silent_s)), '{}')
        from subscriptions s) as subscriptions
from shardids.node n;
