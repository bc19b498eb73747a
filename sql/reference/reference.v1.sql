-- Purpose:    reference tables on a node: who may write to them, what they hold, and how far other nodes have followed.
-- Locks:      guard_reference_table: SHARE ROW EXCLUSIVE on the table until commit.
-- Privileges: CREATE on the database; to call guard_reference_table, ownership of the table.
--
-- The workers of logical replication apply changes as replicas: these triggers don't fire for them, and foreign keys are
-- not checked. So the writer takes no change by which a row that refers to another could lose it on another node.
--
-- A server that was the writer may come back as it was then: a standby of it is promoted, or a dump restored. So the right
-- to write names the server and its timeline, and holds nowhere else until shardids reference repair gives it again.

create schema shardids_ref;

comment on schema shardids_ref is 'Reference tables: the same rows on every node, written to on one of them';

-- Bound when it is created, so that a trigger's condition takes no right on schema shardids.
create function shardids.server_timeline() returns text
language sql volatile parallel safe
return shardids.server() || '/' || shardids.timeline();

comment on function shardids.server_timeline() is
  'This database on this server and its timeline; another one once it was restored elsewhere, or its standby promoted';

-- Whoever writes to a reference table evaluates the trigger's condition, also where functions are not public by default.
grant execute on function shardids.server(), shardids.timeline(), shardids.server_timeline() to public;

-- As the caller: only who acts for the owner of schema shardids passes, and only after having said so.
create function shardids.guard_reference() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('shardids.reference_work', true) = 'on'
     and pg_has_role(current_user, (select n.nspowner from pg_namespace n where n.nspname = 'shardids'), 'usage') then
    return null;
  elsif tg_argv[1] = 'reader' then
    raise exception using
      errcode = 'SI013',
      message = format('reference table %I is written to on node "%s" alone', tg_table_name, tg_argv[0]),
      hint = 'Connect to that node; in Python: cluster.reference_session().';
  elsif tg_argv[1] = 'returned' then
    raise exception using
      errcode = 'SI013',
      message = format('reference table %I takes no writes: this server was promoted, restored or upgraded since node "%s" became'
                       ' the writer', tg_table_name, tg_argv[0]),
      hint = 'If the catalog has its address, shardids reference repair gives it the right to write again, unless another node has it.';
  elsif tg_op = 'TRUNCATE' then
    raise exception using
      errcode = 'SI013',
      message = format('reference table %I can''t be truncated: rows on other nodes may refer to its rows', tg_table_name),
      hint = format('To delete a row that no node refers to: shardids reference delete %I KEY', tg_table_name);
  end if;
  raise exception using
    errcode = 'SI013',
    message = format('DELETE on reference table %I: rows on other nodes may refer to the row', tg_table_name),
    hint = format('This asks all nodes first: shardids reference delete %I KEY', tg_table_name);
end
$$;

comment on function shardids.guard_reference() is 'Refuses writes to a reference table elsewhere than on its writer, and DELETE and TRUNCATE there';

-- Foreign keys can refer to the columns of any unique index that is neither deferrable, nor partial, nor of expressions.
create function shardids.keep_reference_key() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp set extra_float_digits = 3 as $$
declare
  before constant jsonb := to_jsonb(old);
  after constant jsonb := to_jsonb(new);
  changed text;
begin
  if current_setting('shardids.reference_work', true) = 'on'
     and pg_has_role(current_user, (select n.nspowner from pg_namespace n where n.nspname = 'shardids'), 'usage') then
    return null;
  end if;
  select string_agg(format('%I', a.attname), ', ' order by a.attnum) into changed
  from pg_attribute a
  where a.attrelid = tg_relid and before -> a.attname::text is distinct from after -> a.attname::text
    and exists (select from pg_index i
                where i.indrelid = tg_relid and i.indisunique and i.indimmediate and i.indpred is null and i.indexprs is null
                  and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]));
  if changed is not null then
    raise exception using
      errcode = 'SI013',
      message = format('UPDATE of %s of reference table %I: rows on other nodes may refer to it', changed, tg_table_name),
      hint = format('Insert the new row, let rows refer to it, then: shardids reference delete %I KEY. A unique column that no'
                    ' foreign key needs can have a deferrable constraint.', tg_table_name);
  end if;
  return null;
end
$$;

comment on function shardids.keep_reference_key() is 'Refuses changes of what foreign keys on other nodes can refer to';

