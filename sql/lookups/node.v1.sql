-- Purpose:    what look-ups need of every node's engine: who may claim for which shards, and the refusal of writes without a
--             claim. The functions that claim (lookups/claims.v1.sql) and the triggers (lookups/guard.v1.sql) are in the shards.
-- Locks:      none.
-- Privileges: CREATE on schema shardids.

-- Called by functions of the engine's owner, who is the current user then; the role is that of the session, or of SET ROLE.
create function shardids.require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  caller constant name := case current_setting('role') when 'none' then session_user else current_setting('role') end;
  allowed int4multirange := '{}';
  given record;
  refused integer;
begin
  if pg_has_role(caller, current_user, 'usage') or pg_has_role(caller, 'pg_write_all_data', 'usage') then
    allowed := '{(,)}';
  else
    for given in
      select r.shards::int4multirange as shards from jsonb_each_text(rights) r (role, shards)
      where r.role = '' or pg_has_role(caller, (select p.oid from pg_roles p where p.rolname = r.role), 'usage')
    loop
      allowed := allowed + given.shards;
    end loop;
  end if;
  select s.number into refused from unnest(shards) s (number)
  where not s.number <@ allowed or s.number not between 0 and shard_count - 1 limit 1;
  if found then
    raise exception using
      errcode = 'insufficient_privilege',
      message = format('role "%s" may not change claims of shard %s in %s', caller, refused, claims),
      hint = 'INSERT or UPDATE on the table in that shard allows it; after GRANT: shardids lookup create TABLE.COLUMN';
  end if;
end
$$;

comment on function shardids.require_claimable(text, jsonb, integer, integer[]) is
  'Refuses changes of claims for shards in which the calling role may not write; rights has shards by role, and PUBLIC as ""';

create function shardids.refuse_unclaimed() returns trigger
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = 'SI014', schema = tg_table_schema, table = tg_table_name, column = tg_argv[0],
    message = format('a statement without a claim writes %I.%I.%I, a look-up key: another shard could get the same value',
                     tg_table_schema, tg_table_name, tg_argv[0]),
    hint = format('Write it by a session of shardids. To write it anyway: SET LOCAL shardids.unclaimed_writes = ''allowed'';'
                  ' and afterwards: shardids lookup backfill %s', tg_argv[1]);
end
$$;

comment on function shardids.refuse_unclaimed() is 'Refuses a statement that writes a look-up key without a claim';

revoke execute on function shardids.require_claimable(text, jsonb, integer, integer[]), shardids.refuse_unclaimed() from public;
