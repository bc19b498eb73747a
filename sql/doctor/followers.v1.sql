-- Purpose:    what shardids doctor asks the writer of reference tables about the nodes that follow it.
-- Settings:   shardids.names: the slots, as an array
-- Locks:      none.
-- Privileges: none.

select r.slot_name::text as name,
       coalesce(r.wal_status, '') = 'lost' as is_lost,
       greatest(pg_current_wal_lsn() - r.confirmed_flush_lsn, 0)::bigint as lag_bytes,
       (pg_current_wal_lsn() - r.restart_lsn)::bigint as kept_bytes
from pg_replication_slots r
where r.slot_name = any (current_setting('shardids.names')::name[]);
