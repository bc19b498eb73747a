-- Purpose:    what migrations of many shards need on a node: at which revision each shard is, the start of a
--             shard's transaction, and whether shards are alike.
-- Locks:      revisions: ACCESS SHARE on one version table at a time. enter_revision: advisory locks
--             (1936220530, shard) and (1936220517, shard) until commit.
-- Privileges: CREATE on schema shardids.

-- A version table is the application's: only tables are read, for a view would run its functions as the caller;
-- values are written by format(), for the owner of their type may have made a cast to text; and row_security is off,
-- so that a policy is an error and no function of its owner is run.

create function shardids.revisions_in(schema name, version_table name) returns text[]
language plpgsql volatile set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
  found_there text[];
begin
  -- Locked before it is looked at: nothing else can take its name then.
  execute format('lock table %I.%I in access share mode', schema, version_table);
  if (select c.relkind from pg_class c where c.oid = to_regclass(format('%I.%I', schema, version_table))) <> 'r' then
    raise wrong_object_type using message = format('%I.%I is not a table', schema, version_table);
  end if;
  execute format('select array_agg(revision order by revision collate "C")'
                 ' from (select format(''%%s'', v.version_num) as revision from %I.%I v) versions',
                 schema, version_table) into found_there;
  return coalesce(found_there, '{}');
end
$$;

comment on function shardids.revisions_in(name, name) is 'The revisions in a version table';

-- A statement that read some thousand tables would hold a lock on each until it ends, more than the server's
-- lock table has room for; a subtransaction that is rolled back gives its locks back at once.
create function shardids.revisions(
  version_table name default 'alembic_version',
  out shard integer, out revisions text[], out unfinished text) returns setof record
language plpgsql volatile set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
  this record;
begin
  for this in
    select s.id, s.schema, c.oid, obj_description(c.oid, 'pg_class') as comment
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    left join pg_class c on c.relnamespace = n.oid and c.relname = version_table and c.relkind = 'r'
    where s.state <> 'moved'
    order by s.id
  loop
    shard := this.id;
    revisions := null;
    unfinished := substring(this.comment from '^shardids: (.*)$');
    if this.oid is not null then
      begin
        revisions := shardids.revisions_in(this.schema, version_table);
        raise exception using errcode = 'SI099';
      exception when sqlstate 'SI099' then
        null;
      end;
    end if;
    return next;
  end loop;
end
$$;

comment on function shardids.revisions(name) is
  'The revisions in the version table of every shard of this node: null without a table, empty at base';

-- Opens a transaction that takes a shard from one revision to another, after enter_shard: refuses when
-- another session is at work on the shard, or the shard is not where the caller believes it is. The caller
-- sets search_path to the shard's schema: what a function like this one sets ends with it.
create function shardids.enter_revision(shard integer, version_table name, expected text[]) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema text := shardids.schema_of(shard);
  found_there text[];
begin
  perform shardids.enter_shard(shard);
  if not pg_try_advisory_xact_lock(1936220530, shard) then
    raise exception using errcode = 'SI008',
      message = format('shard %s is being migrated by another session%s [node "%s"]', shard,
        (select string_agg(format(' (%s, process %s)', nullif(a.application_name, ''), a.pid), '')
         from pg_locks l join pg_stat_activity a using (pid)
         where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
           and l.classid = 1936220530 and l.objid = shard::oid and l.objsubid = 2 and l.granted),
        (select n.name from shardids.node n)),
      hint = 'Wait until it has ended, and run the migration again.';
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

comment on function shardids.enter_revision(integer, name, text[]) is
  'Opens a transaction that migrates a shard which is at just the expected revisions (null: no version table)';

-- What node revisions create lies in schema public, and is found from there while a shard's revisions run. Not where
-- any role may create objects: one that planted a type or an operator there would have it found as well.
create function shardids.is_shared_schema_safe() returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
  select exists (select from pg_namespace where nspname = 'public' and not has_schema_privilege('public', oid, 'create'))
