-- Purpose:    where a shard keeps claims: of the values of a look-up that hash to it, the shard whose row may have each
--             (shardids lookup create); and the functions that alone change them. All of it moves with its shard. Repeatable.
-- Settings:   shardids.schema, the shard's schema; shardids.table and shardids.column, whose values are claimed;
--             shardids.claims, the name of the claims' table and functions; shardids.kind, the type of values in arguments;
--             shardids.rights, the shards in which roles may write the table: a JSON object of int4multiranges by role, '' for
--             PUBLIC; shardids.shard_count
-- Locks:      those of CREATE; ACCESS EXCLUSIVE on the claims if the column's type was altered; until commit, advisory lock
--             (1936220517, shard), for changes of the shard's schema.
-- Privileges: membership in the owner of schema shardids, who owns the claims; SELECT on the table.
--
-- stamp is another one after every claim. Who takes a claim from another shard replaces the stamp that it saw before it
-- looked for the row there, so it does not take what was claimed since. The stamp has to name a claim of a shard that the
-- caller may write in, and so has the new shard. A claim for a shard that there is not is free.

do $do$
declare
  schema constant text := current_setting('shardids.schema');
  name constant text := current_setting('shardids.claims');
  there constant text := format('%I.%I', schema, name);
  source constant regclass := format('%I.%I', schema, current_setting('shardids.table'))::regclass;
  kind constant text := current_setting('shardids.kind');
  rights constant jsonb := current_setting('shardids.rights');
  shard_count constant integer := current_setting('shardids.shard_count');
  owner constant oid := (select n.nspowner from pg_namespace n where n.nspname = 'shardids');
  checked constant text := format('perform shardids.require_claimable(%L, %L, %s, ', name, rights, shard_count);
  altered text;
  other record;
begin
  perform pg_advisory_xact_lock(1936220517, (select s.id from shardids.shard s where s.schema = current_setting('shardids.schema')));
  -- Their owner decides what runs when others claim.
  for other in select * from shardids.strangers_objects(array[schema]::name[], pg_get_userbyid(owner)) loop
    raise insufficient_privilege using message = other.message, hint = other.fix;
  end loop;
  if to_regclass(there) is null then
    -- The column's own type, with its length and its collation.
    execute format('create table %s as select %I as value from %s with no data', there, current_setting('shardids.column'), source);
    execute format('alter table %s add constraint %I primary key (value), '
                   'add column shard integer not null, add column stamp uuid not null default gen_random_uuid()',
                   there, name || '_pkey');
    execute format('comment on table %s is %L', there,
                   format('Claims of %s.%s: a row with the value is in no other shard',
                          current_setting('shardids.table'), current_setting('shardids.column')));
    execute format('alter table %s owner to %I', there, pg_get_userbyid(owner));
  end if;
  -- The column was altered since: a wider varchar(n) is a change of the catalogs, another type rewrites the claims.
  select format_type(a.atttypid, a.atttypmod) || coalesce((select format(' collate %I.%I', n.nspname, l.collname)
           from pg_collation l join pg_namespace n on n.oid = l.collnamespace where l.oid = nullif(a.attcollation, 0)), '')
    into altered
  from pg_attribute a
  join pg_attribute v on v.attrelid = there::regclass and v.attname = 'value'
  where a.attrelid = source and a.attname = current_setting('shardids.column')
    and (v.atttypid, v.atttypmod, v.attcollation) <> (a.atttypid, a.atttypmod, a.attcollation);
  if altered is not null then
    execute format('alter table %s alter column value type %s', there, altered);
  end if;
  for other in
    select p.oid::regprocedure as signature from pg_proc p
    where p.pronamespace = (select n.oid from pg_namespace n where n.nspname = current_setting('shardids.schema'))
      and p.proname = current_setting('shardids.claims') and p.proargtypes[0] <> format('%s[]', kind)::regtype
  loop
    execute format('drop function %s', other.signature);
  end loop;
  execute format(
    'create or replace function %1$s(given %2$s[], shards integer[]) returns setof %2$s language plpgsql volatile security definer'
    ' set search_path = pg_catalog, pg_temp as %3$L',
    there, kind, format($body$
begin
  %1$s shards);
  -- In one order, so that two who claim the same values don't wait for each other.
  return query insert into %2$s as c (value, shard) select g.value, g.shard from unnest(given, shards) g (value, shard) order by 1
    on conflict (value) do update set shard = excluded.shard, stamp = default
    where c.shard = excluded.shard or c.shard not between 0 and %4$s - 1
    returning c.value::%3$s;
end
$body$, checked, there, kind, shard_count));
  execute format('comment on function %s(%s[], integer[]) is %L', there, kind,
                 'Claims values for shards; returns those that no other shard has claimed');
  execute format(
    'create or replace function %1$s(given %2$s[], stamps uuid[], shards integer[]) returns setof %2$s language plpgsql volatile security definer'
    ' set search_path = pg_catalog, pg_temp as %3$L',
    there, kind, format($body$
begin
  %1$s array(
    select g.shard from unnest(shards) g (shard)
    union
    select c.shard from %2$s c join unnest(given, stamps) g (value, stamp) on c.value = g.value and c.stamp = g.stamp
    where c.shard between 0 and %4$s - 1));
  if shards is null then
    return query delete from %2$s c using unnest(given, stamps) g (value, stamp)
      where c.value = g.value and c.stamp = g.stamp returning c.value::%3$s;
  else
    return query update %2$s c set shard = g.shard, stamp = default
      from unnest(given, stamps, shards) g (value, stamp, shard)
      where c.value = g.value and c.stamp = g.stamp returning c.value::%3$s;
  end if;
end
$body$, checked, there, kind, shard_count));
  execute format('comment on function %s(%s[], uuid[], integer[]) is %L', there, kind,
                 'Takes claims as they were read for other shards, or gives them up; returns those that nobody has claimed since');
  for other in
    select p.oid::regprocedure as signature from pg_proc p
    where p.pronamespace = (select n.oid from pg_namespace n where n.nspname = current_setting('shardids.schema'))
      and p.proname = current_setting('shardids.claims')
  loop
    execute format('alter function %s owner to %I', other.signature, pg_get_userbyid(owner));
    execute format('revoke all on function %s from public', other.signature);
    execute (
      select string_agg(format('grant execute on function %s to %s', other.signature, w.role), '; ')
      from (select case k.role when '' then 'public' else format('%I', k.role) end as role
            from jsonb_object_keys(current_setting('shardids.rights')::jsonb) k (role)
            where k.role = '' or exists (select from pg_roles p where p.rolname = k.role)
            union select 'pg_write_all_data') w);
  end loop;
  -- Nobody else writes them. Who reads or writes the table reads them.
  for other in
    select distinct case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as role
    from pg_class c, aclexplode(c.relacl) a
    where c.oid = there::regclass and a.grantee <> c.relowner
  loop
    execute format('revoke all on %s from %s', there, other.role);
  end loop;
  for other in
    select distinct case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as role
    from pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
    where c.oid = source and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE') and a.grantee <> owner
  loop
    execute format('grant select on %s to %s', there, other.role);
  end loop;
end
$do$;
