-- Purpose:    who holds, or waits for, a lock on a table of the application with which nobody else can read it; and whom
--             they wait for.
-- Locks:      none.
-- Privileges: none.

select distinct c.oid::regclass::text as "table",
       l.granted as is_granted,
       l.pid,
       coalesce(a.usename, x.owner)::text as role,
       a.application_name as application,
       x.gid
from pg_locks l
join pg_class c on c.oid = l.relation
join pg_namespace n on n.oid = c.relnamespace and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
left join pg_stat_activity a on a.pid = l.pid
left join lateral (
  select p.gid, p.owner
  from pg_locks t
  join pg_prepared_xacts p on p.transaction = t.transactionid
  where l.pid is null and t.virtualtransaction = l.virtualtransaction and t.locktype = 'transactionid') x on true
where l.locktype = 'relation' and c.relkind in ('r', 'p', 'm', 'f')
  and (l.mode = 'AccessExclusiveLock'
       or l.granted and exists (
         select from pg_locks w
         where w.locktype = 'relation' and w.database = l.database and w.relation = l.relation
           and w.mode = 'AccessExclusiveLock' and not w.granted))
  and l.pid is distinct from pg_backend_pid()
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
order by 1, 2 desc;
