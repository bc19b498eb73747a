-- Purpose:    takes away what catalog.v1.sql made: the cluster forgets its nodes and its placement.
-- Locks:      ACCESS EXCLUSIVE on the catalog's tables.
-- Privileges: ownership of schema shardids_catalog.

drop view shardids_catalog.route;
drop function shardids_catalog.shard_for_key(text, text), shardids_catalog.percent_decoded(text);
drop table shardids_catalog.shard_pin, shardids_catalog.key_pin, shardids_catalog.moved_id_list, shardids_catalog.moved_key, shardids_catalog.key_home, shardids_catalog.key_home_gone, shardids_catalog.recorded_schema, shardids_catalog.recorded_node, shardids_catalog.reference_deletion, shardids_catalog.reference_table, shardids_catalog.reference_writer,
  shardids_catalog.lookup, shardids_catalog.adoption, shardids_catalog.old_id_filling, shardids_catalog.old_id_list, shardids_catalog.old_id_directory, shardids_catalog.old_id_rule, shardids_catalog.query_node,
  shardids_catalog.loss, shardids_catalog.move, shardids_catalog.key_move, shardids_catalog.skipped, shardids_catalog.placement, shardids_catalog.node, shardids_catalog.region,
  shardids_catalog.cluster;
drop function shardids_catalog.key_digest(text, text), shardids_catalog.plain_digest(text, text), shardids_catalog.lock_homes(), shardids_catalog.stamp_home(),
  shardids_catalog.keep_gone_home(), shardids_catalog.homes_changed(), shardids_catalog.unsettled_changed(), shardids_catalog.refuse_beside_citus(), shardids_catalog.refuse_while_references_change(), shardids_catalog.changed(), shardids_catalog.grant_usage(name), shardids_catalog.wait_for_grants(interval);
