-- Purpose:    whose code may run as the session's role when rows of tables are written, or the tables are made again elsewhere:
--             the roles that own the tables, or something that these depend on, or could have made their triggers.
-- Settings:   shardids.tables: a JSON array of names; shardids.trusted: one of roles that may be among them; shardids.is_node:
--             whether schema shardids is the engine's, so that members of its owner are trusted; shardids.administers: whether
--             the session's user has more rights than an application's role
-- Locks:      none.
-- Privileges: none.
--
-- Which code there is, is not asked: an expression of PostgreSQL's own functions runs any statement, by query_to_xml.
-- Superusers and the session's user are trusted. Its code can RESET ROLE, so a role that was set is trusted beside it only
-- where that gains little: ALTER DATABASE SET role is in the hands of the database's owner.

with recursive engine as (
  select n.oid, n.nspowner as owner from pg_namespace n
  where n.nspname = 'shardids' and current_setting('shardids.is_node')::boolean),
trusted as materialized (
  select r.oid from pg_roles r
  where r.rolsuper or r.rolname = session_user
     or r.rolname = current_user and not current_setting('shardids.administers')::boolean
     or exists (select from engine e where pg_has_role(r.oid, e.owner, 'member'))
     or r.rolname in (select t.name from jsonb_array_elements_text(current_setting('shardids.trusted')::jsonb) t (name))),
reached (classid, objid) as (
  select 'pg_class'::regclass::oid, to_regclass(t.name)::oid
  from jsonb_array_elements_text(current_setting('shardids.tables')::jsonb) t (name)
  union
  select n.classid, n.objid
  from reached r
  cross join lateral (
    -- What it depends on. Extensions and schemas don't change what is in them.
    select d.refclassid, d.refobjid from pg_depend d
    where d.classid = r.classid and d.objid = r.objid and d.deptype <> 'e' and d.refclassid <> 'pg_namespace'::regclass
    union all select 'pg_attrdef'::regclass, a.oid from pg_attrdef a
    where r.classid = 'pg_class'::regclass and a.adrelid = r.objid
    union all select 'pg_constraint'::regclass, c.oid from pg_constraint c
    where r.classid = 'pg_class'::regclass and c.conrelid = r.objid
    union all select 'pg_constraint'::regclass, c.oid from pg_constraint c
    where r.classid = 'pg_type'::regclass and c.contypid = r.objid
    union all select 'pg_trigger'::regclass, g.oid from pg_trigger g
    where r.classid = 'pg_class'::regclass and g.tgrelid = r.objid
    union all select 'pg_rewrite'::regclass, w.oid from pg_rewrite w
    where r.classid = 'pg_class'::regclass and w.ev_class = r.objid
    union all select 'pg_policy'::regclass, p.oid from pg_policy p
    where r.classid = 'pg_class'::regclass and p.polrelid = r.objid
    union all select 'pg_class'::regclass, i.indexrelid from pg_index i
    where r.classid = 'pg_class'::regclass and i.indrelid = r.objid
    union all select 'pg_class'::regclass, h.inhrelid from pg_inherits h
    where r.classid = 'pg_class'::regclass and h.inhparent = r.objid
    union all select 'pg_statistic_ext'::regclass, s.oid from pg_statistic_ext s
    where r.classid = 'pg_class'::regclass and s.stxrelid = r.objid
    union all select 'pg_class'::regclass, t.typrelid from pg_type t
    where r.classid = 'pg_type'::regclass and t.oid = r.objid and t.typtype = 'c') n (classid, objid)),
code (role, classid, objid) as (
  -- By the columns: pg_shdepend does not record what predefined roles own, and others may be members of these.
  select o.owner, r.classid, r.objid
  from reached r
  cross join lateral (
    select t.relowner from pg_class t where r.classid = 'pg_class'::regclass and t.oid = r.objid
    union all select t.proowner from pg_proc t where r.classid = 'pg_proc'::regclass and t.oid = r.objid
    union all select t.typowner from pg_type t where r.classid = 'pg_type'::regclass and t.oid = r.objid
    union all select t.oprowner from pg_operator t where r.classid = 'pg_operator'::regclass and t.oid = r.objid
    union all select t.opcowner from pg_opclass t where r.classid = 'pg_opclass'::regclass and t.oid = r.objid
    union all select t.opfowner from pg_opfamily t where r.classid = 'pg_opfamily'::regclass and t.oid = r.objid
    union all select t.collowner from pg_collation t where r.classid = 'pg_collation'::regclass and t.oid = r.objid
    union all select t.conowner from pg_conversion t where r.classid = 'pg_conversion'::regclass and t.oid = r.objid
    union all select t.stxowner from pg_statistic_ext t where r.classid = 'pg_statistic_ext'::regclass and t.oid = r.objid
    union all select t.dictowner from pg_ts_dict t where r.classid = 'pg_ts_dict'::regclass and t.oid = r.objid
    union all select t.cfgowner from pg_ts_config t where r.classid = 'pg_ts_config'::regclass and t.oid = r.objid
    union all select t.lanowner from pg_language t where r.classid = 'pg_language'::regclass and t.oid = r.objid
    union all select t.srvowner from pg_foreign_server t where r.classid = 'pg_foreign_server'::regclass and t.oid = r.objid
    union all select t.fdwowner from pg_foreign_data_wrapper t where r.classid = 'pg_foreign_data_wrapper'::regclass and t.oid = r.objid
    union all select t.extowner from pg_extension t where r.classid = 'pg_extension'::regclass and t.oid = r.objid) o (owner)
  union
  -- A trigger has no owner. Its maker chooses a condition, the arguments, and a function that others may have meant for
  -- other tables: some paste arguments into statements. Those of the engine take any.
  select a.grantee, 'pg_trigger'::regclass, g.oid
  from reached r
  join pg_trigger g on r.classid = 'pg_trigger'::regclass and g.oid = r.objid
  join pg_proc p on p.oid = g.tgfoid
  join pg_class c on c.oid = g.tgrelid
  cross join lateral aclexplode(c.relacl) a
  where a.privilege_type = 'TRIGGER'
    and case when exists (select from engine e where e.oid = p.pronamespace)
             -- Who may not execute the function has not made the trigger.
             then g.tgqual is not null and has_function_privilege(a.grantee, p.oid, 'execute')
             else g.tgqual is not null or not g.tgisinternal end)
select distinct on (1) case c.role when 0 then 'public' else pg_get_userbyid(c.role)::text end as role,
       pg_describe_object(c.classid, c.objid, 0) as object, session_user as as_role
from code c
where c.role not in (select t.oid from trusted t)
  and not (c.role = 0 and current_setting('shardids.trusted')::jsonb ? 'public')
order by 1, not (c.classid = 'pg_class'::regclass and exists (select from pg_class t where t.oid = c.objid and t.relkind in ('r', 'p'))), 2;
