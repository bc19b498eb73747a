-- Purpose:    all that a table's primary key hangs together with: the columns that refer to it, the indexes and foreign keys
--             over them, its sequence, and what stands in the way of other columns in their place. One JSON object; nothing
--             is installed.
-- Settings:   shardids.table: the table's name, with its schema. shardids.pairs: a JSON array of OIDs of tables with names of
--             columns, that count although they are bigint.
-- Locks:      none.
-- Privileges: none.

with recursive pair (relid, attnum) as (
  select i.indrelid, i.indkey[0]::int2
  from pg_index i
  where i.indrelid = current_setting('shardids.table')::regclass and i.indisprimary and i.indnkeyatts = 1
  union
  select k.conrelid, k.conkey[1]
  from pair p
  join pg_constraint k on k.contype = 'f' and k.confrelid = p.relid and k.confkey = array[p.attnum]
  join pg_attribute a on a.attrelid = k.conrelid and a.attnum = k.conkey[1]
    and (a.atttypid in ('smallint'::regtype, 'integer'::regtype)
         or current_setting('shardids.pairs')::jsonb @> jsonb_build_array(jsonb_build_array(a.attrelid::bigint, a.attname)))),
col as (
  select p.relid, p.attnum, p.relid = current_setting('shardids.table')::regclass and exists (
           select from pg_index i where i.indrelid = p.relid and i.indisprimary and i.indkey[0] = p.attnum) as is_key,
         a.attname, a.atttypid, a.attnotnull, a.attidentity, a.attgenerated, a.atthasdef, a.attacl, a.attoptions,
         coalesce(a.attstattarget, -1) as attstattarget
  from pair p join pg_attribute a on a.attrelid = p.relid and a.attnum = p.attnum),
fk as (
  select k.*, to_jsonb(k) ->> 'conenforced' = 'false' as is_not_enforced from pg_constraint k
  where k.contype = 'f'
    and exists (select from pair p where (p.relid = k.conrelid and p.attnum = any (k.conkey))
                                      or (p.relid = k.confrelid and p.attnum = any (k.confkey)))),
rel as (
  select c.*, n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid in (select relid from pair union select conrelid from fk union select current_setting('shardids.table')::regclass)),
ix as (
  select i.*, c.relname, c.reloptions, c.reltablespace, c.relam,
         k.conname, k.contype, coalesce(k.condeferrable, false) as condeferrable, k.oid as conoid,
         (select n.spcname from pg_tablespace n where n.oid = c.reltablespace) as spcname,
         concat_ws(' ', pg_get_expr(i.indpred, i.indrelid), pg_get_expr(i.indexprs, i.indrelid)) as expressions
  from pg_index i
  join pg_class c on c.oid = i.indexrelid
  left join pg_constraint k on k.conindid = i.indexrelid and k.conrelid = i.indrelid and k.contype in ('p', 'u', 'x')
  where exists (select from pair p where p.relid = i.indrelid and p.attnum = any (i.indkey))
    and c.relname !~ '^shardids_ix_'),
-- What hangs on the columns, and is not known to be carried along.
dependent as (
  select col.relid, col.attname, d.classid, d.objid, d.objsubid
  from col
  join pg_depend d on d.refclassid = 'pg_class'::regclass and d.refobjid = col.relid and d.refobjsubid = col.attnum
  where not (d.classid = 'pg_class'::regclass and d.objid in (select indexrelid from ix))
    and not (d.classid = 'pg_class'::regclass and col.is_key
             and exists (select from pg_class s where s.oid = d.objid and s.relkind = 'S'))
    and not (d.classid = 'pg_attrdef'::regclass and col.is_key
             and exists (select from pg_attrdef f where f.oid = d.objid and f.adnum = col.attnum))
    and not (d.classid = 'pg_constraint'::regclass and exists (
               select from pg_constraint k
               where k.oid = d.objid
                 and (k.contype::text in ('n', 'f') or k.oid in (select conoid from ix where contype <> 'x')
                      or k.conname ~ '^shardids_step_')))),
