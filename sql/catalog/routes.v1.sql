-- Purpose:    where each shard is, for clients in any language: the shard of a key, and the address of each shard's node.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.

-- By the directory of keys or else by the hash, as shardids.shard_for_key has it on the nodes, of which this database need not be one.
-- A region's shards are the keys' only if it is named.
create function shardids_catalog.shard_for_key(key text, region text default null) returns integer
language sql stable parallel safe
return (
  select coalesce(
           (select d.shard from shardids_catalog.key_home d
            where d.kind = 'text' || coalesce('@' || shard_for_key.region, '') and d.key = shard_for_key.key),
         s.first_shard
         + mod(h.hash + case when h.hash < 0 then 18446744073709551616 else 0::numeric end, s.shard_count)::integer)
  from (select ('x' || encode(substr(sha256(convert_to('s:' || key, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint as hash) h
  cross join (
    select 0 as first_shard, c.shard_count from shardids_catalog.cluster c where shard_for_key.region is null
    union all
    select r.first_shard, r.last_shard - r.first_shard + 1 from shardids_catalog.region r where r.name = shard_for_key.region) s);

comment on function shardids_catalog.shard_for_key(text, text) is
  'The shard where the rows of a text key live, of all shards or of a region''s; null if there is no such region';

create function shardids_catalog.percent_decoded(encoded text) returns text
language sql immutable strict parallel safe
return (
  select convert_from(coalesce(string_agg(
           case when m[1] ~ '^%[0-9A-Fa-f]{2}$' then decode(substr(m[1], 2), 'hex') else convert_to(m[1], 'UTF8') end,
           ''::bytea order by n), ''), 'UTF8')
  from regexp_matches(encoded, '%[0-9A-Fa-f]{2}|%|[^%]+', 'g') with ordinality part (m, n));

comment on function shardids_catalog.percent_decoded(text) is 'A part of a URL as it is meant';

-- A node's URL, taken apart as libpq does it: of several hosts the names and ports are lists with commas.
create view shardids_catalog.route as
select p.shard,
       c.schema_prefix || lpad(p.shard::text, greatest(4, length(p.shard::text)), '0') as schema,
       p.node, p.state, r.name as region, n.url,
       coalesce(q.host, nullif(btrim(shardids_catalog.percent_decoded(u.part[2]), '[]'), '')) as host,
       coalesce(q.port, u.part[3], '5432') as port,
       coalesce(q.database, nullif(shardids_catalog.percent_decoded(u.part[4]), ''), shardids_catalog.percent_decoded(u.part[1])) as database
from shardids_catalog.cluster c
cross join shardids_catalog.placement p
join shardids_catalog.node n on n.name = p.node
left join shardids_catalog.region r on p.shard between r.first_shard and r.last_shard
cross join lateral regexp_match(
  n.url, '^[a-z]+://(?:([^@/?:]*)(?::[^@/?]*)?@)?(\[[^]]*\]|[^:/?]*)(?::([0-9]+))?(?:/([^?]*))?(?:\?(.*))?$') u (part)
left join lateral (
  -- libpq connects to hostaddr, which is the address of host.
  select coalesce(string_agg(coalesce(substring(h.host from '^([A-Za-z0-9.-]+):[0-9]*$'), h.host), ',' order by o.n, h.n)
                    filter (where o.name = 'host'),
                  string_agg(h.host, ',' order by o.n, h.n) filter (where o.name = 'hostaddr')) as host,
         coalesce(nullif(max(o.value) filter (where o.name = 'port'), ''),
                  string_agg(coalesce(substring(h.host from '^[A-Za-z0-9.-]+:([0-9]+)$'), '5432'), ',' order by o.n, h.n)
                    filter (where o.name = 'host')) as port,
         max(o.value) filter (where o.name = 'dbname') as database
  from (
    select split_part(s.option, '=', 1) as name, s.n,
           shardids_catalog.percent_decoded(replace(substr(s.option, strpos(s.option, '=') + 1), '+', ' ')) as value
    from regexp_split_to_table(u.part[5], '&') with ordinality s (option, n)) o
  cross join lateral regexp_split_to_table(o.value, ',') with ordinality h (host, n)) q on true;

comment on view shardids_catalog.route is 'The schema and the node of each shard, and the address of the node';
