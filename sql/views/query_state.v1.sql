-- Purpose:    what the query node has: one row for each table, with the foreign tables it reads. Nothing is installed.
-- Settings:   none
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

select parent.relname::text as name,
       coalesce(obj_description(parent.oid, 'pg_class'), '') as signature,
       coalesce((
         select jsonb_object_agg(s.srvname, (
                  select substr(o, length('table_name=') + 1) from unnest(f.ftoptions) o where starts_with(o, 'table_name=')))
         from pg_inherits i
         join pg_foreign_table f on f.ftrelid = i.inhrelid
         join pg_foreign_server s on s.oid = f.ftserver
         where i.inhparent = parent.oid), '{}') as parts,
       coalesce((
         select jsonb_object_agg(nspname, names)
         from (
           select w.nspname,
                  jsonb_agg(distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end) as names
           from pg_class v
           join pg_namespace w on w.oid = v.relnamespace and w.nspname in ('shardids_query', 'shardids_nodes')
           cross join lateral aclexplode(v.relacl) a
           where v.relname = parent.relname and a.privilege_type = 'SELECT' and a.grantee <> v.relowner
           group by w.nspname) granted), '{}') as readers
from pg_class parent
join pg_namespace n on n.oid = parent.relnamespace and n.nspname = 'shardids_foreign'
where parent.relkind = 'p'
order by 1;
