-- Purpose:    the tables and columns that revisions drop, where shards have them: shardids.shards has the shards,
--             shardids.dropped the tables and columns, as [[table, column or null], ...]. Of a partitioned table: its parts
--             that hold rows. Nothing is installed.
-- Locks:      ACCESS SHARE on partitions until the end of the transaction.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select s.id as shard, leaf_schema.nspname::text as schema, leaf.relname::text as "table", a.attname::text as "column",
       pg_relation_size(leaf.oid) = 0 as is_empty
from unnest(current_setting('shardids.shards')::integer[]) wanted (id)
join shardids.shard s on s.id = wanted.id and s.state <> 'moved'
join pg_namespace n on n.nspname = s.schema
cross join jsonb_array_elements(current_setting('shardids.dropped')::jsonb) d (what)
join pg_class c on c.relnamespace = n.oid and c.relname = d.what ->> 0 and c.relkind in ('r', 'p')
cross join lateral (select c.oid where c.relkind = 'r'
                    union all
                    select tree.relid from pg_partition_tree(c.oid) tree where c.relkind = 'p' and tree.isleaf) part (oid)
join pg_class leaf on leaf.oid = part.oid and leaf.relkind = 'r'
join pg_namespace leaf_schema on leaf_schema.oid = leaf.relnamespace
left join pg_attribute a on a.attrelid = leaf.oid and a.attname = d.what ->> 1 and a.attnum > 0 and not a.attisdropped
where d.what ->> 1 is null or a.attname is not null
order by 1, 2, 3;