whole as (
  select rel.oid as relid, d.classid, d.objid, d.objsubid
  from rel
  join pg_depend d on d.refclassid = 'pg_class'::regclass and d.refobjid = rel.oid and d.refobjsubid = 0
  where d.classid in ('pg_rewrite'::regclass, 'pg_proc'::regclass, 'pg_statistic_ext'::regclass) and d.deptype <> 'a'
     or d.classid = 'pg_policy'::regclass and d.deptype = 'n'
  union all
  select rel.oid, d.classid, d.objid, d.objsubid
  from rel
  join pg_type t on t.oid = rel.reltype or t.typelem = rel.reltype and t.typcategory = 'A'
  join pg_depend d on d.refclassid = 'pg_type'::regclass and d.refobjid = t.oid and d.deptype <> 'i'),
problem (text) as (
  select format('%s has no primary key', current_setting('shardids.table')::regclass)
  where not exists (select from pg_index where indrelid = current_setting('shardids.table')::regclass and indisprimary)
  union all
  select format('the primary key of %s has several columns', indrelid::regclass) from pg_index
  where indrelid = current_setting('shardids.table')::regclass and indisprimary and indnkeyatts > 1
  union all
  select format('%s is no ordinary table: it is partitioned, a partition, inherited, unlogged, foreign or of a type', rel.oid::regclass)
  from rel
  where relkind <> 'r' or relispartition or reloftype <> 0 or relpersistence <> 'p'
     or exists (select from pg_inherits i where rel.oid in (i.inhrelid, i.inhparent))
  union all
  select format('%s belongs to role "%s"', rel.oid::regclass, pg_get_userbyid(relowner)) from rel
  where not pg_has_role(current_user, relowner, 'usage')
  union all
  select format('%s has rules', rel.oid::regclass) from rel where exists (select from pg_rewrite w where w.ev_class = rel.oid)
  union all
  select format('row security of %s holds for its owner too', rel.oid::regclass) from rel
  where relforcerowsecurity and not exists (select from pg_roles r where r.rolname = current_user and (r.rolsuper or r.rolbypassrls))
  union all
  select format('publication "%s" replicates %s', p.pubname, rel.oid::regclass)
  from rel join pg_publication_tables p on p.schemaname = rel.nspname and p.tablename = rel.relname
  union all
  select format('a subscription writes to %s', rel.oid::regclass) from rel join pg_subscription_rel s on s.srrelid = rel.oid
  union all
  select format('replication slot "%s" decodes the changes of this database', slot_name) from pg_replication_slots
  where slot_type = 'logical' and database = current_database()
  union all
  select distinct format('prepared transaction %L holds a lock on %s', x.gid, rel.oid::regclass)
  from rel
  join pg_locks l on l.relation = rel.oid and l.pid is null
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
  join pg_prepared_xacts x on x.database = current_database()
    and l.virtualtransaction = '-1/' || x.transaction::text
  union all
  select format('trigger "%s" of %s runs after ours would', t.tgname, rel.oid::regclass)
  from rel join pg_trigger t on t.tgrelid = rel.oid and not t.tgisinternal and t.tgname <> '~shardids'
  where t.tgtype & 3 = 3 and t.tgname::text collate "C" > '~shardids'
  union all
  select format('trigger "%s" of %s runs whatever session_replication_role is', t.tgname, rel.oid::regclass)
  from rel join pg_trigger t on t.tgrelid = rel.oid and not t.tgisinternal and t.tgname <> '~shardids'
  where t.tgtype & 16 = 16 and t.tgenabled in ('A', 'R') and t.tgattr = ''::int2vector
  union all
  select format('%s.%s is of type %s', relid::regclass, attname, format_type(atttypid, null)) from col
  where atttypid not in ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype)
  union all
  select format('%s.%s is generated', relid::regclass, attname) from col where attgenerated <> ''
  union all
  select format('%s.%s has a default, or is an identity column', relid::regclass, attname) from col
  where not is_key and (atthasdef and attgenerated = '' or attidentity <> '')
  union all
  select format('%s.%s has privileges of its own', relid::regclass, attname) from col where attacl is not null
  union all
  select format('%s.%s has options or a statistics target', relid::regclass, attname) from col
  where attoptions::text ~ '[{,]n_distinct(_inherited)?=' or attstattarget <> -1
  union all
  select format('%s hangs on %s.%s', pg_describe_object(classid, objid, objsubid), relid::regclass, attname) from dependent
  union all
  select format('%s hangs on rows of %s', pg_describe_object(classid, objid, objsubid), relid::regclass) from whole
  union all
  select format('index %s can''t be built again', indexrelid::regclass) from ix
  where relam <> (select oid from pg_am where amname = 'btree') or not indisvalid or not indimmediate or condeferrable
     or coalesce(contype = 'x', false) or indisexclusion or indisclustered or indisreplident
     or exists (select from col where col.relid = ix.indrelid and col.attnum = any (ix.indkey)
                and position(col.attname::text in ix.expressions) > 0)
     or exists (select from unnest(ix.indclass::oid[]) o join pg_opclass c on c.oid = o where not c.opcdefault)
     or exists (select from unnest(ix.indkey::int2[], ix.indcollation::oid[]) k (attnum, coll)
                join pg_attribute a on a.attrelid = ix.indrelid and a.attnum = k.attnum
                where k.coll <> 0 and k.coll <> a.attcollation)
     or exists (select from unnest(ix.indkey::int2[], ix.indcollation::oid[]) k (attnum, coll) where k.attnum = 0 and k.coll not in (0, 100))
  union all
  select format('foreign key "%s" of %s has several columns', conname, conrelid::regclass) from fk where cardinality(conkey) > 1
  union all
  select format('foreign key "%s" of %s is deferrable, not validated, not enforced, MATCH FULL, ON UPDATE SET NULL, or SET DEFAULT',
                conname, conrelid::regclass)
  from fk
  where condeferrable or not convalidated or coalesce(is_not_enforced, false) or confmatchtype <> 's'
     or confupdtype not in ('a', 'r', 'c') or confdeltype = 'd' or conparentid <> 0
  union all
  select format('%s.%s is of type %s, and refers to an integer', fk.conrelid::regclass, a.attname, format_type(a.atttypid, null))
  from fk join pg_attribute a on a.attrelid = fk.conrelid and a.attnum = fk.conkey[1]
  where a.atttypid not in ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype)
  union all
  select format('the default of %s.%s is not the nextval() of one sequence', relid::regclass, attname) from col
  where is_key and attidentity = ''
    and (select count(*) from pg_attrdef f join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid
         join pg_class s on s.oid = d.refobjid and d.refclassid = 'pg_class'::regclass and s.relkind = 'S'
         where f.adrelid = relid and f.adnum = attnum and pg_get_expr(f.adbin, f.adrelid) ~ '^nextval\(''[^()]*''::regclass\)$') <> 1)