$$;

comment on function shardids.is_shared_schema_safe() is 'Whether schema public is there, and not every role may create in it';

create function shardids.revision_path(shard integer) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
  select quote_ident(shardids.schema_of(shard)) || case when shardids.is_shared_schema_safe() then ', public' else '' end
$$;

comment on function shardids.revision_path(integer) is 'The search_path of a shard''s revisions';

-- What the tables of a schema are, a line an object, in words that are the same for every shard. The server names the
-- objects of the schema with it, which is taken away again: with the schema on search_path it would not, but then
-- functions and operators of those who may create in it would be run here.
create function shardids.description(schema name) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  qualifier constant text := format('(^|[^[:alnum:]_$"])%s\.', quote_ident(schema));
begin
  return query
  with described (line) as (
  with relation as (
    select c.oid, c.relname, c.relkind, c.relpersistence from pg_class c
    join pg_namespace n on n.oid = c.relnamespace and n.nspname = schema
    where c.relname not in ('id_counter', 'id_offset', 'shardids_version', 'shardids_version_pkc'))
  select format('%s %s%s', case r.relkind when 'r' then 'table' when 'p' then 'partitioned table' when 'v' then 'view'
                  when 'm' then 'materialized view' when 'S' then 'sequence' else r.relkind::text end, r.relname,
                case r.relkind when 'v' then ' ' || pg_get_viewdef(r.oid) when 'm' then ' ' || pg_get_viewdef(r.oid)
                  else case r.relpersistence when 'u' then ' unlogged' else '' end end)
  from relation r where r.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
  union all
  select concat_ws(' ', 'column', r.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod),
                   case when a.attnotnull then 'not null' end, 'default ' || pg_get_expr(d.adbin, d.adrelid),
                   'identity ' || nullif(a.attidentity::text, ''), 'generated ' || nullif(a.attgenerated::text, ''))
  from relation r join pg_attribute a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
  where r.relkind in ('r', 'p', 'f')
  union all
  select format('constraint %s.%s %s%s', r.relname, k.conname, pg_get_constraintdef(k.oid),
                case when k.convalidated then '' else ' (not validated)' end)
  from relation r join pg_constraint k on k.conrelid = r.oid
  -- From version 18 on the server lists NOT NULL here, too; the columns have said it.
  where k.contype <> 'n'
  union all
  select format('index %s %s%s', r.relname, pg_get_indexdef(i.indexrelid),
                case when i.indisvalid then '' else ' (invalid)' end)
  from relation r join pg_index i on i.indexrelid = r.oid
  union all
  select format('trigger %s.%s %s', r.relname, t.tgname, pg_get_triggerdef(t.oid))
  from relation r join pg_trigger t on t.tgrelid = r.oid and not t.tgisinternal
  union all
  select format('function %s %s', p.oid::regprocedure, pg_get_functiondef(p.oid))
  from pg_proc p join pg_namespace n on n.oid = p.pronamespace and n.nspname = schema
  where p.prokind in ('f', 'p') and p.proname not in ('next_id', 'next_ids', 'late_id', 'set_aside')
  union all
  select format('type %s %s', format_type(t.oid, null), coalesce(
           (select string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder)
            from pg_enum e where e.enumtypid = t.oid), format_type(t.typbasetype, t.typtypmod)))
  from pg_type t join pg_namespace n on n.oid = t.typnamespace and n.nspname = schema
  where t.typtype in ('e', 'd'))
  select regexp_replace(line, qualifier, '\1', 'g') from described order by 1;
end
$$;

comment on function shardids.description(name) is
  'The application''s objects in a shard''s schema, a line each: two shards that are alike have the same lines';

revoke execute on function
  shardids.revisions_in(name, name), shardids.revisions(name), shardids.enter_revision(integer, name, text[]),
  shardids.description(name)
  from public;
