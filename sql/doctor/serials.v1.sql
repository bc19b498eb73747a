-- Purpose:    what shardids doctor asks of the sequences that fill columns of the shards' tables, where a unique index finds the
--             highest value: the next one is to be above it. A row per shard and column.
-- Locks:      none beyond those of reading the server's catalogs and the sequences.
-- Privileges: USAGE on schema shardids, SELECT on its tables. Sequences that may not be read are left out.

with shard as materialized (
  select s.id, n.oid as namespace
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  where s.state = 'active'),
-- Few columns have one: from these on, each is looked up.
filled as materialized (
  -- Of an identity: the sequence depends on the column. Of a default: the default depends on the sequence.
  select d.objid as sequence, d.refobjid as relation, d.refobjsubid as number
  from pg_depend d
  where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype = 'i' and d.refobjsubid > 0
  union
  select d.refobjid, f.adrelid, f.adnum
  from pg_sequence q
  join pg_depend d on d.refclassid = 'pg_class'::regclass and d.refobjid = q.seqrelid and d.classid = 'pg_attrdef'::regclass
  join pg_attrdef f on f.oid = d.objid)
select shard.id as shard,
       r.relname::text as table_name,
       a.attname::text as column_name,
       c.relname::text as sequence_name,
       coalesce(pg_sequence_last_value(c.oid), q.seqstart - q.seqincrement) as last_value
from filled f
join pg_class c on c.oid = f.sequence
join pg_sequence q on q.seqrelid = c.oid and q.seqincrement > 0 and not q.seqcycle
join pg_class r on r.oid = f.relation and r.relnamespace = c.relnamespace and r.relkind in ('r', 'p') and not r.relispartition
join shard on shard.namespace = c.relnamespace
join pg_attribute a on a.attrelid = r.oid and a.attnum = f.number and a.atttypid in ('int8'::regtype, 'int4'::regtype, 'int2'::regtype)
where case when c.relkind = 'S' then has_sequence_privilege(c.oid, 'usage, select') end
  and exists (
    select from pg_index i
    where i.indrelid = r.oid and i.indisunique and i.indisvalid and i.indpred is null and i.indnkeyatts = 1 and i.indkey[0] = f.number)
order by 1, 2, 3;
