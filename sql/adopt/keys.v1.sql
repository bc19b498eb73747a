-- Purpose:    what shardids adopt plan asks of primary keys, unique indexes and exclusion constraints: the columns in
--             which two rows have to be equal before they are in conflict. Expressions are not among them.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

select i.indrelid::bigint as table_oid,
       x.relname::text as name,
       i.indisprimary as is_primary,
       i.indisexclusion as is_exclusion,
       i.indpred is not null as is_partial,
       0 = any (i.indkey) as has_expression,
       array(
         select a.attname::text
         from generate_series(0, i.indnkeyatts - 1) as position
         join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[position] and a.attnum > 0
         left join pg_operator o on o.oid = k.conexclop[position + 1]
         where not i.indisexclusion or o.oprname = '='
         order by position) as columns
from pg_index i
join pg_class x on x.oid = i.indexrelid
join pg_class c on c.oid = i.indrelid and c.relkind in ('r', 'p') and not c.relispartition
join pg_namespace n on n.oid = c.relnamespace and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
left join pg_constraint k on i.indisexclusion and k.conindid = i.indexrelid and k.contype = 'x'
where (i.indisunique or i.indisexclusion) and i.indisvalid
order by i.indrelid, not i.indisprimary, x.relname;
