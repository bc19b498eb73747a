-- Purpose:    functions, views, triggers and policies of a source, with what each of them names as far as PostgreSQL knows,
--             and the statement that makes it; of other relations the names. What belongs to extensions is left out.
-- Locks:      those of printing views, triggers and policies: ACCESS SHARE on their tables.
-- Privileges: none.

with application as (
  select n.oid, n.nspname from pg_namespace n
  where n.nspname !~ '^pg_' and n.nspname <> 'information_schema' and n.nspname !~ '^shardids'),
of_extension as (
  select d.classid, d.objid from pg_depend d where d.deptype = 'e'),
relation as (
  select c.oid, c.relkind, c.reltype, c.relowner, c.relispartition, c.reloptions, c.relacl, c.relrowsecurity, c.relforcerowsecurity,
         format('%I.%I', a.nspname, c.relname) as name
  from pg_class c
  join application a on a.oid = c.relnamespace
  where c.relkind in ('r', 'p', 'f', 'v', 'm', 'S')
    and not exists (select from of_extension e where e.classid = 'pg_class'::regclass and e.objid = c.oid)),
routine as (
  select p.*, a.nspname, l.lanname
  from pg_proc p
  join application a on a.oid = p.pronamespace
  join pg_language l on l.oid = p.prolang
  where not exists (select from of_extension e where e.classid = 'pg_proc'::regclass and e.objid = p.oid)),
belonging as (
  select 'function' as kind, 'pg_proc'::regclass as classid, p.oid as objid, p.oid, null::oid as relation,
         p.oid::regprocedure::text as name,
         case when p.prokind in ('f', 'p') then pg_get_functiondef(p.oid) end as definition,
         case when p.prosqlbody is null then p.prosrc end as body,
         case
           when p.prokind not in ('f', 'p') then 'it is an aggregate or a window function'
           when p.lanname not in ('sql', 'plpgsql') then format('its language is %s', p.lanname)
           when p.prosecdef then 'it is SECURITY DEFINER: it would run with the rights of the role that runs the migrations'
           when exists (select from unnest(p.proconfig) s where s like 'search\_path=%') then 'it sets search_path'
         end as problem,
         p.proacl as acl, p.proowner as owner, null::text as options, null::text[] as roles, obj_description(p.oid, 'pg_proc') as comment
  from routine p
  union all
  select 'view', 'pg_rewrite'::regclass, w.oid, r.oid, r.oid, r.name, pg_get_viewdef(r.oid), null,
         case
           when exists (select from pg_attrdef d where d.adrelid = r.oid) then 'its columns have defaults'
           when coalesce(r.reloptions::text ~ 'security_invoker=(true|on|yes|1)', false) then null
           when exists (
             select from pg_depend d
             join relation t on t.oid = d.refobjid and d.refclassid = 'pg_class'::regclass and t.relrowsecurity
             where d.classid = 'pg_rewrite'::regclass and d.objid = w.oid and (t.relforcerowsecurity or t.relowner <> r.relowner))
           then 'it reads a table with row security as its owner, who is another in the shards'
         end,
         r.relacl, r.relowner, array_to_string(r.reloptions, ', '), null, obj_description(r.oid, 'pg_class')
  from relation r
  join pg_rewrite w on w.ev_class = r.oid and w.rulename = '_RETURN'
  where r.relkind = 'v'
  union all
  select 'trigger', 'pg_trigger'::regclass, t.oid, t.oid, r.oid, quote_ident(t.tgname), pg_get_triggerdef(t.oid), null,
         case
           when r.relispartition then 'it belongs to one partition'
           when t.tgenabled in ('A', 'R') then 'it fires for replication: it would fire for rows that are copied'
           when t.tgtype & 32 <> 0 then 'it fires on TRUNCATE, as which the shards are emptied if an adoption is aborted'
           when t.tgtype & 1 <> 0 and coalesce(t.tgoldtable, t.tgnewtable) is not null
           then 'it is a row trigger with transition tables, which no table can have that is, while rows arrive, a partition'
         end,
         null, null, case when t.tgenabled = 'D' then 'disabled' end, null, obj_description(t.oid, 'pg_trigger')
  from pg_trigger t
  join relation r on r.oid = t.tgrelid
  where not t.tgisinternal and t.tgparentid = 0 and t.tgname !~ '^shardids_'
  union all
  select 'policy', 'pg_policy'::regclass, p.oid, p.oid, r.oid, quote_ident(p.polname),
         format('as %s for %s',
                case when p.polpermissive then 'permissive' else 'restrictive' end,
                case p.polcmd when 'r' then 'select' when 'a' then 'insert' when 'w' then 'update' when 'd' then 'delete' else 'all' end)
           || ' to ' || (
             select string_agg(case role when 0 then 'public' else quote_ident(pg_get_userbyid(role)) end, ', ' order by role)
             from unnest(p.polroles) role)
           || coalesce(' using (' || pg_get_expr(p.polqual, p.polrelid) || ')', '')
           || coalesce(' with check (' || pg_get_expr(p.polwithcheck, p.polrelid) || ')', ''),
         null, case when r.relispartition then 'it belongs to one partition' end, null, null, null,
         array(select quote_ident(pg_get_userbyid(role)) from unnest(p.polroles) role where role <> 0),
         obj_description(p.oid, 'pg_policy')
  from pg_policy p
  join relation r on r.oid = p.polrelid)
select b.kind,
       b.oid::bigint as oid,
       (select r.name from relation r where r.oid = coalesce(pg_partition_root(b.relation), b.relation)) as relation,
       b.name,
       b.definition,
       b.body,
       b.problem,
       b.options,
       b.comment,
       coalesce(b.roles, '{}') as roles,
       array(
         select distinct r.name
         from pg_depend d
         join relation r on (d.refclassid = 'pg_class'::regclass and r.oid = d.refobjid)
           or (d.refclassid = 'pg_type'::regclass and r.reltype = d.refobjid)
         where d.classid = b.classid and d.objid = b.objid and (b.kind <> 'view' or r.oid <> b.relation)
         order by 1) as names,
       array(
         select distinct d.refobjid::bigint
         from pg_depend d
         join routine p on p.oid = d.refobjid
         where d.classid = b.classid and d.objid = b.objid and d.refclassid = 'pg_proc'::regclass
         order by 1) as calls,
       b.acl is not null as has_grants,
       coalesce((
         select jsonb_agg(jsonb_build_object(
                  'role', case when g.grantee <> 0 then quote_ident(pg_get_userbyid(g.grantee)) end, 'privilege', g.privilege_type,
                  'column', null, 'may_grant', g.is_grantable) order by g.grantee, g.privilege_type)
         from aclexplode(b.acl) g
         where g.grantee <> b.owner), '[]') as grants
from belonging b
union all
select 'relation', r.oid::bigint, r.name, r.name, null, null, null, null, null, '{}', '{}', '{}', false, '[]'
from relation r
where r.relkind <> 'v'
order by 1, 3, 4;
