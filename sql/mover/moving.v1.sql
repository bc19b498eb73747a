-- Purpose:    what moving a shard between nodes needs on them: the write barrier, taking a copy in, dropping one.
-- Locks:      add_barrier: SHARE ROW EXCLUSIVE on the table until commit, for which writers queue: set lock_timeout.
--             drop_barriers: ACCESS EXCLUSIVE on the shard's tables, the same. Every write to a table with a
--             barrier: advisory lock (1936220521, shard), shared, until commit. add_barriers: those of add_barrier.
--             drop_copy: those of DROP SCHEMA. set_copy_aside: none on the tables.
-- Privileges: CREATE on schema shardids; to call them, ownership of the shard's tables.
--
-- A shard's barrier is closed while its id_offset is negative, which is not transactional: no transaction is too
-- old to see it. Whoever holds the advisory lock exclusively knows that every transaction that has passed the
-- barrier has ended, and that no other passes before the lock is released.

create function shardids.database() returns oid
language sql stable parallel safe
return (select d.oid from pg_catalog.pg_database d where d.datname operator(pg_catalog.=) pg_catalog.current_database());

comment on function shardids.database() is 'The OID of this database';

create function shardids.tables_of(shard integer) returns regclass[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return array(
    select c.oid::regclass from pg_class c
    where c.relnamespace = to_regnamespace(shardids.schema_of(shard)) and c.relkind in ('r', 'p')
    order by c.relname);
end
$$;

comment on function shardids.tables_of(integer) is 'The tables of a shard, partitions and partitioned ones included';

-- As the owner of the engine: whoever writes to a table need not have any right on schema shardids.
-- The trigger's arguments are the shard and its id_offset.
create function shardids.pass_barrier() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if not pg_try_advisory_xact_lock_shared(1936220521, tg_argv[0]::integer) then
    perform shardids.wait_for_lock(1936220521, tg_argv[0]::integer, shared => true);
  end if;
  if coalesce(pg_sequence_last_value(tg_argv[1]::regclass), -1) < 0 then
    perform shardids.refuse('SI002', tg_argv[0]::integer);
  end if;
  return null;
end
$$;

-- Of a table without a barrier nothing is asked: the shard is not being moved.
create function shardids.pass_barrier(shard integer, name regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = name and t.tgname = 'shardids_barrier'
                 and t.tgfoid = 'shardids.pass_barrier()'::regprocedure) then
    return;
  end if;
  if not pg_try_advisory_xact_lock_shared(1936220521, shard) then
    perform shardids.wait_for_lock(1936220521, shard, shared => true);
  end if;
  if coalesce(pg_sequence_last_value(format('%I.id_offset', shardids.schema_of(shard))::regclass), -1) < 0 then
    perform shardids.refuse('SI002', shard);
  end if;
end
$$;

comment on function shardids.pass_barrier(integer, regclass) is
  'Waits for the write barrier of a table, and is refused where a write would be, without a write';

-- replicated: also for what logical replication brings, and sessions with session_replication_role = replica.
create function shardids.add_barrier(shard integer, name regclass, replicated boolean) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format(
    'create or replace trigger shardids_barrier before insert or update or delete or truncate on %s '
    'for each statement execute function shardids.pass_barrier(%s, %L)',
    name, shard, format('%I.id_offset', shardids.schema_of(shard)));
  if replicated then
    execute format('alter table %s enable always trigger shardids_barrier', name);
  end if;
end
$$;

comment on function shardids.add_barrier(integer, regclass, boolean) is
  'Lets INSERT, UPDATE, DELETE, TRUNCATE and COPY pass on a table of a shard only while the shard issues IDs';

create function shardids.without_barrier(shard integer, replicated boolean) returns setof regclass
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select name from unnest(shardids.tables_of(shard)) name
  where not exists (
    select from pg_trigger t
    where t.tgrelid = name and t.tgname = 'shardids_barrier' and (t.tgenabled = 'A' or not replicated));
end;

comment on function shardids.without_barrier(integer, boolean) is
  'The tables of a shard without a write barrier, or with one that was disabled';

-- A transaction that has passed the barrier of a table holds the advisory lock. Others get by it: those that
-- disabled its triggers, or made the table, or change the schema. They hold a lock that conflicts with writers, or on
-- the schema, in which a table that nobody else can see yet is being made. Functions, grants and comments leave no
-- lock: a transaction that has changed something, and no table that anybody can see, may have changed those.
-- RowExclusiveLock alone is the lock of a writer who has not written yet, and waits for the barrier; one who holds the
-- advisory lock after the mover had it alone took it after the fence, and is being refused. With waiting, the caller wants to
-- know of both. VACUUM and ANALYZE change nothing that moves.
create function shardids.barrier_holders(shard integer, waiting boolean)
returns table (pid integer, holder text, seconds integer)
language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  with held as materialized (
    select l.*, c.relnamespace, c.relkind
    from pg_locks l
    left join pg_class c on l.locktype = 'relation' and l.database = shardids.database() and c.oid = l.relation
    where l.granted and l.pid is distinct from pg_backend_pid()),
  writer as (
    -- Of one transaction, also of a prepared one, which has no process.
    select h.pid, array_agg(h.transactionid::text) as xids,
           bool_or(h.database = shardids.database() and case h.locktype
             when 'advisory' then waiting and h.classid = 1936220521 and h.objid = shard and h.objsubid = 2
             when 'object' then h.classid = 'pg_namespace'::regclass and h.objid = n.oid
             when 'relation' then
               h.relnamespace = n.oid
               and h.mode not in ('AccessShareLock', 'RowShareLock')
               and (waiting or h.mode <> 'RowExclusiveLock')
             else false
           end) as is_here,
           bool_or(h.locktype = 'transactionid') as has_written,
           bool_or(h.locktype = 'relation' and h.mode not in ('AccessShareLock', 'RowShareLock')
                   and (h.relation >= 16384 or h.database is distinct from shardids.database())) as has_table
    from held h, pg_namespace n
    where n.oid = to_regnamespace(shardids.schema_of(shard))
    group by h.pid, h.virtualtransaction)
  select w.pid, case when w.pid is null then format('prepared transaction %L', p.gid)
              else format('process %s of %s', a.pid, a.usename) end,
         extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::integer
  from writer w
  left join pg_stat_activity a on a.pid = w.pid
  left join pg_prepared_xacts p on w.pid is null and p.transaction::text = any (w.xids)
  where coalesce(a.datname, p.database) = current_database()
    and (w.is_here or (w.has_written and not w.has_table))
    and coalesce(a.backend_type, 'client backend') = 'client backend'
    and not exists (select from pg_stat_progress_vacuum v where v.pid = w.pid)
    and not exists (select from pg_stat_progress_analyze v where v.pid = w.pid)
  order by coalesce(a.xact_start, p.prepared);
end;

comment on function shardids.barrier_holders(integer, boolean) is
  'Who writes to a shard, or changes its schema, although or because its write barrier is open';

-- For a copy that is being made; replication passes.
create function shardids.add_barriers(shard integer) returns void
language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  select shardids.add_barrier(shard, name, false) from shardids.without_barrier(shard, false) name;
end;

comment on function shardids.add_barriers(integer) is 'Adds the write barriers of a shard that is being moved here';

create function shardids.drop_barriers(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  name regclass;
begin
  foreach name in array shardids.tables_of(shard) loop
    execute format('drop trigger if exists shardids_barrier on %s', name);
  end loop;
end
$$;

comment on function shardids.drop_barriers(integer) is 'Drops the write barriers of a shard''s tables';

create function shardids.lock_tables(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  tables constant regclass[] := shardids.tables_of(shard);
begin
  if tables <> '{}' then
    execute format('lock table %s in share row exclusive mode', array_to_string(tables, ', '));
  end if;
end
$$;

comment on function shardids.lock_tables(integer) is 'Keeps writers out of all tables of a shard until the end of the transaction';

-- A shard that was activated and has not drawn since still has the offset of its fence. This opens the barrier.
create function shardids.release(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if coalesce(pg_sequence_last_value(format('%I.id_offset', shardids.schema_of(shard))::regclass), -1) < 0 then
    execute format('select %I.next_id()', shardids.schema_of(shard));
  end if;
end
$$;

comment on function shardids.release(integer) is 'Draws an ID from a shard that is active and has none of its own yet';

-- Enters a shard whose schema a move has made here. Its high-water tick comes from the node that fenced it, with
-- activate(), so nothing that it issued there is unknown: the row is this server's own.
create function shardids.enter_moved(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
  insert into shardids.shard (id, schema, state, id_counter, id_offset, server, timeline, incarnation, arrived)
  values (shard, shardids.schema_of(shard), 'fenced', format('%I.id_counter', shardids.schema_of(shard))::regclass,
          format('%I.id_offset', shardids.schema_of(shard))::regclass, shardids.server(), shardids.timeline(), shardids.incarnation(), 'tables');
end
$$;

comment on function shardids.enter_moved(integer) is 'Enters a shard that is being moved here, fenced';

-- Opens the transaction that brings the shard's rows by pg_dump: they are there once or not at all. The
-- transaction must add the barriers again.
create function shardids.take_rows(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  update shardids.shard s set arrived = 'rows' where s.id = take_rows.shard and s.arrived = 'tables';
  if not found then
    raise exception using errcode = 'SI007', message = format('shard %s does not wait for rows here', shard);
  end if;
  perform shardids.drop_barriers(shard);
end
$$;

comment on function shardids.take_rows(integer) is 'Opens the transaction that brings the rows of a shard that is moved here';

-- Rows are in leaf partitions, which have the replica identity; a partitioned table has none of its own.
create function shardids.publish(shard integer, name name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  tables text;
begin
  if not exists (select from pg_publication p where p.pubname = name) then
    select string_agg(c.oid::regclass::text, ', ') into tables
    from pg_class c where c.oid = any (shardids.tables_of(shard)) and c.relkind = 'r';
    execute format('create publication %I', name) || coalesce(' for table ' || tables, '');
  end if;
end
$$;

comment on function shardids.publish(integer, name) is 'Publishes the tables of a shard';

-- Errors are raised again: the context of the original, which goes to the client and into the log, holds the
-- whole statement, and that a password.
create function shardids.create_subscription(name name, conninfo text, options text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format('create subscription %1$I connection %2$L publication %1$I with (create_slot = false, %3$s)',
                 name, conninfo, options);
exception when others then
  raise exception using errcode = sqlstate, message = sqlerrm;
end
$$;

comment on function shardids.create_subscription(name, text, text) is
  'CREATE SUBSCRIPTION, without a trace of the password when it fails';

-- The replication slot of the same name is there already: a server can't make one for itself while it
-- runs the statement that would use it.
create function shardids.subscribe(shard integer, name name, conninfo text, source_version integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  version constant integer := current_setting('server_version_num')::integer / 10000;
  -- Quicker, but it knows types by their OIDs, which are the same for PostgreSQL's own only. Before version
  -- 16 rows that are there are copied as text in any case.
  in_binary constant boolean := version >= 16 and version = source_version and not exists (
    select from pg_attribute a join pg_type t on t.oid = a.atttypid
    where a.attrelid = any (shardids.tables_of(shard)) and a.attnum > 0 and not a.attisdropped
      and (t.typnamespace <> 'pg_catalog'::regnamespace or t.typsend::oid = 0 or t.typreceive::oid = 0));
begin
  if not exists (select from pg_subscription s where s.subname = name and s.subdbid = shardids.database()) then
    perform shardids.create_subscription(name, conninfo, format('binary = %s', in_binary::text));
  end if;
end
$$;

comment on function shardids.subscribe(integer, name, text, integer) is
  'Subscribes to what publish made on another node, its present rows first';

-- Connects to the other node, and says why if it can't. To be rolled back.
create function shardids.try_subscribing(conninfo text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform shardids.create_subscription('shardids_trial', conninfo, 'enabled = false, slot_name = none');
end
$$;

comment on function shardids.try_subscribing(text) is 'Tests whether this server can subscribe to another; to be rolled back';

-- The slot stays on the other node, which need not be there any more.
create function shardids.unsubscribe(name name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from pg_subscription s where s.subname = name and s.subdbid = shardids.database()) then
    execute format('alter subscription %I disable', name);
    execute format('alter subscription %I set (slot_name = none)', name);
    execute format('drop subscription %I', name);
  end if;
end
$$;

comment on function shardids.unsubscribe(name) is 'Drops a subscription of subscribe';

create function shardids.sequences_of(shard integer)
returns table (name text, last_value bigint, is_called boolean)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  for name in
    select c.oid::regclass from pg_class c
    where c.relnamespace = to_regnamespace(shardids.schema_of(shard)) and c.relkind = 'S'
      and c.relname not in ('id_counter', 'id_offset')
    order by c.relname
  loop
    execute format('select last_value, is_called from %s', name) into last_value, is_called;
    return next;
  end loop;
end
$$;

comment on function shardids.sequences_of(integer) is 'The application''s own sequences in a shard, and how far they are';

-- Neither statistics nor what is in materialized views is replicated: without the one the first queries after a
-- move would be planned blindly, without the other those views could not be read. In the order of their making,
-- so that views come after what they are made of.
create function shardids.analyze(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  name regclass;
begin
  for name in
    select c.oid from pg_class c
    where c.relnamespace = to_regnamespace(shardids.schema_of(shard)) and c.relkind = 'm' order by c.oid
  loop
    execute format('refresh materialized view %s', name);
  end loop;
  foreach name in array shardids.tables_of(shard) loop
    execute format('analyze %s', name);
  end loop;
end
$$;

comment on function shardids.analyze(integer) is 'Fills materialized views of a shard, and gathers statistics of its tables';

-- Drops a shard's schema and forgets the shard. Refuses one that may issue IDs, or that something outside of the
-- schema depends on, which CASCADE would drop too. With the tables locked nothing comes to depend on them meanwhile.
create function shardids.drop_copy(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  this shardids.shard;
  tables constant regclass[] := shardids.tables_of(shard);
  dependents text;
begin
  select s.* into this from shardids.shard s where s.id = drop_copy.shard for update;
  if this.state = 'active' then
    raise exception using
      errcode = 'SI007', hint = 'Only a copy that was fenced, or left behind by a move, can be dropped.',
      message = format('shard %s is active on node "%s"', shard, (select n.name from shardids.node n));
  end if;
  if this.id is null then
    return;
  end if;
  if tables <> '{}' then
    execute format('lock table %s in access exclusive mode', array_to_string(tables, ', '));
  end if;
  select string_agg(d, ', ') into dependents from shardids.dependents_of(shard) d;
  if dependents is not null then
    raise dependent_objects_still_exist using
      message = format('%s would be dropped with the copy of shard %s on node "%s"',
                       dependents, shard, (select n.name from shardids.node n)),
      hint = 'Drop it, or let it depend on something outside of the shard''s schema; an extension: ALTER EXTENSION ... SET SCHEMA public.';
  end if;
  execute format('drop schema if exists %I cascade', this.schema);
  delete from shardids.shard s where s.id = drop_copy.shard;
end
$$;

comment on function shardids.drop_copy(integer) is 'Drops a shard that was moved away or fenced, with all that is in it';

-- A schema that was copied here without its row, or made by hand. With the row it would be a shard.
create function shardids.drop_unknown(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema constant name := shardids.schema_of(shard);
  node constant text := (select n.name from shardids.node n);
  dependents text;
begin
  lock table shardids.shard in share row exclusive mode;
  if exists (select from shardids.shard s where s.id = drop_unknown.shard) then
    raise exception using
      errcode = 'SI007', hint = 'An old copy is dropped by: shardids shard purge.',
      message = format('shard %s is a shard of node "%s"', shard, node);
  end if;
  select string_agg(d, ', ') into dependents from shardids.dependents_of(shard) d;
  if dependents is not null then
    raise dependent_objects_still_exist using
      message = format('%s would be dropped with schema %I on node "%s"', dependents, schema, node),
      hint = 'Drop it, or let it depend on something outside of the schema.';
  end if;
  execute format('drop schema if exists %I cascade', schema);
end
$$;

comment on function shardids.drop_unknown(integer) is 'Drops a schema that has a shard''s name and is no shard of this node';

-- An incomplete copy may have the only rows that are left of a shard: it is renamed, and dropped by hand.
create function shardids.set_copy_aside(shard integer) returns name
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  this shardids.shard;
  aside name;
  number integer := 0;
begin
  select s.* into this from shardids.shard s where s.id = set_copy_aside.shard for update;
  if this.arrived is null then
    raise exception using
      errcode = 'SI007', hint = 'Only what a move has begun to copy can be set aside.',
      message = format('node "%s" has no incomplete copy of shard %s', (select n.name from shardids.node n), shard);
  end if;
  loop
    number := number + 1;
    aside := format('%s_left_%s', this.schema, number);
    exit when to_regnamespace(quote_ident(aside)) is null;
  end loop;
  execute format('alter schema %I rename to %I', this.schema, aside);
  delete from shardids.shard s where s.id = set_copy_aside.shard;
  return aside;
end
$$;

comment on function shardids.set_copy_aside(integer) is 'Renames the schema of an incomplete copy of a shard, and forgets the shard';

revoke execute on function
  shardids.set_copy_aside(integer), shardids.pass_barrier(), shardids.pass_barrier(integer, regclass), shardids.add_barrier(integer, regclass, boolean), shardids.without_barrier(integer, boolean), shardids.barrier_holders(integer, boolean),
  shardids.add_barriers(integer),  shardids.drop_barriers(integer), shardids.release(integer), shardids.tables_of(integer), shardids.enter_moved(integer), shardids.take_rows(integer), shardids.drop_copy(integer), shardids.drop_unknown(integer),
  shardids.publish(integer, name), shardids.subscribe(integer, name, text, integer), shardids.unsubscribe(name), shardids.try_subscribing(text), shardids.create_subscription(name, text, text),
  shardids.sequences_of(integer), shardids.database(), shardids.lock_tables(integer), shardids.analyze(integer)
  from public;
