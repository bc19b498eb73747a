-- Purpose:    what shardids lookup asks of a column in every shard of a node: whether its values can be claimed.
-- Settings:   shardids.table and shardids.column; shardids.claims, the name of the claims' table
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids, SELECT on its tables.

-- Who owns claims decides what runs when others claim. Who puts a trigger on a table that the triggers of a strict look-up write over dblink acts as the node URL's user.
with trusted as (
  select r.oid from pg_roles r
  where r.rolsuper or r.oid = (select e.nspowner from pg_namespace e where e.nspname = 'shardids'))
select s.id as shard, s.schema,
       c.oid is not null as has_table,
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
       c.relkind = 'p' or exists (select from pg_inherits h where c.oid in (h.inhrelid, h.inhparent)) as has_parts,
       (select count(*) from pg_trigger g join pg_proc p on p.oid = g.tgfoid
        where g.tgrelid = c.oid and g.tgenabled in ('O', 'A') and p.pronamespace = 'shardids'::regnamespace and p.proname = 'claim_rows'
          and g.tgname in (current_setting('shardids.claims') || '_ins', current_setting('shardids.claims') || '_upd')) as triggers,
       coalesce(claims.relowner = c.relowner, true) as claims_follow,
       case when claims.relkind <> 'r' then format('%I is no table', claims.relname)
            when claims.relowner <> c.relowner and claims.relowner not in (select r.oid from trusted r)
            then format('%I is owned by role %I', claims.relname, pg_get_userbyid(claims.relowner)) end as planted,
       (select string_agg(distinct w.what, '; ' order by w.what)
        from (
          select format('role %I owns %I', pg_get_userbyid(o.role), o.name)
          from (values (c.relname, c.relowner), (n.nspname, case pg_get_userbyid(n.nspowner) when 'pg_database_owner' then
                  (select d.datdba from pg_database d where d.datname = current_database()) else n.nspowner end)) o (name, role)
          where o.role not in (select r.oid from trusted r)
          union all
          select format('%s may %s %I', case a.grantee when 0 then 'public' else format('role %I', pg_get_userbyid(a.grantee)) end,
                        case a.privilege_type when 'TRIGGER' then 'make triggers on' else 'refer to' end, r.relname)
          from pg_class r, aclexplode(r.relacl) a
          where r.oid in (c.oid, claims.oid) and a.grantee <> r.relowner
            -- Before PostgreSQL 18, what a deletion cascades to fires triggers there as the role that deletes.
            and (a.privilege_type = 'TRIGGER' or a.privilege_type = 'REFERENCES' and r.oid = claims.oid)
            and a.grantee not in (select r.oid from trusted r)
          union all
          select format('trigger %I on %I calls a function of role %I', g.tgname, c.relname, pg_get_userbyid(p.proowner))
          from pg_trigger g join pg_proc p on p.oid = g.tgfoid
          where g.tgrelid = c.oid and not g.tgisinternal and p.proowner not in (select r.oid from trusted r)
          union all
          select format('trigger %I is on %I', g.tgname, claims.relname)
          from pg_trigger g where g.tgrelid = claims.oid and not g.tgisinternal
            and g.tgfoid not in (select p.oid from pg_proc p where p.pronamespace = 'shardids'::regnamespace)
          union all
          select format('%s refers to %I', k.conrelid::regclass, claims.relname)
          from pg_constraint k where k.confrelid = claims.oid and k.contype = 'f') w (what)) as strangers
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
