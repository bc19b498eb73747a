-- Purpose:    what belongs to a shard's schema, what outside of it depends on that, and whether it has changed.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: CREATE on schema shardids; EXECUTE for its owner.

-- Everything that goes with the schema and nothing else: what is not listed here does not belong to the shard.
-- version is another one after each ALTER, GRANT, REVOKE, COMMENT ..., and after some statements that change nothing
-- that anybody can see, such as TRUNCATE and REINDEX. The server itself writes rows of pg_class anew: ANALYZE does, also
-- autovacuum's, for a table that has lost its last child. So a relation's version is what its row says.
create function shardids.objects_of(shard integer) returns table (classid oid, objid oid, version text)
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with schema (oid) as (select to_regnamespace(shardids.schema_of(shard))::oid),
  relation as (
    select c.oid, c.reltoastrelid,
           row(c.relname, c.reloftype, c.relowner, c.relam, c.relfilenode, c.reltablespace, c.relpersistence, c.relnatts, c.relchecks,
               c.relhasrules, c.relrowsecurity, c.relforcerowsecurity, c.relispopulated, c.relreplident, c.relispartition,
               c.relacl, c.reloptions, t.reloptions)::text as version
    from pg_class c left join pg_class t on t.oid = c.reltoastrelid
    where c.relnamespace = (table schema)),
  toast as (
    select r.reltoastrelid as oid from relation r where r.reltoastrelid <> 0)
  select 'pg_namespace'::regclass::oid, n.oid, n.xmin::text from pg_namespace n where n.oid = (table schema)
  union all select 'pg_class'::regclass, r.oid, r.version from relation r
  union all select 'pg_class'::regclass, t.oid, null::text as version from toast t
  union all select 'pg_class'::regclass, i.indexrelid, null::text as version from toast t join pg_index i on i.indrelid = t.oid
  union all select 'pg_attrdef'::regclass, d.oid, d.xmin::text from pg_attrdef d join relation r on r.oid = d.adrelid
  union all select 'pg_constraint'::regclass, c.oid, c.xmin::text from pg_constraint c where c.connamespace = (table schema)
  union all select 'pg_rewrite'::regclass, w.oid, w.xmin::text from pg_rewrite w join relation r on r.oid = w.ev_class
  union all select 'pg_policy'::regclass, p.oid, p.xmin::text from pg_policy p join relation r on r.oid = p.polrelid
  union all
  select 'pg_trigger'::regclass, t.oid, t.xmin::text from pg_trigger t join relation r on r.oid = t.tgrelid
  where not t.tgisinternal and t.tgname <> 'shardids_barrier'
  union all select 'pg_statistic_ext'::regclass, s.oid, s.xmin::text from pg_statistic_ext s where s.stxnamespace = (table schema)
  union all select 'pg_type'::regclass, t.oid, t.xmin::text from pg_type t where t.typnamespace = (table schema)
  union all select 'pg_proc'::regclass, p.oid, p.xmin::text from pg_proc p where p.pronamespace = (table schema)
  union all select 'pg_operator'::regclass, o.oid, o.xmin::text from pg_operator o where o.oprnamespace = (table schema)
  union all select 'pg_opclass'::regclass, o.oid, o.xmin::text from pg_opclass o where o.opcnamespace = (table schema)
  union all select 'pg_opfamily'::regclass, o.oid, o.xmin::text from pg_opfamily o where o.opfnamespace = (table schema)
  union all
  select 'pg_amop'::regclass, a.oid, a.xmin::text from pg_amop a join pg_opfamily f on f.oid = a.amopfamily
  where f.opfnamespace = (table schema)
  union all
  select 'pg_amproc'::regclass, a.oid, a.xmin::text from pg_amproc a join pg_opfamily f on f.oid = a.amprocfamily
  where f.opfnamespace = (table schema)
  union all select 'pg_collation'::regclass, c.oid, c.xmin::text from pg_collation c where c.collnamespace = (table schema)
  union all select 'pg_conversion'::regclass, c.oid, c.xmin::text from pg_conversion c where c.connamespace = (table schema)
  union all select 'pg_ts_config'::regclass, c.oid, c.xmin::text from pg_ts_config c where c.cfgnamespace = (table schema)
  union all select 'pg_ts_dict'::regclass, d.oid, d.xmin::text from pg_ts_dict d where d.dictnamespace = (table schema)
  union all select 'pg_ts_parser'::regclass, p.oid, p.xmin::text from pg_ts_parser p where p.prsnamespace = (table schema)
  union all select 'pg_ts_template'::regclass, t.oid, t.xmin::text from pg_ts_template t where t.tmplnamespace = (table schema)
  union all select 'pg_default_acl'::regclass, a.oid, a.xmin::text from pg_default_acl a where a.defaclnamespace = (table schema);
