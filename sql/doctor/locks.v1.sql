-- Purpose:    what shardids doctor asks of the advisory locks of shards, 1936220516 of the generator and 1936220517 of
--             the schema: the sessions that hold one. age_s: how long the session has been idle, in a transaction or
--             not, and held what it holds; of one that runs a statement, for how long its transaction has been open.
-- Locks:      none beyond those of reading the server's views.
-- Privileges: USAGE on schema shardids, SELECT on its tables. Sessions whose times may not be read are left out.

select l.classid::integer as lock,
       s.id as shard,
       l.pid,
       a.usename::text as role,
       coalesce(a.application_name, '') as application_name,
       a.state,
       extract(epoch from clock_timestamp() - case a.state when 'active' then a.xact_start else a.state_change end)::float8 as age_s
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
join shardids.shard s on s.id::oid = l.objid
where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid in (1936220516, 1936220517)
  and l.database = (select oid from pg_database where datname = current_database())
  and a.state is not null and a.usename is not null
order by 1, 2, 3;
