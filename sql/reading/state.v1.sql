-- Purpose:    how a session may read tables of other roles here: what speaks against the reader (null: nothing), whether
--             anybody else owns objects in this database, and whether the session's user can write.
-- Settings:   shardids.read_body: the body of shardids_reader.read, as this shardids installs it; shardids.is_node: whether
--             schema shardids is the engine's, so that its owner is trusted; shardids.administers: as in owners.v1.sql
-- Locks:      none.
-- Privileges: none.

with reader as (
  select r.oid, r.rolsuper or r.rolcreaterole or r.rolcreatedb or r.rolreplication or r.rolcanlogin as may_more
  from pg_roles r where r.rolname = 'shardids_reader'),
engine as (
  select n.nspowner as owner from pg_namespace n
  where n.nspname = 'shardids' and current_setting('shardids.is_node')::boolean),
here as (
  select d.oid from pg_database d where d.datname = current_database()),
self as (
  select r.oid, r.rolsuper or r.rolcreaterole or r.rolcreatedb or r.rolreplication as may_more
  from pg_roles r where r.rolname = session_user),
own as (
  select r.oid from pg_roles r
  where r.rolname = session_user or r.rolname = current_user and not current_setting('shardids.administers')::boolean),
-- Superusers, and roles that can act as the engine's owner anyway.
trusted as materialized (
  select r.oid from pg_roles r
  where r.rolsuper or exists (select from engine e where pg_has_role(r.oid, e.owner, 'member'))),
-- pg_shdepend does not record what predefined roles own, and others may be members of these.
owners (oid) as materialized (
  select t.relowner from pg_class t
  union select t.proowner from pg_proc t
  union select t.typowner from pg_type t
  union select t.oprowner from pg_operator t
  union select t.opcowner from pg_opclass t
  union select t.opfowner from pg_opfamily t
  union select t.collowner from pg_collation t
  union select t.conowner from pg_conversion t
  union select t.stxowner from pg_statistic_ext t
  union select t.dictowner from pg_ts_dict t
  union select t.cfgowner from pg_ts_config t
  union select t.lanowner from pg_language t
  union select t.srvowner from pg_foreign_server t
  union select t.fdwowner from pg_foreign_data_wrapper t
  union select t.extowner from pg_extension t
  union select t.evtowner from pg_event_trigger t
  union select t.pubowner from pg_publication t
  -- It owns schema public from PostgreSQL 15 on: a schema holds no code.
  union select t.nspowner from pg_namespace t where t.nspowner <> 'pg_database_owner'::regrole),
functions as (
  select p.oid, p.proowner, p.prosecdef, p.prosrc, p.proconfig, p.prokind, n.nspowner, n.oid as namespace
  from pg_namespace n left join pg_proc p on p.pronamespace = n.oid
  where n.nspname = 'shardids_reader')
select case
         when not exists (select from reader) then 'there is no role shardids_reader'
         when (select r.may_more from reader r) then 'role shardids_reader may do more than read'
         when not exists (select from pg_auth_members m join reader r on m.member = r.oid
                          where m.roleid = 'pg_read_all_data'::regrole)
           then 'role shardids_reader is not a member of pg_read_all_data'
         when exists (select from pg_auth_members m join reader r on m.member = r.oid
                      where m.roleid <> 'pg_read_all_data'::regrole)
           then 'role shardids_reader is a member of other roles than pg_read_all_data'
         when exists (select from pg_auth_members m join reader r on m.roleid = r.oid
                      where m.member not in (select t.oid from trusted t))
           then 'other roles are members of role shardids_reader'
         when exists (select from pg_shdepend d join reader r on d.refobjid = r.oid
                      where d.refclassid = 'pg_authid'::regclass and d.dbid in (select h.oid from here h)
                        and d.deptype = 'o'
                        and not (d.classid = 'pg_namespace'::regclass and d.objid in (select f.namespace from functions f)
                                 or d.classid = 'pg_proc'::regclass and d.objid in (select f.oid from functions f)))
           then 'role shardids_reader owns more than its schema and function'
         when (select count(*) from functions f where f.proowner is not null) <> 1
           then 'function shardids_reader.read is not there'
         when not exists (select from functions f join reader r on r.oid = f.proowner and r.oid = f.nspowner
                          where f.prosecdef and f.prosrc = current_setting('shardids.read_body')
                            and f.proconfig @> array['search_path=pg_catalog, pg_temp', 'row_security=off'])
           then 'function shardids_reader.read is another than this shardids installs'
         when not (select has_schema_privilege(f.namespace, 'usage') and has_function_privilege(f.oid, 'execute')
                     from functions f)
           then format('role "%s" may not use it', current_user)
       end as fault,
       not exists (
         select from owners o
         where o.oid not in (select t.oid from trusted t)
           and not exists (select from own where own.oid = o.oid)
           and not exists (select from reader r where r.oid = o.oid)) as is_alone,
       not (select self.may_more from self)
       and not exists (
         select from pg_roles r, self
         where r.oid <> self.oid and pg_has_role(self.oid, r.oid, 'member')
           and r.rolname not in ('pg_read_all_data', 'pg_monitor', 'pg_read_all_settings',
                                 'pg_read_all_stats', 'pg_stat_scan_tables'))
       and not exists (
         select from pg_shdepend d join self on self.oid = d.refobjid
         where d.refclassid = 'pg_authid'::regclass and d.deptype = 'o')
       and not exists (select from owners o, self where pg_has_role(self.oid, o.oid, 'member'))
       and not exists (
         select from self, pg_class c join pg_namespace n on n.oid = c.relnamespace
         where c.relkind in ('r', 'p', 'v', 'f', 'm') and n.nspname not in ('pg_catalog', 'information_schema')
           and not starts_with(n.nspname, 'pg_temp_') and not starts_with(n.nspname, 'pg_toast')
           and (has_any_column_privilege(self.oid, c.oid, 'insert, update')
                or has_table_privilege(self.oid, c.oid, 'delete, truncate, trigger')))
         as only_reads,
       session_user as role;
