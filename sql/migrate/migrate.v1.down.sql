-- Purpose:    takes away what migrate.v1.sql made.
-- Locks:      none beyond those of DROP.
-- Privileges: ownership of schema shardids.

drop function shardids.revisions_in(name, name),
  shardids.enter_revision(integer, name, text[], uuid), shardids.revision_path(integer),
  shardids.strangers_in_shared_schema(), shardids.record_hashes(regclass, text[], jsonb),
  shardids.note_columns(integer), shardids.require_columns(integer, jsonb);
