-- Purpose:    drops the write barrier of a database that was to be adopted; its triggers have to be dropped before.
-- Locks:      those of DROP SCHEMA.
-- Privileges: ownership of schema shardids_adopt.

drop function if exists shardids_adopt.pass_barrier();
drop sequence if exists shardids_adopt.closed;
drop schema if exists shardids_adopt;
