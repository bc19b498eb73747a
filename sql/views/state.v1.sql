-- Purpose:    where the views of a database over all shards read each shard: from which server, or, without one,
--             directly in this database. Nothing is installed.
-- Settings:   shardids.schema_prefix
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

with view as (
  select c.oid, c.relname
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'shardids_views'
  where c.relkind = 'v')
select v.relname::text as view_name,
       substring(part.relname from '_([0-9]{4,5})$')::integer as shard,
       s.srvname::text as server,
       s.srvoptions::text[] as server_options
from view v
join pg_class parent on parent.relname = v.relname || '_foreign' and parent.relkind = 'p'
join pg_namespace n on n.oid = parent.relnamespace and n.nspname = 'shardids_views'
join pg_inherits i on i.inhparent = parent.oid
join pg_class part on part.oid = i.inhrelid
join pg_foreign_table f on f.ftrelid = part.oid
join pg_foreign_server s on s.oid = f.ftserver
union
select v.relname::text, substr(n.nspname, length(current_setting('shardids.schema_prefix')) + 1)::integer, null, null
from view v
join pg_rewrite r on r.ev_class = v.oid
join pg_depend d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_class'::regclass
join pg_class c on c.oid = d.refobjid
join pg_namespace n on n.oid = c.relnamespace
where starts_with(n.nspname, current_setting('shardids.schema_prefix'))
  and substr(n.nspname, length(current_setting('shardids.schema_prefix')) + 1) ~ '^[0-9]{4,5}$'
order by 1, 2;
