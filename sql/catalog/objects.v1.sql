-- Purpose:    all that the application has in the schemas of shards, one row for each object and way to define it, with
--             the shards that have it so: shards that are alike are in the same rows. The schema's own name is
--             {shard} in every definition, and the owner of schema shardids is {owner}, so that the rows of two
--             nodes can be compared. Of the generator and the engine only the privileges are listed; shardids' version table,
--             and the triggers of moves, adoptions and look-ups, which have checks of their own, are left out.
--             PostgreSQL's own functions write the definitions; some differ between its major versions.
-- Settings:   shardids.shards: which shards, as an array of integers
-- Locks:      ACCESS SHARE on relations until the end of the transaction, for some definitions: ask for some hundred
--             shards at a time, or the server's lock table may be full.
-- Privileges: USAGE on schema shardids, SELECT on its tables. To be run with a search_path of pg_catalog and pg_temp
--             alone: names are then qualified, and no function of another schema is called.

with shard as materialized (
  select s.id, n.oid as namespace, n.nspname, n.nspowner, n.nspacl
  from shardids.shard s
  join pg_namespace n on n.nspname = s.schema
  where s.id = any (current_setting('shardids.shards')::integer[])),
role as materialized (
  select 0 as oid, 'public' as name
  union all
  select r.oid, case r.oid when n.nspowner then '{owner}' else r.rolname::text end
  from pg_roles r, pg_namespace n where n.nspname = 'shardids'),
-- What an extension brings is the extension's, which is listed itself.
member as materialized (
  select classid, objid from pg_depend where deptype = 'e'),
relation as materialized (
  select s.id, c.*
  from shard s
  join pg_class c on c.relnamespace = s.namespace
  where c.relkind in ('r', 'p', 'v', 'm', 'S', 'f', 'c')
    and c.relname not in ('id_counter', 'id_offset', 'shardids_version', 'shardids_load')
    and not exists (select from member m where m.classid = 'pg_class'::regclass and m.objid = c.oid)),
-- PostgreSQL's own options; index options are in the index's definition. What a vendor's server or an extension adds is listed apart:
-- Debian's 15.20 keeps notes in every column, which differ by table.
known_option as materialized (
  select array['fillfactor', 'toast_tuple_target', 'parallel_workers', 'user_catalog_table', 'vacuum_index_cleanup', 'vacuum_truncate',
               'vacuum_max_eager_freeze_failure_rate', 'log_autovacuum_min_duration', 'log_autoanalyze_min_duration',
               'security_barrier', 'security_invoker', 'check_option', 'n_distinct', 'n_distinct_inherited'] as names),
attribute as materialized (
  select r.id, r.oid as relation, r.relname, r.relowner, a.attname, a.attnum, a.attacl, a.atttypid, a.atttypmod, a.attcollation,
         a.attnotnull, a.attidentity, a.attgenerated, a.atthasdef, a.attstorage, a.attcompression, a.attstattarget, a.attoptions,
         a.attfdwoptions, a.attislocal
  from relation r
  join pg_attribute a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
  where r.relkind in ('r', 'p', 'v', 'm', 'f', 'c')),
-- Read once: the index of names has each next_id() of the server under one name, and would be read once per shard.
routine as materialized (
  select s.id, p.*,
         p.proname = 'next_id' and p.pronargs = 0 or p.proname = 'next_ids' and p.proargtypes = '23'
         or p.proname in (format('late_id_%s', s.id), format('set_aside_%s', s.id)) as is_engine
  from pg_proc p
  join shard s on s.namespace = p.pronamespace),
