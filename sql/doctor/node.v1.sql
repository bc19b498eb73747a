-- Purpose:    what shardids doctor asks of a node: one row, its engine, settings and state. Nothing is installed.
-- Locks:      ACCESS SHARE on the tables of schema shardids.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select n.name,
       n.cluster,
       shardids.epoch_ms() as epoch_ms,
       shardids.time_bits() as time_bits,
       shardids.shard_bits() as shard_bits,
       shardids.sequence_bits() as sequence_bits,
       shardids.schema_prefix() as schema_prefix,
       n.on_copy,
       (extract(epoch from n.max_ahead) * 1000)::bigint as max_ahead_ms,
       (extract(epoch from n.safety_margin) * 1000)::bigint as safety_margin_ms,
       (extract(epoch from n.max_step) * 1000)::bigint as max_step_ms,
       shardids.ms_of(n.clock_confirmed_at) as clock_confirmed_ms,
       array(select v.version_num::text from shardids.shardids_version v order by 1) as revisions,
       current_setting('server_version_num')::integer as server_version,
       pg_is_in_recovery() as is_standby,
       current_setting('default_transaction_read_only')::boolean as is_read_only,
       (select source from pg_settings where name = 'default_transaction_read_only') as read_only_source,
       -- Of a standby whose state the role may not see, it is taken that COMMITs wait for it.
       case when current_setting('synchronous_standby_names') <> '' and not pg_is_in_recovery() then
         greatest(0, coalesce(substring(current_setting('synchronous_standby_names') from '(\d+)\s*\(')::integer, 1)
                     - (select count(*)::integer from pg_stat_replication r where r.sync_state is distinct from 'async'))
         else 0 end as missing_standbys,
       current_database()::text as database,
       session_user::text as role
from shardids.node n;
