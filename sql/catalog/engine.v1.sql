-- Purpose:    on Citus, refuses in the catalog whatever would make a second node, or do by shardids what Citus does itself.
--             Commands refuse earlier, by name (shardids/beside/citus.py); this is for every other client of the catalog.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

create function shardids_catalog.refuse_beside_citus() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if (select c.engine from shardids_catalog.cluster c) = 'citus'
     and (tg_table_name <> 'node' or exists (select from shardids_catalog.node)) then
    raise feature_not_supported using
      message = format('%s can''t be done in a cluster on Citus (table shardids_catalog.%I)', tg_argv[0], tg_table_name),
      hint = tg_argv[1];
  end if;
  return null;
end
$$;

comment on function shardids_catalog.refuse_beside_citus() is 'Refuses rows of tables that a cluster on Citus does not use';

create trigger refuse_beside_citus before insert on shardids_catalog.node for each statement
execute function shardids_catalog.refuse_beside_citus('adding a node', 'Add a worker to Citus: select citus_add_node(host, port)');

create trigger refuse_beside_citus before insert on shardids_catalog.move for each statement
execute function shardids_catalog.refuse_beside_citus('moving by copies', 'shardids shard move SHARD --to HOST:PORT moves it by Citus.');

create trigger refuse_beside_citus before insert on shardids_catalog.loss for each statement
execute function shardids_catalog.refuse_beside_citus('a home for a lost shard', 'Promote a standby of the worker, and call citus_update_node.');

create trigger refuse_beside_citus before insert on shardids_catalog.region for each statement
execute function shardids_catalog.refuse_beside_citus('a region', 'Citus chooses among all of its workers.');

create trigger refuse_beside_citus before insert on shardids_catalog.query_node for each statement
execute function shardids_catalog.refuse_beside_citus('a query node', 'Send statements over several shards to the coordinator.');

create trigger refuse_beside_citus before insert on shardids_catalog.reference_writer for each statement
execute function shardids_catalog.refuse_beside_citus('a reference table of shardids', 'Make one of Citus: select create_reference_table(TABLE)');

create trigger refuse_beside_citus before insert on shardids_catalog.lookup for each statement
execute function shardids_catalog.refuse_beside_citus('a look-up', 'It takes triggers on shards'' tables, which Citus does not have.');

create trigger refuse_beside_citus before insert on shardids_catalog.adoption for each statement
execute function shardids_catalog.refuse_beside_citus('an adoption', 'Load the rows by COPY, through the coordinator.');
