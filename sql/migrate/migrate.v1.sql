-- Purpose:    what migrations of many shards need on a node: the revisions of a shard, the start of a shard's
--             transaction, what each revision was when it ran, and the tables that revisions dropped.
-- Locks:      revisions_in: ACCESS SHARE on the version table until commit. enter_revision: advisory locks
--             (1936220533, shard) and (1936220517, shard) until commit.
-- Privileges: CREATE on schema shardids.

-- In a transaction that is to change the shard, as the role that changes it. Only the owner of a table adds policies,
-- indexes, statistics and parts to it, which run when it is read; and only a type of others has casts of theirs.
create function shardids.revisions_in(schema name, version_table name) returns text[]
language plpgsql volatile set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
  found_there text[];
  this record;
begin
  -- Nothing else can take its name then.
  execute format('lock table only %I.%I in access share mode', schema, version_table);
  select c.relkind = 'r' as is_table, pg_get_userbyid(c.relowner) as owner,
         pg_has_role(c.relowner, current_user, 'member') or pg_has_role(c.relowner, engine.nspowner, 'member') as is_trusted,
         exists (select from pg_attribute a join pg_type t on t.oid = a.atttypid
                 where a.attrelid = c.oid and a.attnum > 0 and t.typnamespace <> 'pg_catalog'::regnamespace) as has_types
  into this
  from pg_class c, pg_namespace engine
  where c.oid = to_regclass(format('%I.%I', schema, version_table)) and engine.nspname = 'shardids';
  if not this.is_table then
    raise wrong_object_type using message = format('%I.%I is not a table', schema, version_table);
  elsif not this.is_trusted then
    raise insufficient_privilege using
      message = format('%I.%I belongs to role "%s", whose code would run as role "%s"', schema, version_table, this.owner, current_user),
      hint = 'Connect as a role that has no more rights than its owner, or let the owner of schema shardids own it.';
  elsif this.has_types then
    raise insufficient_privilege using
      message = format('%I.%I has columns of types that are not PostgreSQL''s own, whose code would run as role "%s"',
                       schema, version_table, current_user),
      hint = 'Its column version_num is a varchar(32) as Alembic makes it.';
  end if;
  execute format('select array_agg(v.version_num::text order by v.version_num::text collate "C") from only %I.%I v', schema, version_table)
  into found_there;
  return coalesce(found_there, '{}');
end
$$;

comment on function shardids.revisions_in(name, name) is 'The revisions in a version table';

-- What each revision was when it ran, a hash by revision, is the comment of the version table's column: it goes where
-- the shard goes, and plain Alembic does not touch it. To be called in the transaction that runs the revisions.
create function shardids.record_hashes(version_table regclass, undone text[], done jsonb) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  recorded jsonb;
begin
  if undone is not null then
    select substring(col_description(version_table, a.attnum) from '^shardids: (.*)$')::jsonb into recorded
    from pg_attribute a where a.attrelid = version_table and a.attname = 'version_num';
  end if;
  recorded := coalesce(recorded, '{}') - coalesce(undone, '{}') || done;
  execute format('comment on column %s.version_num is %L', version_table, 'shardids: ' || nullif(recorded, '{}')::text);
end
$$;

comment on function shardids.record_hashes(regclass, text[], jsonb) is
  'Records the hashes of revisions beside a version table, and takes away those of others, or of all (null)';

