-- Purpose:    what takes rows of an adopted database in on a node: tables of the source's names, partitioned by shard, whose
--             partitions are the tables of the shards; a barrier for tables of which every node has all rows.
-- Locks:      add_route, drop_route, set_indexes_aside: ACCESS EXCLUSIVE. make_index: SHARE. stage_shard: SHARE UPDATE EXCLUSIVE on the parent, ACCESS EXCLUSIVE on the shard's table. unstage_shard,
--             drop_staging: ACCESS EXCLUSIVE. All until commit: set lock_timeout.
-- Privileges: CREATE on the database and on schema shardids; ownership of the shards' tables.

-- home: an expression for the shard of a row, made by shardids itself.
create function shardids.stage(schema name, name name, template regclass, home text, adoption text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if to_regnamespace(quote_ident(schema)) is null then
    execute format('create schema %I', schema);
    execute format('comment on schema %I is %L', schema, adoption);
  elsif (select n.nspowner not in (current_user::regrole, (select e.nspowner from pg_namespace e where e.nspname = 'shardids'))
                and pg_get_userbyid(n.nspowner) <> 'pg_database_owner' and not r.rolsuper
         from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = schema) then
    -- Its owner could put a table of its own in the place of this one.
    raise insufficient_privilege using
      message = format('schema %I exists and belongs to role "%s", not to "%s"', schema,
                       (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = schema), current_user),
      hint = format('If nothing needs it: DROP SCHEMA %I', schema);
  end if;
  if exists (select from pg_class c where c.oid = to_regclass(format('%I.%I', schema, name))
             and (c.relowner <> current_user::regrole or obj_description(c.oid, 'pg_class') is distinct from adoption)) then
    raise duplicate_table using
      message = format('table %I.%I was made on this node meanwhile, where the rows are to arrive', schema, name),
      hint = 'Rename or drop it, and undo the adoption with shardids adopt abort.';
  end if;
  if to_regclass(format('%I.%I', schema, name)) is null then
    execute format('create table %I.%I (like %s including defaults including generated) partition by list ((%s))',
                   schema, name, template, home);
    execute format('comment on table %I.%I is %L', schema, name, adoption);
  end if;
end
$$;

comment on function shardids.stage(name, name, regclass, text, text) is
  'Makes the table that takes in the rows of an adopted one, and gives them to the shards';

-- A row that has no key of its own brings its shard along in this column; the rows that clients write there after the
-- switch have the default. Both without writing a row again.
create function shardids.add_route(part regclass, route name, shard integer, adoption text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_attribute a where a.attrelid = part and a.attname = route and not a.attisdropped) then
    execute format('alter table %s add column %I integer default %L::integer', part, route, shard);
    execute format('comment on column %s.%I is %L', part, route, adoption);
  end if;
end
$$;

comment on function shardids.add_route(regclass, name, integer, text) is 'Gives a table of a shard the column by which rows without a key arrive';

create function shardids.routed(route name, adoption text) returns setof regclass
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select a.attrelid from pg_attribute a
  join pg_class c on c.oid = a.attrelid and c.relkind = 'r'
  where a.attname = route and not a.attisdropped and col_description(a.attrelid, a.attnum) = adoption
  order by 1;
end;

comment on function shardids.routed(name, text) is 'The tables of shards that add_route has given a column';

create function shardids.drop_route(part regclass, route name, adoption text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if part in (select shardids.routed(route, adoption)) then
    execute format('alter table %s drop column %I', part, route);
  end if;
end
$$;

comment on function shardids.drop_route(regclass, name, text) is 'Drops the column of add_route';

create function shardids.stage_shard(parent regclass, shard integer, part regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_inherits i where i.inhparent = parent and i.inhrelid = part) then
    execute format('alter table %s attach partition %s for values in (%s)', parent, part, shard);
  end if;
end
$$;

comment on function shardids.stage_shard(regclass, integer, regclass) is 'Lets a table of a shard take rows in';

-- The apply worker, and from version 17 on CREATE INDEX, have no schema but pg_catalog in their search_path. One row that
-- is made up shows it: the table is not read. An expression that does not take its values for another reason is not
-- named, nor is one for which a value is the name of something that is not there.
create function shardids.unresolved(part regclass) returns table (what text, problem text)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  sample jsonb;
  expressions text;
begin
  select jsonb_object_agg(a.attname, case t.typcategory
           when 'S' then '"a"'::jsonb
           when 'N' then '1'
           when 'B' then 'true'
           when 'D' then '"2000-01-01 00:00"'
         end)
  into sample
  from pg_attribute a join pg_type t on t.oid = a.atttypid
  where a.attrelid = part and a.attnum > 0 and not a.attisdropped;
  for what, expressions in
    select format('index %I', c.relname), concat_ws(', ', pg_get_expr(i.indexprs, part), pg_get_expr(i.indpred, part))
    from pg_index i join pg_class c on c.oid = i.indexrelid
    where i.indrelid = part and (i.indexprs is not null or i.indpred is not null)
    union all
    select format('constraint %I', k.conname), pg_get_expr(k.conbin, part)
    from pg_constraint k where k.conrelid = part and k.contype = 'c'
    union all
    select format('column %I', a.attname), pg_get_expr(d.adbin, part)
    from pg_attrdef d join pg_attribute a on a.attrelid = part and a.attnum = d.adnum and a.attgenerated = 's'
    where d.adrelid = part
    order by 1
  loop
    begin
      execute format('select row(%s) from (select (jsonb_populate_record(null::%s, $1)).*) sample', expressions, part) using sample;
    exception
      when undefined_function or undefined_table or undefined_column or undefined_object or invalid_schema_name then
        problem := sqlerrm;
        if problem not like '%"a"%' then
          return next;
        end if;
      when others then null;
    end;
  end loop;
end
$$;

comment on function shardids.unresolved(regclass) is
  'The indexes, constraints and generated columns of a table whose functions find what they use only by a search_path';

-- Indexes of the shards' tables that are quicker to make when the rows are there, each with the statement that makes it.
create table shardids.index_aside (
  part regclass not null,
  name name not null,
  definition text not null,
  comment text,
  primary key (part, name));

comment on table shardids.index_aside is 'Indexes that set_indexes_aside has dropped, until make_index makes them again';

-- Indexes stay if a definition does not make them again as they are, or a constraint needs them.
create function shardids.set_indexes_aside(part regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  one record;
begin
  for one in
    select i.indexrelid::regclass as index, c.relname, pg_get_indexdef(c.oid) as definition,
           obj_description(c.oid, 'pg_class') as comment
    from pg_index i
    join pg_class c on c.oid = i.indexrelid and c.reltablespace = 0
    where i.indrelid = part and i.indisvalid
      and not (i.indisunique or i.indisexclusion or i.indisclustered or i.indisreplident)
      and not exists (select from pg_attribute a where a.attrelid = c.oid and a.attstattarget >= 0)
      and not exists (select from pg_depend d where d.objid = c.oid and d.deptype in ('x', 'e'))
  loop
    insert into shardids.index_aside (part, name, definition, comment) values (part, one.relname, one.definition, one.comment);
    execute format('drop index %s', one.index);
  end loop;
end
$$;

comment on function shardids.set_indexes_aside(regclass) is 'Drops indexes of a table of a shard while its rows arrive, and records them';

create function shardids.make_index(part regclass, name name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  one shardids.index_aside;
begin
  delete from shardids.index_aside a where a.part = make_index.part and a.name = make_index.name returning * into one;
  if not found then
    return;
  end if;
  execute one.definition;
  if one.comment is not null then
    execute format('comment on index %s.%I is %L',
                   (select c.relnamespace::regnamespace from pg_class c where c.oid = part), name, one.comment);
  end if;
end
$$;

comment on function shardids.make_index(regclass, name) is 'Makes an index again that set_indexes_aside has dropped';

create function shardids.staged(adoption text) returns table (parent regclass, part regclass)
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select c.oid, i.inhrelid from pg_class c
  join pg_description d on d.classoid = 'pg_class'::regclass and d.objoid = c.oid and d.objsubid = 0
  left join pg_inherits i on i.inhparent = c.oid
  where c.relkind = 'p' and d.description = adoption;
end;

comment on function shardids.staged(text) is 'The tables of stage that an adoption has made, each with the shards'' tables in it';

create function shardids.unstage_shard(parent regclass, part regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from pg_inherits i where i.inhparent = parent and i.inhrelid = part) then
    execute format('alter table %s detach partition %s', parent, part);
  end if;
end
$$;

comment on function shardids.unstage_shard(regclass, regclass) is 'Leaves a table of a shard with its rows, and on its own';

-- Dropping the parent would drop its partitions.
create function shardids.drop_staging(adoption text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  parent regclass;
  schema name;
begin
  for parent in select distinct s.parent from shardids.staged(adoption) s loop
    execute format('lock table only %s in access exclusive mode', parent);
    if exists (select from pg_inherits i where i.inhparent = parent) then
      raise dependent_objects_still_exist using message = format('table %s still has tables of shards in it', parent);
    end if;
    execute format('drop table %s', parent);
  end loop;
  for schema in
    select n.nspname from pg_namespace n
    join pg_description d on d.classoid = 'pg_namespace'::regclass and d.objoid = n.oid
    where d.description = adoption
      and not exists (select from pg_depend e where e.refclassid = 'pg_namespace'::regclass and e.refobjid = n.oid)
  loop
    execute format('drop schema %I', schema);
  end loop;
end
$$;

comment on function shardids.drop_staging(text) is 'Drops the tables of stage that an adoption has made, and their schemas if nothing else is in them';

-- Fires for clients, not for logical replication.
create function shardids.refuse_writes() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = 'SI002',
    message = format('table %I.%I is being filled from the database that the cluster adopts', tg_table_schema, tg_table_name),
    hint = 'It takes writes once the cluster has taken over: shardids adopt status';
end
$$;

comment on function shardids.refuse_writes() is 'Keeps clients from writing to a table while an adoption fills it';

create function shardids.close_table(name regclass) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from pg_trigger t where t.tgrelid = name and t.tgname = 'shardids_adoption') then
    return false;
  end if;
  execute format('create trigger shardids_adoption before insert or update or delete or truncate on %s '
                 'for each statement execute function shardids.refuse_writes()', name);
  return true;
end
$$;

comment on function shardids.close_table(regclass) is 'Adds the barrier of refuse_writes to a table; false if it has one';

create function shardids.open_table(name regclass) returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = name and t.tgname = 'shardids_adoption') then
    return false;
  end if;
  execute format('drop trigger shardids_adoption on %s', name);
  return true;
end
$$;

comment on function shardids.open_table(regclass) is 'Drops the barrier of refuse_writes; false if there is none';

-- A subscription to a publication and a slot of the same name.
create function shardids.follow(name name, conninfo text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_subscription s where s.subname = name and s.subdbid = shardids.database()) then
    perform shardids.create_subscription(name, conninfo, 'binary = false');
  end if;
end
$$;

comment on function shardids.follow(name, text) is 'Subscribes to a publication of a database that is adopted';

revoke execute on function
  shardids.stage(name, name, regclass, text, text), shardids.add_route(regclass, name, integer, text),
  shardids.routed(name, text), shardids.drop_route(regclass, name, text), shardids.stage_shard(regclass, integer, regclass), shardids.staged(text),
  shardids.unstage_shard(regclass, regclass), shardids.drop_staging(text), shardids.refuse_writes(),
  shardids.unresolved(regclass), shardids.set_indexes_aside(regclass), shardids.make_index(regclass, name),
  shardids.close_table(regclass), shardids.open_table(regclass), shardids.follow(name, text)
  from public;
