-- Purpose:    the publication and the slot of change capture on a node, as they are. Nothing is installed.
-- Settings:   shardids.node: the node's name; shardids.slot: the name of its slot
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none; pg_read_all_stats to see the command of a consumer that is another role's.

select current_setting('shardids.node') as node,
       current_setting('shardids.slot') as slot,
       exists (select from pg_publication p where p.pubname = 'shardids_cdc') as published,
       r.slot_name is not null as there,
       coalesce(r.plugin = 'pgoutput' and r.database = current_database(), true) as is_ours,
       coalesce(r.wal_status = 'lost', false) as lost,
       r.active_pid as pid,
       case when not pg_is_in_recovery() then (pg_current_wal_lsn() - r.restart_lsn)::bigint end as kept_bytes,
       -- There since version 17.
       (to_jsonb(r) ->> 'failover')::boolean as failover,
       coalesce((select a.query from pg_stat_activity a where a.pid = r.active_pid), '') as asked
from (select) one
left join pg_replication_slots r on r.slot_name = current_setting('shardids.slot');
