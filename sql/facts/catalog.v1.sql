-- Purpose:    what a reading asks of the catalog: one row, of one snapshot. Nothing is installed.
-- Locks:      ACCESS SHARE on the tables of schema shardids_catalog.
-- Privileges: USAGE on schema shardids_catalog, SELECT on the tables named here.

with database as (
  select oid from pg_database where datname = current_database()),
held as (
  select case l.objsubid when 2 then l.classid::bigint else l.objid::bigint end as lock, l.objid::bigint as key, l.pid
  from pg_locks l
  join database d on d.oid = l.database
  where l.locktype = 'advisory' and l.granted
    and (l.objsubid = 2 and l.classid in (1936220520, 1936220523, 1936220527, 1936220534)
         or l.objsubid = 1 and l.classid = 0 and l.objid = 1936220531))
select c.id as cluster,
       c.version,
       c.epoch_ms,
       c.time_bits,
       c.shard_bits,
       c.sequence_bits,
       c.layout_name,
       c.shard_count,
       c.schema_prefix,
       (select coalesce(json_object_agg(n.name, n.url), '{}') from shardids_catalog.node n) as nodes,
       (select coalesce(json_object_agg(n.name, n.region), '{}') from shardids_catalog.node n
        where n.region is not null) as node_regions,
       (select coalesce(json_agg(json_build_array(r.name, r.first_shard, r.last_shard) order by r.name), '[]')
        from shardids_catalog.region r) as regions,
       (select coalesce(json_agg(json_build_array(p.node, p.state, p.shards)), '[]')
        from (select p.node, p.state, array_agg(p.shard) as shards
              from shardids_catalog.placement p group by 1, 2) p) as placements,
       (select coalesce(json_agg(json_build_object(
                 'shard', m.shard,
                 'source', m.source,
                 'target', m.target,
                 'step', m.step,
                 'age_s', extract(epoch from clock_timestamp() - m.started_at)::float8,
                 'is_running', exists (select from held h where h.lock = 1936220520
                                        and h.key = ('x' || left(m.epoch::text, 8))::bit(32)::bigint)) order by m.shard), '[]')
        from shardids_catalog.move m where m.ended_at is null) as moves,
       (select coalesce(json_agg(json_build_object(
                 'key', k.key,
                 'kind', k.kind,
                 'source', k.source,
                 'target', k.target,
                 'step', k.step,
                 'is_unsettled', k.is_unsettled,
                 'is_running', exists (select from held h where h.lock = 1936220520
                                        and h.key = ('x' || left(k.epoch::text, 8))::bit(32)::bigint)) order by k.id), '[]')
        from shardids_catalog.key_move k where k.ended_at is null) as key_moves,
       (select coalesce(json_agg(json_build_object(
                 'shard', l.shard,
                 'node', l.node,
                 'home', l.home,
                 'is_running', exists (select from held h where h.lock = 1936220520
                                        and h.key = ('x' || left(l.epoch::text, 8))::bit(32)::bigint)) order by l.shard), '[]')
        from shardids_catalog.loss l where l.completed_at is null) as losses,
       (select case when exists (select from held h where h.lock = 1936220523) then 'running'
                    when a.is_paused then 'paused' else 'waiting' end
        from shardids_catalog.adoption a where a.ended_at is null) as adoption,
       exists (select from held h where h.lock = 1936220531) as is_migrating,
       (select coalesce(nullif(a.application_name, ''), 'a rebalance')
        from held h left join pg_stat_activity a on a.pid = h.pid
        where h.lock = 1936220534 and h.key = 0 limit 1) as rebalance,
       (select json_build_object('moved', count(*) filter (where m.outcome = 'moved'),
                                 'aborted', count(*) filter (where m.outcome = 'aborted'))
        from shardids_catalog.move m where m.automatic) as automatic_moves,
       exists (select from held h where h.lock = 1936220527 and h.key = 0) as references_change
from shardids_catalog.cluster c;