-- The tables and columns of a shard before revisions run, in a setting that ends with the transaction.
create function shardids.note_columns(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform set_config('shardids.columns', coalesce(jsonb_object_agg(c.oid || '.' || coalesce(a.attnum, 0),
                                                                   jsonb_build_array(c.relname, a.attname)), '{}')::text, true)
  from pg_class c
  cross join lateral (select null as attnum, null as attname
                      union all
                      select a.attnum, a.attname from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) a
  where c.relnamespace = to_regnamespace(quote_ident(shardids.schema_of(shard))) and c.relkind = 'r';
end
$$;

comment on function shardids.note_columns(integer) is
  'Notes the tables and columns of a shard, for require_columns later in the transaction';

-- The last call of a transaction in which revisions ran. A table is known by its OID: renamed it is still there, dropped
-- and created again it is not. Views, sequences and foreign tables hold no rows of their own.
create function shardids.require_columns(shard integer, allowed jsonb) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  noted constant jsonb := nullif(current_setting('shardids.columns', true), '')::jsonb;
  dropped jsonb;
begin
  select jsonb_agg(distinct gone.what) into dropped
  from jsonb_each(noted) n
  cross join lateral (
    select case when not exists (select from pg_class c where c.oid = split_part(n.key, '.', 1)::oid)
                  then jsonb_build_array(n.value -> 0, null)
                when split_part(n.key, '.', 2) <> '0'
                     and not exists (select from pg_attribute a where a.attrelid = split_part(n.key, '.', 1)::oid
                                       and a.attnum = split_part(n.key, '.', 2)::smallint and not a.attisdropped)
                  then n.value end as what) gone
  where gone.what is not null and gone.what not in (select jsonb_array_elements(allowed));
  if noted is null or dropped is not null then
    raise exception using errcode = 'SI016',
      message = format('the revisions drop tables or columns of shard %s [node "%s"]', shard, (select n.name from shardids.node n)),
      detail = coalesce(dropped, '[]')::text;
  end if;
end
$$;

comment on function shardids.require_columns(integer, jsonb) is
  'Refuses unless all tables and columns that note_columns noted are there, except those allowed: [[table, column or null], ...]';

-- Opens a transaction that takes a shard from one revision to another, after enter_shard: refuses when
-- another command has the shard's lease, or the shard is not where the caller believes it is. The caller
-- sets search_path to the shard's schema: what a function like this one sets ends with it. epoch: of the
-- caller's lease; null: nobody may hold one.
create function shardids.enter_revision(shard integer, version_table name, expected text[], epoch uuid default null) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema text := shardids.schema_of(shard);
  found_there text[];
  moved_to text := (select s.moved_to from shardids.shard s where s.id = enter_revision.shard and s.state = 'moved');
begin
  perform shardids.enter_shard(shard);
  perform shardids.enter_lease(shard, epoch);
  if moved_to is not null then
    raise exception using errcode = 'SI001',
      message = format('shard %s was moved to node "%s" [node "%s"]', shard, moved_to, (select n.name from shardids.node n)),
      hint = 'Run the migration again: it goes where the shards are.';
  end if;
  if to_regclass(format('%I.%I', schema, version_table)) is not null then
    found_there := shardids.revisions_in(schema, version_table);
  end if;
  if found_there is distinct from expected then
    raise exception using errcode = 'SI009',
      message = format('shard %s is at revision %s, not %s [node "%s"]', shard,
        coalesce(nullif(array_to_string(found_there, ', '), ''), 'base'),
        coalesce(nullif(array_to_string(expected, ', '), ''), 'base'), (select n.name from shardids.node n)),
      hint = 'Another run has changed it meanwhile: see shardids migrate status.';
  end if;
end
$$;

comment on function shardids.enter_revision(integer, name, text[], uuid) is
  'Opens a transaction that migrates a shard which is at just the expected revisions (null: no version table)';

-- What node revisions create lies in schema public, and is found from there while a shard's revisions run. Not where
-- others may create objects: who planted a type or an operator there would have it found as well. Those who may are
-- its owner (from version 15 on that of the database), superusers, and who acts for the engine's owner anyway.
create function shardids.strangers_in_shared_schema() returns text[]
language sql stable set search_path = pg_catalog, pg_temp as $$
  select array(
    select case acl.grantee when 0 then 'public' else pg_get_userbyid(acl.grantee)::text end
    from aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) acl
    where acl.privilege_type = 'CREATE' and acl.grantee <> n.nspowner
      and (acl.grantee = 0 or not (
        select pg_has_role(acl.grantee, engine.nspowner, 'member') from pg_namespace engine where engine.nspname = 'shardids'))
    order by acl.grantee <> 0, 1)
  from pg_namespace n where n.nspname = 'public'
$$;

comment on function shardids.strangers_in_shared_schema() is
  'The roles that may create in schema public and should not, ''public'' for every role; null if it is not there';

create function shardids.revision_path(shard integer) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
  select quote_ident(shardids.schema_of(shard)) || case when shardids.strangers_in_shared_schema() = '{}' then ', public' else '' end
$$;

comment on function shardids.revision_path(integer) is 'The search_path of a shard''s revisions';

revoke execute on function
  shardids.revisions_in(name, name), shardids.enter_revision(integer, name, text[], uuid),
  shardids.strangers_in_shared_schema(), shardids.revision_path(integer),
  shardids.record_hashes(regclass, text[], jsonb), shardids.note_columns(integer), shardids.require_columns(integer, jsonb)
  from public;