create function shardids.guard_reference_table(name regclass, writer text, is_writer boolean) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format(
    'create or replace trigger shardids_reference before %sdelete or truncate on %s '
    'for each statement execute function shardids.guard_reference(%L, %L)',
    case when not is_writer then 'insert or update or ' end, name, writer, case when is_writer then 'writer' else 'reader' end);
  -- A node that was the writer keeps it: DROP TRIGGER would wait for all who read the table.
  if is_writer then
    execute format(
      'create or replace trigger shardids_reference_right before insert or update on %s for each statement '
      'when (shardids.server_timeline() <> %L) execute function shardids.guard_reference(%L, ''returned'')',
      name, shardids.server_timeline(), writer);
    execute format(
      'create or replace trigger shardids_reference_key after update on %s '
      'for each row execute function shardids.keep_reference_key()', name);
  end if;
end
$$;

comment on function shardids.guard_reference_table(regclass, text, boolean) is
  'Lets writes to a reference table pass on its writer alone';

-- Of a table whose triggers are disabled, nothing is known.
create function shardids.takes_reference_writes(name name) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
  select g.tgtype & 4 = 0 and coalesce(strpos(pg_get_triggerdef(r.oid), quote_literal(shardids.server_timeline())) > 0, false)
  from pg_trigger g
  left join pg_trigger r on r.tgrelid = g.tgrelid and r.tgname = 'shardids_reference_right' and r.tgenabled in ('O', 'A')
  where g.tgrelid = to_regclass(format('shardids_ref.%I', name)) and g.tgname = 'shardids_reference' and g.tgenabled in ('O', 'A')
$$;

comment on function shardids.takes_reference_writes(name) is
  'Whether this server may be written to as the writer of a reference table, by its triggers';

-- What a row that arrives from the writer needs. By column names, for their order may differ.
create function shardids.reference_columns(names name[]) returns table (name name, definition text)
language sql stable set search_path = pg_catalog, pg_temp as $$
  select t.name,
         string_agg(concat(quote_ident(a.attname), ' ', format_type(a.atttypid, a.atttypmod), case when a.attnotnull then ' not null' end,
                           case when a.attgenerated <> '' then ' generated' end,
                           case when exists (select from pg_index i where i.indrelid = a.attrelid and i.indisprimary
                               and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
                             then ' primary key' end), ', ' order by a.attname) filter (where a.attnum is not null)
  from unnest(names) t (name)
  left join pg_attribute a on a.attrelid = to_regclass(format('shardids_ref.%I', t.name)) and a.attnum > 0 and not a.attisdropped
  group by 1
$$;

comment on function shardids.reference_columns(name[]) is 'The columns of reference tables; null for tables that are not here';

-- The slot is there already. Errors are raised again: the context of the original holds the password.
create function shardids.follow_writer(name name, conninfo text, publication name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- A COMMIT is on disk before the writer hears of it, so that nobody waits for the next flush.
  execute format('create subscription %1$I connection %2$L publication %3$I'
                 ' with (create_slot = false, slot_name = %1$I, copy_data = false, synchronous_commit = on)', name, conninfo, publication);
exception when others then
  raise exception using errcode = sqlstate, message = sqlerrm;
end
$$;

comment on function shardids.follow_writer(name, text, name) is 'Subscribes to the writer of reference tables, from where its slot is';

-- Slots are read from shared memory: each look sees them as they are. A slot that nobody is sent anything from has a
-- position, too: it is made before its node has the rows up to there, and the node subscribes when it has.
create function shardids.await_references(slots name[], wanted pg_lsn, patience_s float8) returns setof name
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  deadline constant timestamptz := clock_timestamp() + make_interval(secs => patience_s);
  behind name[];
begin
  loop
    behind := array(
      select s.name from unnest(slots) s (name)
      where not exists (
        select from pg_replication_slots r join pg_stat_get_wal_senders() w on w.pid = r.active_pid
        where r.slot_name = s.name and r.confirmed_flush_lsn >= wanted));
    exit when behind = '{}' or clock_timestamp() > deadline;
    perform pg_sleep(0.001);
  end loop;
  return query select unnest(behind);
end
$$;

comment on function shardids.await_references(name[], pg_lsn, float8) is
  'Waits until the followers of the slots have a position of the log on disk; returns those that have not in time';

revoke execute on function
  shardids.guard_reference(), shardids.keep_reference_key(), shardids.guard_reference_table(regclass, text, boolean),
  shardids.takes_reference_writes(name), shardids.reference_columns(name[]), shardids.follow_writer(name, text, name)
  from public;
