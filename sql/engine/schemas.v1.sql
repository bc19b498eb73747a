-- Purpose:    which objects of shardids other roles own or could put there: the one check of ownership. Installation
--             sends the body to a database before it trusts the schema shardids there (install/schema.v1.sql).
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: CREATE on schema shardids.

-- The owner of a schema can replace what is in it, and CREATE OR REPLACE leaves a function to the role that owned it. So
-- each of these schemas, and each object in it, has exactly the given owner; members of extensions are excepted. To be a
-- member of the owner is not enough: a superuser is a member of every role. Shards and shardids_ref also have objects of
-- the application, which are not looked at. A table that was given back may still have code of its former owner.
create function shardids.strangers_objects(schemas name[], owner name)
returns table (schema name, kind text, object text, role text, message text, fix text)
language sql stable set search_path = pg_catalog, pg_temp as $check$
  with wanted as (
    select n.oid, n.nspname, n.nspowner, n.nspacl,
           n.nspname in ('shardids', 'shardids_catalog', 'shardids_query', 'shardids_nodes', 'shardids_foreign',
                         'shardids_local', 'shardids_inplace', 'shardids_relay', 'shardids_adopt', 'shardids_reader')
             as is_whole
    from pg_namespace n where n.nspname = any ($1)),
  ours as (select r.oid from pg_roles r where r.rolname = $2),
  object as (
    select o.*, n.nspname, n.is_whole
    from wanted n
    join (
      select 'pg_class'::regclass::oid as classid, c.oid, c.relnamespace as namespace, c.relname as name, c.relowner as owner
      from pg_class c where c.relkind not in ('i', 'I', 't')
      union all select 'pg_proc'::regclass, p.oid, p.pronamespace, p.proname, p.proowner from pg_proc p
      union all select 'pg_type'::regclass, t.oid, t.typnamespace, t.typname, t.typowner
      from pg_type t where t.typrelid = 0 and not (t.typelem <> 0 and t.typlen = -1)
      union all select 'pg_operator'::regclass, o.oid, o.oprnamespace, o.oprname, o.oprowner from pg_operator o
      union all select 'pg_opclass'::regclass, o.oid, o.opcnamespace, o.opcname, o.opcowner from pg_opclass o
      union all select 'pg_opfamily'::regclass, o.oid, o.opfnamespace, o.opfname, o.opfowner from pg_opfamily o
      union all select 'pg_collation'::regclass, c.oid, c.collnamespace, c.collname, c.collowner from pg_collation c
      union all select 'pg_conversion'::regclass, c.oid, c.connamespace, c.conname, c.conowner from pg_conversion c
      union all select 'pg_ts_dict'::regclass, d.oid, d.dictnamespace, d.dictname, d.dictowner from pg_ts_dict d
      union all select 'pg_ts_config'::regclass, c.oid, c.cfgnamespace, c.cfgname, c.cfgowner from pg_ts_config c
      union all select 'pg_statistic_ext'::regclass, s.oid, s.stxnamespace, s.stxname, s.stxowner from pg_statistic_ext s) o
      on o.namespace = n.oid
    where (n.is_whole
           or o.classid = 'pg_class'::regclass and (o.name in ('id_counter', 'id_offset', 'shardids_version') or starts_with(o.name, 'shardids_counter') or starts_with(o.name, 'shardids_lookup_'))
           or o.classid = 'pg_proc'::regclass and (o.name in ('next_id', 'next_ids', 'next_number', 'next_lane_number') or o.name ~ '^(late_id|set_aside)_[0-9]+$'
                                                   or starts_with(o.name, 'shardids_number_') or starts_with(o.name, 'shardids_lookup_')))
      -- The owner of an extension can make any object of its own a member.
      and not exists (
        select from pg_depend d
        join pg_extension e on e.oid = d.refobjid
        join pg_roles r on r.oid = e.extowner and (r.rolsuper or r.oid = (select oid from ours))
        where d.classid = o.classid and d.objid = o.oid and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')),
  code (relation, classid, oid) as (
    select adrelid, 'pg_attrdef'::regclass::oid, oid from pg_attrdef
    union all select conrelid, 'pg_constraint'::regclass, oid from pg_constraint
    union all select tgrelid, 'pg_trigger'::regclass, oid from pg_trigger
    union all select ev_class, 'pg_rewrite'::regclass, oid from pg_rewrite
    union all select polrelid, 'pg_policy'::regclass, oid from pg_policy),
  stranger (namespace, kind, object, role) as (
    select n.nspname, 'schema', format('schema %I', n.nspname), n.nspowner
    from wanted n where n.nspowner is distinct from (select oid from ours)
    union all
    select distinct n.nspname, 'create', format('schema %I', n.nspname), a.grantee
    from wanted n cross join lateral aclexplode(n.nspacl) a
    where n.is_whole and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
      and a.grantee is distinct from (select oid from ours)
    union all
    select o.nspname, 'object', pg_describe_object(o.classid, o.oid, 0), o.owner
    from object o where o.owner is distinct from (select oid from ours)
    union all
    select distinct o.nspname, 'code', format('%s of %s', pg_describe_object(d.refclassid, d.refobjid, 0), pg_describe_object(o.classid, o.oid, 0)), p.proowner
    from object o
    join code c on c.relation = o.oid
    join pg_depend d on d.classid = c.classid and d.objid = c.oid and d.refclassid = 'pg_proc'::regclass
    join pg_proc p on p.oid = d.refobjid
    join pg_roles r on r.oid = p.proowner and not r.rolsuper
    where o.classid = 'pg_class'::regclass and p.proowner is distinct from (select oid from ours)
    union all
    -- The owner of a server chooses the database that it leads to.
    select n.nspname, 'server', format('foreign server %I', s.srvname), s.srvowner
    from wanted n join pg_foreign_server s on starts_with(s.srvname, 'shardids_')
    where n.nspname = 'shardids_foreign' and s.srvowner is distinct from (select oid from ours))
  select s.namespace, s.kind, s.object, r.name,
         case s.kind
           when 'schema' then format('%s exists and belongs to role "%s", not to "%s"', s.object, r.name, $2)
           when 'create' then format('role "%s" may create objects in %s', r.name, s.object)
           when 'code' then format('%s would run, which belongs to role "%s", not to "%s"', s.object, r.name, $2)
           else format('%s belongs to role "%s", not to "%s"', s.object, r.name, $2)
         end,
         case s.kind
           when 'schema' then format('If nothing needs it: DROP SCHEMA %I. If all that is in it can be trusted: ALTER SCHEMA %1$I OWNER TO %I',
                                     s.namespace, $2)
           when 'create' then format('REVOKE CREATE ON %s FROM %s, and drop what it made there', s.object,
                                     case s.role when 0 then 'PUBLIC' else quote_ident(r.name) end)
           else 'Drop it, if nothing of yours needs it, and run the command again.'
         end
  from stranger s
  cross join lateral (select case s.role when 0 then 'public' else pg_get_userbyid(s.role)::text end) r (name)
  order by s.kind <> 'schema', s.kind <> 'create', 1, 3
$check$;

comment on function shardids.strangers_objects(name[], name) is
  'Schemas of shardids, and objects in them, that belong to another role than the owner, or that others may create';

revoke execute on function shardids.strangers_objects(name[], name) from public;
