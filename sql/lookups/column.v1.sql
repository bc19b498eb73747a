-- Purpose:    what shardids lookup asks of a column in every shard of a node: whether its values can be claimed.
-- Settings:   shardids.table and shardids.column; shardids.claims, the name of the claims' table
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

select s.id as shard, s.schema,
       c.oid is not null as has_table,
       array(select o.attname::text from pg_attribute o
             where o.attrelid = c.oid and o.attnum > 0 and not o.attisdropped order by 1) as columns,
       format_type(a.atttypid, a.atttypmod) as type,
       case
         when t.oid in ('text'::regtype, 'varchar'::regtype) then 'text'
         when t.oid in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) then 'bigint'
         when t.oid in ('uuid'::regtype, 'bytea'::regtype, 'date'::regtype) then t.typname::text
       end as kind,
       coalesce(l.collisdeterministic, true) as is_deterministic,
       coalesce(a.attnotnull, false) as is_not_null,
       coalesce(a.attidentity <> '' or a.atthasdef, false) as is_filled,
       exists (
         select from pg_index i
         where i.indrelid = c.oid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
           and i.indnkeyatts = 1 and i.indkey[0] = a.attnum
           and i.indcollation[0] = a.attcollation) as is_unique,
       claims.oid is not null as has_claims,
       coalesce((v.atttypid, v.atttypmod, v.attcollation) = (a.atttypid, a.atttypmod, a.attcollation), false) as claims_fit,
       coalesce(c.relrowsecurity, false) as is_row_secured,
       exists (select from pg_attribute g where g.attrelid = c.oid and g.attacl is not null and not g.attisdropped) as has_column_grants,
       -- '' stands for PUBLIC.
       array(select distinct case a.grantee when 0 then '' else pg_get_userbyid(a.grantee) end
             from aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
             where a.privilege_type in ('INSERT', 'UPDATE') or a.grantee = c.relowner order by 1) as writers,
       not exists (
         with recursive tree (id) as (select c.oid union select h.inhrelid from pg_inherits h join tree t on t.id = h.inhparent)
         select from tree t join pg_class p on p.oid = t.id and p.relkind in ('r', 'p')
         where not exists (
           select from pg_trigger g
           where g.tgrelid = t.id and g.tgname = current_setting('shardids.claims') and g.tgenabled in ('O', 'A')
             and g.tgfoid = 'shardids.refuse_unclaimed'::regproc)) as is_guarded,
       (select string_agg(distinct w.what, '; ' order by w.what)
        from (
          select format('%s has %s on %I', case a.grantee when 0 then 'PUBLIC' else format('role "%s"', pg_get_userbyid(a.grantee)) end,
                        a.privilege_type, claims.relname)
          from aclexplode(claims.relacl) a
          where a.grantee <> claims.relowner and a.privilege_type <> 'SELECT'
          union all
          select format('there are %s functions %I, not two', count(*), claims.relname) from pg_proc p
          where p.pronamespace = n.oid and p.proname = current_setting('shardids.claims')
          having claims.oid is not null and count(*) <> 2) w (what)) as changed
from shardids.shard s
join pg_namespace n on n.nspname = s.schema
left join pg_class c on c.relnamespace = n.oid and c.relname = current_setting('shardids.table') and c.relkind in ('r', 'p')
left join pg_attribute a on a.attrelid = c.oid and a.attname = current_setting('shardids.column') and not a.attisdropped
left join pg_type t on t.oid = a.atttypid
left join pg_collation l on l.oid = a.attcollation
left join pg_class claims on claims.relnamespace = n.oid and claims.relname = current_setting('shardids.claims')
left join pg_attribute v on v.attrelid = claims.oid and v.attname = 'value' and not v.attisdropped
where s.state <> 'moved'
order by s.id;
