-- Purpose:    where a shard records how far each load of a file has come in it (shardids load): in the transaction that
--             copies the rows, so that a load that was interrupted goes on where it ended. It moves with its shard.
-- Settings:   shardids.schema, the shard's schema
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the shard's schema.

do $do$
declare
  schema constant text := current_setting('shardids.schema');
begin
  if to_regclass(format('%I.shardids_load', schema)) is null then
    execute format(
      'create table %I.shardids_load ('
      'load text primary key, '
      'source text not null, '
      'rows bigint not null check (rows >= 0), '
      'rejected bigint not null check (rejected >= 0), '
      'at timestamptz not null default now())', schema);
    execute format('comment on table %I.shardids_load is ''How many rows of each load this shard has taken''', schema);
    execute format('comment on column %I.shardids_load.rows is ''Rows of the load that belong here and were copied or rejected, the first ones of the file''', schema);
  end if;
end
$do$;
