-- Purpose:    what shardids doctor asks of privileges: who may do what with each object of a shard, and with the
--             engine that the shard uses; shards that are alike in one row. A row without a role says in which
--             shards the object is; OWNER stands for all privileges.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

with shard as (
  select s.id, n.oid as namespace, n.nspowner as owner, n.nspacl as acl
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  where s.state = 'active'),
object as (
  -- As text from the first on: a union with names would cut functions with their arguments to 63 bytes.
  select s.id, 'schema' as kind, ''::text as name, s.owner, s.acl from shard s
  union all
  select s.id, case c.relkind when 'S' then 'sequence' else 'table' end, c.relname::text, c.relowner, c.relacl
  from shard s join pg_class c on c.relnamespace = s.namespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
  union all
  select s.id, 'function', format('%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)), p.proowner,
         -- Without a list everybody may call it, which a list that is there says.
         coalesce(p.proacl, acldefault('f', p.proowner))
  from shard s join pg_proc p on p.pronamespace = s.namespace
  union all
  select s.id, 'engine schema', 'shardids', n.nspowner, n.nspacl
  from shard s join pg_namespace n on n.nspname = 'shardids'
  union all
  select s.id, 'engine table', c.oid::regclass::text, c.relowner, c.relacl
  from shard s join pg_class c on c.oid in ('shardids.node'::regclass, 'shardids.shard'::regclass)),
privilege as (
  select o.id, o.kind, o.name, null::text as role, '{}'::text[] as privileges from object o
  union all
  select o.id, o.kind, o.name, pg_get_userbyid(o.owner)::text, '{OWNER}' from object o
  union all
  select o.id, o.kind, o.name, case acl.grantee when 0 then 'public' else pg_get_userbyid(acl.grantee)::text end,
         array_agg(distinct acl.privilege_type order by acl.privilege_type)
  from object o
  cross join lateral aclexplode(o.acl) acl
  where acl.grantee <> o.owner
  group by o.id, o.kind, o.name, acl.grantee)
select kind, name, role, privileges, array_agg(id order by id) as shards
from privilege
group by kind, name, role, privileges
order by kind, name, role, privileges;