select jsonb_build_object(
  'problems', (select coalesce(jsonb_agg(distinct text), '[]') from problem),
  'key_type', (select format_type(atttypid, null) from col where is_key),
  'pairs', (select coalesce(jsonb_agg(jsonb_build_object(
              'schema', rel.nspname, 'table', rel.relname, 'column', attname, 'type', format_type(atttypid, null),
              'is_key', is_key, 'relid', relid::bigint, 'number', attnum, 'not_null', attnotnull,
              'not_null_name', (select conname from pg_constraint k
                                where k.contype::text = 'n' and k.conrelid = relid and k.conkey = array[attnum]),
              'comment', col_description(relid, attnum)) order by rel.nspname, rel.relname, attname), '[]')
            from col join rel on rel.oid = relid),
  'indexes', (select coalesce(jsonb_agg(jsonb_build_object(
                'schema', rel.nspname, 'table', rel.relname, 'name', ix.relname, 'number', ix.indexrelid::bigint,
                'is_unique', indisunique, 'constraint', conname, 'is_primary', indisprimary,
                'nulls_not_distinct', coalesce((to_jsonb(ix) ->> 'indnullsnotdistinct')::boolean, false),
                'predicate', pg_get_expr(indpred, indrelid), 'options', coalesce(to_jsonb(ix.reloptions), '[]'), 'tablespace', spcname,
                'comment', obj_description(indexrelid, 'pg_class'), 'constraint_comment', obj_description(conoid, 'pg_constraint'),
                'columns', (select jsonb_agg(jsonb_build_object(
                                     'name', (select attname from pg_attribute where attrelid = indrelid and attnum = k.attnum),
                                     'expression', case when k.attnum = 0 then pg_get_indexdef(indexrelid, k.place::integer, false) end,
                                     'is_included', k.place > indnkeyatts,
                                     'is_descending', k.place <= indnkeyatts and indoption[k.place - 1] & 1 = 1,
                                     'is_nulls_first', k.place <= indnkeyatts and indoption[k.place - 1] & 2 = 2) order by k.place)
                            from unnest(indkey::int2[]) with ordinality k (attnum, place)))
                order by rel.nspname, rel.relname, ix.relname), '[]')
              from ix join rel on rel.oid = indrelid),
  'foreign_keys', (select coalesce(jsonb_agg(jsonb_build_object(
                     'schema', n.nspname, 'table', c.relname, 'name', conname, 'number', fk.oid::bigint,
                     'column', a.attname, 'referenced_schema', m.nspname, 'referenced_table', r.relname,
                     'referenced_column', b.attname, 'on_delete', confdeltype, 'on_update', confupdtype,
                     'comment', obj_description(fk.oid, 'pg_constraint')) order by n.nspname, c.relname, conname), '[]')
                   from fk
                   join pg_class c on c.oid = conrelid join pg_namespace n on n.oid = c.relnamespace
                   join pg_class r on r.oid = confrelid join pg_namespace m on m.oid = r.relnamespace
                   join pg_attribute a on a.attrelid = conrelid and a.attnum = conkey[1]
                   join pg_attribute b on b.attrelid = confrelid and b.attnum = confkey[1]),
  'sequence', (select jsonb_build_object(
                 'schema', sn.nspname, 'name', s.relname, 'identity', col.attidentity, 'type', format_type(q.seqtypid, null),
                 'start', q.seqstart, 'increment', q.seqincrement, 'minimum', q.seqmin, 'maximum', q.seqmax, 'cache', q.seqcache,
                 'cycle', q.seqcycle, 'has_privileges', s.relacl is not null,
                 'is_owned', d.deptype in ('a', 'i') and d.classid = 'pg_class'::regclass,
                 'default', (select pg_get_expr(f.adbin, f.adrelid) from pg_attrdef f where f.adrelid = col.relid and f.adnum = col.attnum))
               from col
               join lateral (
                 select d.objid as seq, d.deptype, d.classid from pg_depend d
                 where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.refobjid = col.relid
                   and d.refobjsubid = col.attnum and d.deptype in ('a', 'i')
                   and exists (select from pg_class q where q.oid = d.objid and q.relkind = 'S')
                 union all
                 select d.refobjid, d.deptype, d.classid from pg_attrdef f join pg_depend d on d.classid = 'pg_attrdef'::regclass and d.objid = f.oid
                 join pg_class q on q.oid = d.refobjid and q.relkind = 'S' and d.refclassid = 'pg_class'::regclass
                 where f.adrelid = col.relid and f.adnum = col.attnum) d on true
               join pg_class s on s.oid = d.seq join pg_namespace sn on sn.oid = s.relnamespace
               join pg_sequence q on q.seqrelid = s.oid
               where col.is_key
               order by d.classid = 'pg_class'::regclass desc limit 1),
  'inserters', (select coalesce(jsonb_agg(distinct grantee::bigint), '[]')
                from (select (aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))).* from pg_class c
                      where c.oid = current_setting('shardids.table')::regclass
                      union all
                      select (aclexplode(a.attacl)).* from pg_attribute a
                      where a.attrelid = current_setting('shardids.table')::regclass) g
                where privilege_type = 'INSERT')) as found;
