-- Purpose:    what shardids doctor asks of the shards of a node, and of schemas that look like shards: the state
--             of each, its generator, some of its own tables. Nothing is installed.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables. Tables that may not be read are left out.

with named as (
  select substr(n.nspname, length(shardids.schema_prefix()) + 1)::integer as id, n.nspname as schema
  from pg_namespace n
  where starts_with(n.nspname, shardids.schema_prefix())
    and substr(n.nspname, length(shardids.schema_prefix()) + 1) ~ '^[0-9]{4,5}$'
    and exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'id_offset' and c.relkind = 'S')),
there as (
  select coalesce(s.id, named.id) as id, coalesce(s.schema, named.schema) as schema, s.state, s.moved_to,
         s.server = shardids.server() as is_activated_here, counter.oid as counter, id_offset.oid as id_offset, n.oid as namespace
  from shardids.shard s
  full join named using (id)
  left join pg_class counter on counter.oid = s.id_counter
  left join pg_class id_offset on id_offset.oid = s.id_offset
  left join pg_namespace n on n.nspname = coalesce(s.schema, named.schema))
select there.id as shard,
       there.schema::text as schema,
       there.state,
       there.moved_to,
       coalesce(there.is_activated_here, false) as is_activated_here,
       there.namespace is not null as has_schema,
       there.counter is not null and there.id_offset is not null as has_sequences,
       -- The functions as the server prints them; the caller's search_path must not hold the schemas.
       coalesce(bodies.is_unlimited and bodies.skips_from is null
                or bodies.limit_tick <= coalesce(bodies.skips_from, 9223372036854775807), false)
         and coalesce(late_id.prosrc = format('begin return shardids.late_id(id_offset, %s); end', there.id), false) as next_id_is_ours,
       -- It looks at ticks that are past.
       coalesce(bodies.limit_tick is not null and bodies.skips_from is null, false) as is_slow,
       -- The number of the shard is put out of the way only where it stands for the shard.
       replace(replace(replace(pg_get_function_sqlbody(next_ids.oid), format('%I.', there.schema), 'SCHEMA.'),
               format('set_aside_%s(', there.id), 'set_aside_SHARD('), format(', %s)', there.id), ', SHARD)')
         as next_ids_body,
       array(select c.relname::text from pg_class c
             where c.relnamespace = there.namespace and c.relname in ('shardids_version', 'alembic_version', 'shardids_counter_kind', 'shardids_counter_zone')
               and c.relkind = 'r' and has_table_privilege(c.oid, 'select') order by 1) as own_tables
from there
left join pg_proc next_id on next_id.pronamespace = there.namespace and next_id.proname = 'next_id'
  and next_id.pronargs = 0
left join pg_proc late_id on late_id.pronamespace = there.namespace and late_id.proname = format('late_id_%s', there.id)
  and late_id.pronargs = 1
left join pg_proc next_ids on next_ids.pronamespace = there.namespace and next_ids.proname = 'next_ids'
  and next_ids.proargtypes = '23'
-- As shardids.define_next_id makes it: without a limit, or with one of those below which it has ticks to pass over.
left join lateral (
  select body.printed = format('RETURN COALESCE(%s, %s, %s)', calls.draw, calls.follow, calls.late) as is_unlimited,
         (select min(k.first_tick) from shardids.skipped k
          where k.shard = there.id and k.last_tick >> shardids.sequence_bits() >= shardids.ms_of(clock_timestamp())) as skips_from,
         (select min(k.first_tick) from shardids.skipped k
          where k.shard = there.id and body.printed in (
            format('RETURN COALESCE(NULLIF(LEAST(%1$s, %4$L::bigint), %4$L::bigint), NULLIF(LEAST(%2$s, %4$L::bigint), %4$L::bigint), %3$s)',
                   calls.draw, calls.follow, calls.late, shardids.id_of(k.first_tick, 0)),
            format('RETURN COALESCE(%s)', calls.late))) as limit_tick
  from (select coalesce(pg_get_function_sqlbody(next_id.oid),
                        case when starts_with(next_id.prosrc, format('begin if pg_catalog.to_regclass(%L) is null then raise exception ',
                                                                     format('%I.id_offset', there.schema)))
                                  and (select n.engine from shardids.node n) = 'citus'
                        then 'RETURN ' || replace(substring(next_id.prosrc from '; end if; return (.*); end$'), 'pg_catalog.', '') end) as printed) body,
       (select format('shardids.current_id(pg_sequence_last_value(''%1$I.id_offset''::regclass), '
                      '''%1$I.id_counter''::regclass, ''%1$I.id_offset''::regclass, %2$s)', there.schema, there.id) as draw,
               format('shardids.lagging_id(''%1$I.id_counter''::regclass, ''%1$I.id_offset''::regclass, %2$s)', there.schema, there.id) as follow,
               format('%1$I.late_id_%2$s(''%1$I.id_offset''::regclass)', there.schema, there.id) as late) calls) bodies on true
order by 1;
