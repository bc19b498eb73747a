-- Purpose:    where a shard records how far each load of a file has come in it (shardids load): in the transaction that
--             copies the rows, so that a load that was interrupted goes on where it ended. It moves with its shard.
-- Settings:   shardids.schema, the shard's schema
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the shard's schema.

do $do$
<<marks>>
declare
  schema constant text := pg_catalog.current_setting('shardids.schema');
  -- An application's session: other schemas may be on its path.
  path constant text := pg_catalog.current_setting('search_path');
  owner name;
  maker name;
  mover text;
  is_old boolean;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  select pg_get_userbyid(n.nspowner) into owner from pg_namespace n where n.nspname = 'shardids';
  select pg_get_userbyid(c.relowner) into maker from pg_class c where c.oid = to_regclass(format('%I.shardids_load', schema));
  if maker not in (current_user, owner) then
    -- Its triggers and defaults would run as the role that loads.
    raise insufficient_privilege using
      message = format('table %I.shardids_load belongs to role "%s", not to "%s"', schema, maker, owner),
      hint = 'Load as that role; or drop the table, once no interrupted load needs the rows in it.';
  end if;
  is_old := maker is not null and not exists (
    select from pg_attribute a
    where a.attrelid = to_regclass(format('%I.shardids_load', schema)) and a.attname = 'line' and not a.attisdropped);
  if maker is null or is_old then
    -- A move would find another table on its source than it has copied, and would be undone.
    if has_table_privilege('shardids.lease', 'select') and has_table_privilege('shardids.shard', 'select') then
      select format('shard %s is being changed: %s by %s', l.shard, l.purpose, l.holder) into mover
      from shardids.shard s join shardids.lease l on l.shard = s.id and l.purpose = 'move' where s.schema = marks.schema;
      if found then
        raise exception using errcode = 'SI008', message = mover,
          hint = 'Load again when the move has ended: shardids shard move --list. Rows that were loaded stay.';
      end if;
    end if;
  end if;
  if maker is null then
    execute format(
      'create table %I.shardids_load ('
      'load text primary key, '
      'source text not null, '
      'rows bigint not null check (rows >= 0), '
      'rejected bigint not null check (rejected >= 0), '
      'homes_version bigint not null, '
      'at timestamptz not null default now(), '
      'line bigint)', schema);
    execute format('comment on table %I.shardids_load is ''How many rows of each load this shard has taken''', schema);
    execute format('comment on column %I.shardids_load.rows is ''Rows of the load that belong here and were copied or rejected, the first ones of the file''', schema);
    execute format('comment on column %I.shardids_load.homes_version is ''The version of the directory of keys that the load began with''', schema);
    if pg_has_role(owner, 'usage') then
      execute format('alter table %I.shardids_load owner to %I', schema, owner);
    end if;
  elsif is_old then
    execute format('alter table %I.shardids_load add column line bigint', schema);
  end if;
  if maker is null or is_old then
    execute format('comment on column %I.shardids_load.line is ''The line up to which this shard has taken the records that belong here; null: an older version did not write it''', schema);
  end if;
  perform set_config('search_path', path, true);
end
$do$;
