-- Purpose:    what shardids adopt plan asks of replica identities: the columns by which logical replication finds a row,
--             of each table and each partition that holds rows. null: the whole row.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

with recursive top as (
  select c.oid as part, c.oid as top from pg_class c where c.relkind in ('r', 'p') and not c.relispartition
  union all
  select i.inhrelid, top.top
  from top
  join pg_inherits i on i.inhparent = top.part
  join pg_class c on c.oid = i.inhrelid and c.relispartition)
select top.top::bigint as table_oid,
       case when c.relreplident <> 'f' then array(
         select a.attname::text
         from pg_index i
         join pg_attribute a on a.attrelid = c.oid and a.attnum = any (i.indkey)
         where i.indrelid = c.oid
           and (c.relreplident = 'd' and i.indisprimary or c.relreplident = 'i' and i.indisreplident)
         order by a.attnum) end as columns
from top
join pg_class c on c.oid = top.part and c.relkind = 'r'
join pg_namespace n on n.oid = c.relnamespace and n.nspname !~ '^pg_' and n.nspname <> 'information_schema';
