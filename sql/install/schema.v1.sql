-- Purpose:    makes a schema of shardids, or refuses one that another role can change. From there to the end of the
--             transaction the session acts as the schema's owner, so that all it creates belongs to that role.
-- Settings:   shardids.own_schema; shardids.own_owner, empty where the schema itself begins an installation. The query of
--             engine/schemas.v1.sql takes its place below: a function of this database is not trusted yet.
-- Locks:      those of CREATE SCHEMA. The schema is made first and examined then: no role can come between.
-- Privileges: CREATE on the database, if the schema is missing; otherwise to be its owner, or a member of it.

do $do$
declare
  schema constant text := current_setting('shardids.own_schema');
  present constant name := (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = schema);
  owner constant name := coalesce(nullif(current_setting('shardids.own_owner'), ''), present, current_user);
  is_superuser constant boolean := (select r.rolsuper from pg_roles r where r.rolname = current_user);
  stranger record;
begin
  if present is null then
    begin
      execute format('create schema %I authorization %I', schema, owner);
    exception when duplicate_schema or unique_violation then
      null;  -- Made meanwhile: it is examined like one that was there.
    end;
    -- Default privileges of the owner may have granted more than USAGE.
    for stranger in
      select distinct case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as role
      from pg_namespace n cross join lateral aclexplode(n.nspacl) a
      where n.nspname = schema and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
    loop
      execute format('revoke create on schema %I from %s', schema, stranger.role);
    end loop;
  elsif current_setting('shardids.own_owner') = '' and present <> current_user
        and not (case when is_superuser then (select r.rolsuper from pg_roles r where r.rolname = present)
                 else pg_has_role(current_user, present, 'member') end) then
    -- A superuser is a member of every role: it would run the code of any.
    raise insufficient_privilege using
      message = format('schema %I exists and belongs to role "%s", not to "%s"', schema, present, current_user),
      hint = format('The owner of a schema controls what is in it. Work as that role, or, if the schema is empty: DROP SCHEMA %I', schema);
  end if;
  for stranger in {strangers} loop
    raise insufficient_privilege using message = stranger.message, hint = stranger.fix;
  end loop;
  if owner <> current_user then
    perform set_config('role', owner, true);
  end if;
end
$do$;
