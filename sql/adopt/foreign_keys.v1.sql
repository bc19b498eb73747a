-- Purpose:    what shardids adopt plan asks of foreign keys. Those of a partition alone are given with the partitioned table
--             and is_of_partition, leaves: how many of its partitions that hold rows have it. is_to_partition: it refers to
--             one. is_checked: all rows are known to obey it. is_builtin: it compares by PostgreSQL's own equality. on_delete,
--             on_update: as in pg_constraint.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

with recursive top as (
  select c.oid as part, c.oid as top from pg_class c where c.relkind in ('r', 'p') and not c.relispartition
  union all
  select i.inhrelid, top.top
  from top
  join pg_inherits i on i.inhparent = top.part
  join pg_class c on c.oid = i.inhrelid and c.relispartition)
select k.conname::text as name,
       own.top::bigint as table_oid,
       theirs.top::bigint as referenced_oid,
       own.top <> k.conrelid as is_of_partition,
       theirs.top <> k.confrelid as is_to_partition,
       case when own.top <> k.conrelid then (select count(*) from pg_partition_tree(k.conrelid) t where t.isleaf) else 0 end
         as leaves,
       k.confdeltype::text as on_delete,
       k.confupdtype::text as on_update,
       -- Not enforced implies not valid (PostgreSQL 18).
       k.convalidated as is_checked,
       not exists (
         select from pg_operator o
         where o.oid = any (k.conpfeqop)
           and (o.oprnamespace <> 'pg_catalog'::regnamespace or o.oprname <> '=')) as is_builtin,
       array(
         select a.attname::text
         from unnest(k.conkey) with ordinality as own_column (number, position)
         join pg_attribute a on a.attrelid = k.conrelid and a.attnum = own_column.number
         order by position) as columns,
       array(
         select a.attname::text
         from unnest(k.confkey) with ordinality as their_column (number, position)
         join pg_attribute a on a.attrelid = k.confrelid and a.attnum = their_column.number
         order by position) as referenced
from pg_constraint k
join top own on own.part = k.conrelid
join top theirs on theirs.part = k.confrelid
where k.contype = 'f' and k.conparentid = 0
order by own.top, k.conname;