end;

comment on function shardids.objects_of(integer) is 'All objects of a shard''s schema, and a version of each';

-- A foreign key's own triggers are on both of its tables, and publications list tables: neither is anybody's loss. An
-- extension is here, without its members, when it was created in the schema or has a member there.
create function shardids.dependents_of(shard integer) returns setof text
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with own as materialized (select o.classid, o.objid from shardids.objects_of(shard) o),
  dependent (classid, objid, objsubid) as (
    select d.classid, d.objid, d.objsubid
    from own o join pg_depend d on d.refclassid = o.classid and d.refobjid = o.objid
    union
    select d.refclassid, d.refobjid, d.refobjsubid
    from own o join pg_depend d on d.classid = o.classid and d.objid = o.objid
    where d.deptype in ('e', 'i'))
  select distinct case
           when w.oid is null then pg_describe_object(d.classid, d.objid, d.objsubid)
           else pg_describe_object('pg_class'::regclass, w.ev_class, 0)
         end
  from dependent d
  left join own o on o.classid = d.classid and o.objid = d.objid
  left join pg_rewrite w on d.classid = 'pg_rewrite'::regclass and w.oid = d.objid
  left join pg_trigger t on d.classid = 'pg_trigger'::regclass and t.oid = d.objid
  where o.objid is null and t.tgisinternal is not true and t.tgname is distinct from 'shardids_barrier'
    and not exists (
      select from pg_depend m where m.classid = d.classid and m.objid = d.objid and m.deptype = 'e')
    and d.classid::regclass::text not in ('pg_publication_rel', 'pg_publication_namespace')
  order by 1;
end;

comment on function shardids.dependents_of(integer) is
  'What is outside of a shard''s schema and would be dropped with it: extensions, views, constraints, columns ...';

create function shardids.schema_version(shard integer) returns text
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with own as materialized (select o.classid, o.objid, o.version from shardids.objects_of(shard) o),
  part (row) as (
    select format('%s %s %s', o.classid, o.objid, o.version) from own o where o.version is not null
    union all
    select format('column %s %s %s', a.attrelid, a.attnum, a.xmin) from own o join pg_attribute a on a.attrelid = o.objid
    where o.classid = 'pg_class'::regclass and o.version is not null and a.attnum > 0
    union all
    select format('index %s %s', i.indexrelid, i.xmin) from own o join pg_index i on i.indexrelid = o.objid
    where o.classid = 'pg_class'::regclass
    union all
    select format('trigger %s %s', t.oid, t.tgenabled) from own o join pg_trigger t on t.tgrelid = o.objid
    where o.classid = 'pg_class'::regclass and t.tgisinternal and t.tgenabled <> 'O'
    union all
    select format('child %s %s %s', i.inhrelid, i.inhparent, i.xmin) from own o join pg_inherits i on o.objid in (i.inhrelid, i.inhparent)
    where o.classid = 'pg_class'::regclass
    union all
    select format('sequence %s %s', s.seqrelid, s.xmin) from own o join pg_sequence s on s.seqrelid = o.objid
    where o.classid = 'pg_class'::regclass
    union all
    select format('label %s %s', e.oid, e.xmin) from own o join pg_enum e on e.enumtypid = o.objid
    where o.classid = 'pg_type'::regclass
    union all
    select format('comment %s %s %s %s', c.classoid, c.objoid, c.objsubid, c.xmin)
    from own o join pg_description c on c.classoid = o.classid and c.objoid = o.objid
    union all
    select format('security label %s %s %s %s', l.classoid, l.objoid, l.objsubid, l.xmin)
    from own o join pg_seclabel l on l.classoid = o.classid and l.objoid = o.objid)
  select md5(string_agg(p.row, ',' order by p.row)) from part p;
end;

comment on function shardids.schema_version(integer) is
  'Another text after each change of the definition of anything in a shard''s schema';

revoke execute on function
  shardids.objects_of(integer), shardids.dependents_of(integer), shardids.schema_version(integer)
  from public;
