-- Purpose:    what shardids adopt plan names because it never comes along: kind, the table that it belongs to, and its
--             name. What belongs to extensions is left out; belongings.v1.sql has what may come.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

with application as (
  select n.oid, n.nspname from pg_namespace n where n.nspname !~ '^pg_' and n.nspname <> 'information_schema'),
of_extension as (
  select d.classid, d.objid from pg_depend d where d.deptype = 'e')
select 'rule' as kind, coalesce(pg_partition_root(r.ev_class), r.ev_class)::oid::bigint as table_oid, r.rulename::text as name
from pg_rewrite r
join pg_class c on c.oid = r.ev_class and c.relkind in ('r', 'p')
where r.rulename <> '_RETURN'
union all
select case c.relkind when 'm' then 'materialized view' else 'sequence' end,
       null, format('%I.%I', a.nspname, c.relname)
from pg_class c
join application a on a.oid = c.relnamespace
where (c.relkind = 'm'
       or c.relkind = 'S' and not exists (
         select from pg_depend d
         where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.refclassid = 'pg_class'::regclass
           and d.deptype in ('a', 'i')))
  and not exists (select from of_extension e where e.classid = 'pg_class'::regclass and e.objid = c.oid)
union all
select case t.typtype when 'e' then 'enum' when 'd' then 'domain' when 'r' then 'range type' else 'composite type' end,
       null, format('%I.%I', a.nspname, t.typname)
from pg_type t
join application a on a.oid = t.typnamespace
left join pg_class c on c.oid = t.typrelid
where (t.typtype in ('e', 'd', 'r') or t.typtype = 'c' and c.relkind = 'c')
  and not exists (select from of_extension e where e.classid = 'pg_type'::regclass and e.objid = t.oid)
union all
select 'extension', null, quote_ident(x.extname)
from pg_extension x
where x.extname <> 'plpgsql'
union all
select 'event trigger', null, quote_ident(e.evtname)
from pg_event_trigger e
where not exists (select from of_extension x where x.classid = 'pg_event_trigger'::regclass and x.objid = e.oid)
union all
select 'publication', null, quote_ident(p.pubname)
from pg_publication p
order by 1, 2, 3;