function as materialized (
  select p.*, format('%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as signature
  from routine p
  where not p.is_engine and not exists (select from member m where m.classid = 'pg_proc'::regclass and m.objid = p.oid)),
type as materialized (
  select s.id, t.*
  from shard s
  join pg_type t on t.typnamespace = s.namespace
  where t.typtype in ('e', 'd', 'r', 'b') and not (t.typelem <> 0 and t.typlen = -1)
    and not exists (select from member m where m.classid = 'pg_type'::regclass and m.objid = t.oid)),
-- Publications that take a part of a table; version 14 has no such. Others, of all tables perhaps, are not opened.
published as materialized (
  select t.pubname, r.oid as relation, to_jsonb(t) as some
  from (select distinct p.pubname
        from pg_publication p
        join pg_publication_rel l on l.prpubid = p.oid
        where not starts_with(p.pubname, 'shardids_')
          and coalesce(to_jsonb(l) ->> 'prqual', to_jsonb(l) ->> 'prattrs') is not null) n
  join pg_publication_tables t on t.pubname = n.pubname
  join shard s on s.nspname = t.schemaname
  join relation r on r.id = s.id and r.relname = t.tablename),
-- What others may be granted of the generator and of the engine that draws with it: the same in nearly all shards.
engine_of as (
  select s.id, 'sequence' as kind, c.relname::text as name, c.relowner as owner, c.relacl as acl, 's'::"char" as acl_type
  from shard s
  join pg_class c on c.relnamespace = s.namespace and c.relname in ('id_counter', 'id_offset') and c.relkind = 'S'
  union all
  select s.id, 'table', c.relname::text, c.relowner, c.relacl, 'r'
  from shard s
  join pg_class c on c.relnamespace = s.namespace and c.relname in ('shardids_version', 'shardids_load') and c.relkind = 'r'
  union all
  select p.id, 'function',
         case p.proname when 'next_id' then 'next_id()' when 'next_ids' then 'next_ids(n integer)'
           when format('late_id_%s', p.id) then 'late_id(id_offset regclass)'
           else 'set_aside(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint)' end,
         p.proowner, p.proacl, 'f'
  from routine p
  where p.is_engine),
engine as materialized (
  select array_agg(id order by id) as shards, concat_ws(' ', kind, name) as name, acl::text as text, owner, acl_type
  from engine_of
  group by kind, name, acl::text, owner, acl_type
  union all
  select (select array_agg(id order by id) from shard), 'engine schema shardids', n.nspacl::text, n.nspowner, 'n'
  from pg_namespace n where n.nspname = 'shardids'
  union all
  select (select array_agg(id order by id) from shard), concat_ws(' ', 'engine table', c.oid::regclass), c.relacl::text, c.relowner, 'r'
  from pg_class c where c.oid in ('shardids.node'::regclass, 'shardids.shard'::regclass)),
object as materialized (
  -- As text from the first on: a union with names cuts functions with their arguments to 63 bytes.
  select s.id, 'schema' as kind, ''::text as name, 'pg_namespace'::regclass as class, s.namespace as oid, 0 as subid,
         s.nspowner as owner, s.nspacl as acl, 'n'::"char" as acl_type, '' as definition
  from shard s
  union all
  select r.id,
         case r.relkind when 'r' then 'table' when 'p' then 'table' when 'v' then 'view' when 'm' then 'materialized view'
                        when 'S' then 'sequence' when 'f' then 'foreign table' else 'type' end,
         r.relname, 'pg_class'::regclass, r.oid, 0, r.relowner, r.relacl,
         case r.relkind when 'S' then 's'::"char" else 'r'::"char" end,
         concat_ws(' ',
           case r.relpersistence when 'u' then 'unlogged' end,
           case r.relkind
             when 'c' then 'composite'
             when 'p' then 'partition by ' || pg_get_partkeydef(r.oid)
             when 'v' then 'as ' || pg_get_viewdef(r.oid)
             when 'm' then 'as ' || pg_get_viewdef(r.oid)
             when 'S' then (
               select concat_ws(' ', q.seqtypid::regtype, 'start', q.seqstart, 'increment', q.seqincrement, 'minvalue', q.seqmin,
                                'maxvalue', q.seqmax, 'cache', q.seqcache, case when q.seqcycle then 'cycle' end)
               from pg_sequence q where q.seqrelid = r.oid)
             when 'f' then (
               select format('server %s options %s', v.srvname, f.ftoptions::text)
               from pg_foreign_table f join pg_foreign_server v on v.oid = f.ftserver where f.ftrelid = r.oid)
           end,
           case when r.relkind in ('r', 'p', 'f') then (
             select 'inherits ' || string_agg(i.inhparent::regclass::text || case when i.inhdetachpending then ' (detach pending)' else '' end,
                                              ', ' order by i.inhseqno)
             from pg_inherits i where i.inhrelid = r.oid) end,
           case when r.relispartition then pg_get_expr(r.relpartbound, r.oid) end,
           'of ' || nullif(r.reloftype, 0)::regtype::text,
           'using ' || (select m.amname from pg_am m where m.oid = r.relam and m.amname <> 'heap'),
           case when r.reloptions is not null then
             'with ' || (select array_agg(o order by o)::text from known_option k, unnest(r.reloptions) o
                         where split_part(o, '=', 1) = any (k.names) or starts_with(o, 'autovacuum_')) end,
           'toast with ' || (select array_agg(o order by o)::text from pg_class t, known_option k, unnest(t.reloptions) o
                             where t.oid = nullif(r.reltoastrelid, 0) and t.reloptions is not null
                               and (split_part(o, '=', 1) = any (k.names) or starts_with(o, 'autovacuum_'))),
           case when r.relrowsecurity then 'row level security' end,
           case when r.relforcerowsecurity then 'force row level security' end,
           case when r.relkind in ('r', 'p') and r.relreplident <> 'd' then concat_ws(' ', 'replica identity', case r.relreplident
             when 'f' then 'full' when 'n' then 'nothing'
             else (select i.indexrelid::regclass::text from pg_index i where i.indrelid = r.oid and i.indisreplident) end) end)
  from relation r
  union all
  -- The columns' order; a finding of its own only where the columns are the same.
  select a.id, 'column order', a.relname, 'pg_class'::regclass, 0, 0, null, null, null,
         string_agg(a.attname, ', ' order by a.attnum)
  from attribute a
  group by a.id, a.relation, a.relname
  union all
  select a.id, 'column', format('%s.%s', a.relname, a.attname), 'pg_class'::regclass, a.relation, a.attnum, a.relowner, a.attacl, 'c',
         concat_ws(' ',
           format_type(a.atttypid, a.atttypmod),
           case when a.attcollation <> t.typcollation then 'collate ' || a.attcollation::regcollation::text end,
           case when a.attnotnull then 'not null' end,
           case a.attidentity when 'a' then 'generated always as identity' when 'd' then 'generated by default as identity' end,
           case when a.attgenerated = '' then 'default ' else 'generated always as ' end || pg_get_expr(d.adbin, d.adrelid),
           case a.attgenerated when 's' then 'stored' when 'v' then 'virtual' end,
           case when a.attstorage <> t.typstorage then 'storage ' || a.attstorage::text end,
           'compression ' || nullif(a.attcompression::text, ''),
           'statistics ' || nullif(a.attstattarget, -1)::text,
           case when a.attoptions is not null then
             'with ' || (select array_agg(o order by o)::text from known_option k, unnest(a.attoptions) o
                         where split_part(o, '=', 1) = any (k.names)) end,
           'options ' || a.attfdwoptions::text,
           case when not a.attislocal then 'inherited' end)
  from attribute a
  join pg_type t on t.oid = a.atttypid
  left join pg_attrdef d on a.atthasdef and d.adrelid = a.relation and d.adnum = a.attnum
  union all
  -- From version 18 on the server lists NOT NULL here, too; the columns have said it, but for one that is not valid.
  -- A foreign key of or to partitions has parts with names that the server chose.
  select r.id, 'constraint', format('%s.%s', r.relname, k.conname), 'pg_constraint'::regclass, k.oid, 0, null, null, null,
         pg_get_constraintdef(k.oid)
  from relation r
  join pg_constraint k on k.conrelid = r.oid
  where (k.contype <> 'n' or not k.convalidated) and not (k.contype = 'f' and k.conparentid <> 0)
  union all
  select r.id, 'index', format('%s.%s', r.relname, x.relname), 'pg_class'::regclass, x.oid, 0, null, null, null,
         concat_ws(' ', pg_get_indexdef(x.oid),
                   (select 'statistics ' || string_agg(format('%s of %s', a.attstattarget, a.attnum), ', ' order by a.attnum)
                    from pg_attribute a where a.attrelid = x.oid and a.attstattarget >= 0),
                   case when i.indisclustered then '(clustered)' end,
                   case when not (i.indisvalid and i.indisready and i.indislive) then '(invalid)' end)
  from relation r
  join pg_index i on i.indrelid = r.oid
  join pg_class x on x.oid = i.indexrelid
  union all
  select distinct o.id, 'unknown option', o.name, 'pg_class'::regclass, 0, 0, null::oid, null::aclitem[], null::"char", ''
  from (select r.id, split_part(unnest(r.reloptions), '=', 1) as name from relation r where r.reloptions is not null
        union all
        select a.id, split_part(unnest(a.attoptions), '=', 1) from attribute a where a.attoptions is not null) o
  cross join known_option k
  where o.name <> all (k.names) and not starts_with(o.name, 'autovacuum_')
  union all
  -- The triggers of a foreign key come with it, and are listed only where they don't fire as they should.
  select r.id, 'trigger', format('%s.%s', r.relname, case when t.tgisinternal then k.conname || ' (internal)' else t.tgname end),
         'pg_trigger'::regclass, t.oid, 0, null, null, null,
         concat_ws(' ', case when not t.tgisinternal then pg_get_triggerdef(t.oid) end,
                   case t.tgenabled when 'D' then 'disabled' when 'R' then 'enable replica' when 'A' then 'enable always' end)
  from relation r
  join pg_trigger t on t.tgrelid = r.oid
  left join pg_constraint k on k.oid = t.tgconstraint
  where case when t.tgisinternal then t.tgenabled <> 'O' else not (t.tgname in ('shardids_barrier', 'shardids_adoption', 'shardids_back', 'shardids_back_full')
                                                                or starts_with(t.tgname, 'shardids_lookup_') or starts_with(t.tgname, 'shardids_key_')) end
  union all
  select r.id, 'rule', format('%s.%s', r.relname, w.rulename), 'pg_rewrite'::regclass, w.oid, 0, null, null, null,
         concat_ws(' ', pg_get_ruledef(w.oid), case w.ev_enabled when 'D' then 'disabled' when 'R' then 'enable replica'
                                                                 when 'A' then 'enable always' end)
  from relation r
  join pg_rewrite w on w.ev_class = r.oid
  where w.rulename <> '_RETURN'
  union all
  select r.id, 'policy', format('%s.%s', r.relname, p.polname), 'pg_policy'::regclass, p.oid, 0, null, null, null,
         concat_ws(' ', case when p.polpermissive then 'permissive' else 'restrictive' end, 'for', p.polcmd, 'to',
                   (select string_agg(o.name, ', ' order by o.name) from role o where o.oid = any (p.polroles)),
                   'using ' || pg_get_expr(p.polqual, p.polrelid), 'with check ' || pg_get_expr(p.polwithcheck, p.polrelid))
  from relation r
  join pg_policy p on p.polrelid = r.oid
  union all
  select r.id, 'publication', r.relname, 'pg_publication_rel'::regclass, 0, 0, null, null, null,
         string_agg(concat_ws(' ', p.pubname, case when to_jsonb(l) ->> 'prattrs' is not null then v.some ->> 'attnames' end,
                              'where ' || (v.some ->> 'rowfilter')), ', ' order by p.pubname)
  from relation r
  join pg_publication_rel l on l.prrelid = r.oid
  join pg_publication p on p.oid = l.prpubid and not starts_with(p.pubname, 'shardids_')
  left join published v on v.pubname = p.pubname and v.relation = r.oid
  group by r.id, r.relname
  union all
  select r.id, 'owned sequence', r.relname, 'pg_class'::regclass, 0, 0, null, null, null,
         format('%s.%s', d.refobjid::regclass, a.attname)
  from relation r
  join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = r.oid and d.refclassid = 'pg_class'::regclass
    and d.deptype in ('a', 'i') and d.refobjsubid > 0
  join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
  where r.relkind = 'S'
  union all
  select f.id, case f.prokind when 'p' then 'procedure' when 'a' then 'aggregate' else 'function' end,
         f.signature, 'pg_proc'::regclass, f.oid, 0, f.proowner, f.proacl, 'f',
         case f.prokind when 'a' then (select row(g.*)::text from (
           select x.aggkind, x.aggnumdirectargs, x.aggtransfn, x.aggfinalfn, x.aggcombinefn, x.aggserialfn, x.aggdeserialfn,
                  x.aggmtransfn, x.aggminvtransfn, x.aggmfinalfn, x.aggsortop::regoper, x.aggtranstype::regtype, x.aggmtranstype::regtype,
                  x.agginitval, x.aggminitval from pg_aggregate x where x.aggfnoid = f.oid) g)
         else pg_get_functiondef(f.oid) end
  from function f
  union all
  select t.id, 'type', t.typname, 'pg_type'::regclass, t.oid, 0, t.typowner, t.typacl, 'T',
         case t.typtype
           when 'e' then 'enum ' || (select string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder)
                                     from pg_enum e where e.enumtypid = t.oid)
           when 'd' then concat_ws(' ', 'domain', format_type(t.typbasetype, t.typtypmod),
                                   'collate ' || nullif(t.typcollation, 0)::regcollation::text,
                                   'default ' || t.typdefault, case when t.typnotnull then 'not null' end,
                                   (select string_agg(format('%I %s', k.conname, pg_get_constraintdef(k.oid)), ' ' order by k.conname)
                                    from pg_constraint k where k.contypid = t.oid and k.contype <> 'n'))
           when 'r' then (select format('range of %s, %s', g.rngsubtype::regtype, g.rngsubopc) from pg_range g where g.rngtypid = t.oid)
           else 'base type' end
  from type t
  union all
  select s.id, 'statistics', x.stxname, 'pg_statistic_ext'::regclass, x.oid, 0, x.stxowner, null, null,
         concat_ws(' ', pg_get_statisticsobjdef(x.oid), 'statistics ' || nullif(x.stxstattarget, -1)::text)
  from shard s
  join pg_statistic_ext x on x.stxnamespace = s.namespace
  union all
  select s.id, 'default privileges', format('%s of %s', d.defaclobjtype, o.name), 'pg_default_acl'::regclass, d.oid, 0, null, null, null,
         (select string_agg(format('%s to %s%s', a.privilege_type, g.name, case when a.is_grantable then ' with grant option' else '' end),
                            ', ' order by a.privilege_type, g.name)
          from aclexplode(d.defaclacl) a join role g on g.oid = a.grantee)
  from shard s
  join pg_default_acl d on d.defaclnamespace = s.namespace
  join role o on o.oid = d.defaclrole
  union all
  -- Extensions, operators, collations, text search configurations, publications of the schema: that they are there.
  select s.id, i.type, i.identity, d.classid, d.objid, 0, null, null, null, ''
  from shard s
  join pg_depend d on d.refclassid = 'pg_namespace'::regclass and d.refobjid = s.namespace
    and (d.deptype = 'n' or d.classid = to_regclass('pg_publication_namespace'))
    and d.classid not in ('pg_class'::regclass, 'pg_type'::regclass, 'pg_proc'::regclass, 'pg_statistic_ext'::regclass,
                          'pg_default_acl'::regclass)
    and not exists (select from member m where m.classid = d.classid and m.objid = d.objid)
  cross join lateral pg_identify_object(d.classid, d.objid, 0) i),
