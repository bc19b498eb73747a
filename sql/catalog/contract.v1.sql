-- Purpose:    what a node is to have beside its shards: settings, extensions, and objects that act on all tables. A row each.
--             Passwords are left out, and what shardids itself makes for the query node and for moves.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none beyond USAGE on schema shardids. To be run with a search_path of pg_catalog and pg_temp alone.

with here as (
  select d.oid, d.datname, d.dattablespace, d.datdba from pg_database d where d.datname = current_database()),
-- Those whose sessions draw, move, migrate and read.
role as (
  select 0::oid as oid, 'all' as name
  union all
  select r.oid, r.rolname::text from pg_roles r
  where r.rolname in (session_user, 'shardids_reader')
     or exists (select from pg_namespace n left join lateral aclexplode(n.nspacl) a on true
                where n.nspname = 'shardids' and r.oid in (n.nspowner, a.grantee)))
select 'setting' as kind, s.name, s.reset_val as definition
from pg_settings s
where s.name in ('wal_level', 'max_prepared_transactions', 'max_replication_slots', 'max_wal_senders', 'fsync', 'full_page_writes')
union all
select 'setting', s.name, current_setting(s.name)
from pg_settings s
where s.name in ('synchronous_standby_names')
union all
select 'role setting',
       concat_ws(' ', role.name, case when s.setdatabase <> 0 then 'here' else 'everywhere' end, split_part(o.option, '=', 1)),
       substr(o.option, strpos(o.option, '=') + 1)
from pg_db_role_setting s
join here on s.setdatabase in (0, here.oid)
join role on role.oid = s.setrole
cross join unnest(s.setconfig) o (option)
where split_part(o.option, '=', 1) in (
  'statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout', 'idle_session_timeout',
  'session_replication_role', 'synchronous_commit', 'row_security', 'default_transaction_isolation')
union all
-- The query node has its own.
select 'extension', e.extname::text, e.extversion
from pg_extension e where e.extname <> 'postgres_fdw'
union all
select 'collation', c.collname::text, pg_collation_actual_version(c.oid)
from pg_collation c
where c.collname in ('default', 'en_US.utf8', 'und-x-icu') and c.collnamespace = 'pg_catalog'::regnamespace
  and pg_collation_actual_version(c.oid) is not null
union all
select 'locale', 'of the database', concat_ws(' ', pg_encoding_to_char(d.encoding), d.datcollate, d.datctype)
from pg_database d join here using (oid)
union all
select distinct 'tablespace', t.spcname::text, pg_tablespace_location(t.oid)
from pg_tablespace t, here
where t.oid = here.dattablespace or exists (select from pg_class c where c.reltablespace = t.oid and c.relisshared is not true)
union all
select 'publication', p.pubname::text, 'for all tables'
from pg_publication p where p.puballtables and p.pubname <> 'shardids_cdc'
union all
select 'event trigger', t.evtname::text,
       concat_ws(' ', 'on', t.evtevent, 'when ' || t.evttags::text, 'execute', t.evtfoid::regprocedure::text,
                 case t.evtenabled when 'D' then 'disabled' when 'R' then 'enable replica' when 'A' then 'enable always' end)
from pg_event_trigger t
union all
select 'foreign server', v.srvname::text,
       concat_ws(' ', w.fdwname,
                 (select string_agg(o, ' ' order by o) from unnest(v.srvoptions) o where o !~* '^(password|passfile|sslpassword|passcode)='))
from pg_foreign_server v
join pg_foreign_data_wrapper w on w.oid = v.srvfdw
where not starts_with(v.srvname, 'shardids_')
order by 1, 2;
