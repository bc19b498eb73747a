-- Purpose:    what shardids doctor asks after moves: slots, publications and subscriptions of moves, and tables of
--             active shards that still have the write barrier of one. It is closed while id_offset is negative.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select 'slot' as kind,
       r.slot_name::text as name,
       null::integer as shard,
       case when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn)::bigint end as kept_bytes
from pg_replication_slots r
where starts_with(r.slot_name, 'shardids_') and not starts_with(r.slot_name, 'shardids_ref_') and not starts_with(r.slot_name, 'shardids_cdc_') and r.database = current_database()
union all
select 'publication', p.pubname, null, null
from pg_publication p
where starts_with(p.pubname, 'shardids_') and p.pubname not in ('shardids_ref', 'shardids_cdc')
union all
select 'subscription', s.subname, null, null
from pg_subscription s
where starts_with(s.subname, 'shardids_') and not starts_with(s.subname, 'shardids_ref_') and s.subdbid = (select oid from pg_database where datname = current_database())
union all
select case
         when not exists (select from pg_class o where o.oid = s.id_offset) then 'barrier'
         when coalesce(pg_sequence_last_value(s.id_offset), -1) < 0 then 'closed barrier'
         else 'barrier'
       end,
       c.relname, s.id, null
from shardids.shard s
join pg_namespace n on n.nspname = s.schema
join pg_class c on c.relnamespace = n.oid
join pg_trigger t on t.tgrelid = c.oid and t.tgname = 'shardids_barrier' and t.tgenabled <> 'D'
where s.state = 'active'
order by 1, 2, 3;