-- Objects that are alike have the same privileges: each list is taken apart once.
acl as materialized (
  select text, acl_type, owner, text::aclitem[] as acl
  from (select acl::text as text, acl_type, owner from object where acl is not null
        union
        select text, acl_type, owner from engine where text is not null) o),
granted as materialized (
  select l.text, l.acl_type, l.owner,
         string_agg(concat_ws(' ', g.privilege_type, case when g.is_given then 'to' else 'revoked from' end, r.name,
                              case when g.is_grantable then 'with grant option' end), E'\n' order by r.name, g.privilege_type)
           as grants
  from acl l
  cross join lateral (
    select grantee, privilege_type, is_grantable, true as is_given
    from (select grantee, privilege_type, is_grantable from aclexplode(l.acl)
          except select grantee, privilege_type, is_grantable from aclexplode(acldefault(l.acl_type, l.owner))) given
    union all
    select grantee, privilege_type, is_grantable, false
    from (select grantee, privilege_type, is_grantable from aclexplode(acldefault(l.acl_type, l.owner))
          except select grantee, privilege_type, is_grantable from aclexplode(l.acl)) revoked) g
  join role r on r.oid = g.grantee
  group by l.text, l.acl_type, l.owner),
line as (
  select id, kind, name, definition from object
  union all
  select o.id, 'owner', concat_ws(' ', o.kind, nullif(o.name, '')), r.name
  from object o
  join role r on r.oid = o.owner
  where o.kind <> 'column' and r.name <> '{owner}'
  union all
  -- What is granted beyond what each kind of object has of its own, or was revoked from that.
  select o.id, 'grants', concat_ws(' ', o.kind, nullif(o.name, '')), g.grants
  from object o
  join granted g on g.text = o.acl::text and g.acl_type = o.acl_type and g.owner = o.owner
  union all
  select o.id, 'comment', concat_ws(' ', o.kind, nullif(o.name, '')), d.description
  from object o
  join pg_description d on d.classoid = o.class and d.objoid = o.oid and d.objsubid = o.subid
  -- The mark of a revision that is not finished.
  where not starts_with(d.description, 'shardids: '))
select line.kind,
       replace(line.name, s.nspname, '{shard}') collate "C" as name,
       replace(line.definition, s.nspname, '{shard}') collate "C" as definition,
       array_agg(line.id order by line.id) as shards
from line
join shard s using (id)
group by 1, 2, 3
union all
select 'generator', e.name, '', e.shards from engine e
union all
select 'grants', e.name, g.grants, e.shards
from engine e
join granted g using (text, acl_type, owner)
order by 1, 2, 3;
