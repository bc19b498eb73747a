-- Purpose:    takes the reader away from a database; the role, too, if no other database of the server has one.
-- Locks:      those of DROP SCHEMA and DROP ROLE.
-- Privileges: as to create it.

do $do$
declare
  is_member constant boolean := to_regrole('shardids_reader') is null or pg_has_role('shardids_reader', 'member');
begin
  if to_regrole('shardids_reader') is null then
    return;
  end if;
  if not is_member then
    grant shardids_reader to current_user;
  end if;
  if (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids_reader') = 'shardids_reader' then
    drop schema shardids_reader cascade;
  end if;
  revoke execute on function shardids.shard_of(bigint) from shardids_reader;
  if not is_member then
    revoke shardids_reader from current_user;
  end if;
  begin
    drop role shardids_reader;
  exception when dependent_objects_still_exist or insufficient_privilege then
    null;
  end;
end
$do$;
