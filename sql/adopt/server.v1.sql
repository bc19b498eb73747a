-- Purpose:    what shardids adopt plan asks of the server: what logical replication needs, and what it does not copy.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

select current_setting('server_version_num')::integer as version,
       pg_is_in_recovery() as is_standby,
       current_setting('wal_level') as wal_level,
       current_setting('server_encoding') as encoding,
       current_setting('max_replication_slots')::integer as slots,
       (select count(*) from pg_replication_slots)::integer as used_slots,
       current_setting('max_wal_senders')::integer as senders,
       (select count(*) from pg_stat_replication)::integer as used_senders,
       (select count(*) from pg_largeobject_metadata) as large_objects,
       (select count(*) from pg_prepared_xacts where database = current_database())::integer as prepared_transactions,
       to_regnamespace('shardids') is not null or to_regnamespace('shardids_catalog') is not null as is_of_cluster,
       to_regnamespace('shardids_adopt') is not null as has_barrier,
       -- Counters of a database that was never reset are those since the server's files were made or restored: unknown.
       extract(epoch from now() - (select stats_reset from pg_stat_database where datname = current_database()))::float8
         as counted_s;
