-- Purpose:    where a shard keeps claims: of the values of a look-up that hash to it, the shard whose row may have each
--             (shardids lookup create). It moves with its shard. Repeatable; privileges follow those of the table.
-- Settings:   shardids.schema, the shard's schema; shardids.table and shardids.column, whose values are claimed;
--             shardids.claims, the name of the claims' table
-- Locks:      those of CREATE; ACCESS EXCLUSIVE on the claims if the column's type was altered; until commit, advisory lock
--             (1936220517, shard), for changes of the shard's schema.
-- Privileges: CREATE on the shard's schema, ownership of the table.
--
-- stamp is another one after every claim. Who takes a claim from another shard replaces the stamp that it saw before it
-- looked for the row there, so it does not take what was claimed since.

do $do$
declare
  schema constant text := current_setting('shardids.schema');
  name constant text := current_setting('shardids.claims');
  source constant regclass := format('%I.%I', schema, current_setting('shardids.table'))::regclass;
  altered text;
  right_of record;
begin
  perform pg_advisory_xact_lock(1936220517, (select s.id from shardids.shard s where s.schema = current_setting('shardids.schema')));
  if to_regclass(format('%I.%I', schema, name)) is null then
    -- The column's own type, with its length and its collation.
    execute format('create table %I.%I as select %I as value from %s with no data',
                   schema, name, current_setting('shardids.column'), source);
    execute format('alter table %I.%I add constraint %I primary key (value), '
                   'add column shard integer not null, add column stamp uuid not null default gen_random_uuid()',
                   schema, name, name || '_pkey');
    execute format('comment on table %I.%I is %L', schema, name,
                   format('Claims of %s.%s: a row with the value is in no other shard',
                          current_setting('shardids.table'), current_setting('shardids.column')));
  elsif exists (
    select from pg_class k, pg_class c
    where k.oid = format('%I.%I', schema, name)::regclass and c.oid = source and k.relowner <> c.relowner
      and k.relowner not in (select r.oid from pg_roles r
                             where r.rolsuper or r.oid = (select n.nspowner from pg_namespace n where n.nspname = 'shardids'))
  ) then
    -- Made by whoever may create tables here, since the shard was looked at: its defaults would run when others claim.
    raise exception using
      errcode = 'object_not_in_prerequisite_state', message = format('%I.%I belongs to another role', schema, name),
      hint = 'DROP it, and create the look-up again.';
  end if;
  -- The column was altered since: a wider varchar(n) is a change of the catalogs, another type rewrites the claims.
  select format_type(a.atttypid, a.atttypmod) || coalesce((select format(' collate %I.%I', n.nspname, l.collname)
           from pg_collation l join pg_namespace n on n.oid = l.collnamespace where l.oid = nullif(a.attcollation, 0)), '')
    into altered
  from pg_attribute a
  join pg_attribute v on v.attrelid = format('%I.%I', schema, name)::regclass and v.attname = 'value'
  where a.attrelid = source and a.attname = current_setting('shardids.column')
    and (v.atttypid, v.atttypmod, v.attcollation) <> (a.atttypid, a.atttypmod, a.attcollation);
  if altered is not null then
    execute format('alter table %I.%I alter column value type %s', schema, name, altered);
  end if;
  for right_of in
    select case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as role,
           case a.privilege_type when 'SELECT' then 'select' else 'select, insert, update' end as rights
    from pg_class c, aclexplode(c.relacl) a
    where c.oid = source and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE') and a.grantee <> c.relowner
  loop
    execute format('grant %s on %I.%I to %s', right_of.rights, schema, name, right_of.role);
  end loop;
  execute format('alter table %I.%I owner to %s', schema, name,
                 (select quote_ident(pg_get_userbyid(c.relowner)) from pg_class c where c.oid = source));
end
$do$;
