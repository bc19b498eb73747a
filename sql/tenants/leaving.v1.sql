-- Purpose:    what moving one key's rows to another shard needs on the node that they leave: the key's barrier, the notes of
--             rows that change while they are copied, and the refusal of the key once it lives elsewhere.
-- Locks:      pass_key: advisory lock (1936220545, move), shared, until commit, in transactions that write rows of a key that
--             is on its way. guard_key, unguard_key: SHARE ROW EXCLUSIVE and ACCESS EXCLUSIVE on the table until commit, for
--             which writers queue: set lock_timeout.
-- Privileges: CREATE on schema shardids; to call them, ownership of the shard's tables and membership in the engine's owner,
--             whose the functions of triggers become: they read the tables on the way to the key, in sessions of applications.
--
-- Whether a key's barrier is closed is the state of a sequence, which is not transactional: no transaction is too old to see it.
-- Who holds the advisory lock exclusively knows that every transaction that has written rows of the key has ended. Without the
-- sequence the key has left for good, also on a node that the shard was moved to since. A key that comes back lets its own
-- rows pass by a row of key_return, which is visible when they are.

create table shardids.key_change (
  id   bigint generated always as identity primary key,
  move bigint not null,
  part integer not null,
  key  jsonb   not null,
  xact xid8    not null default pg_current_xact_id()
);

create index key_change_xact on shardids.key_change (move, xact);

comment on table shardids.key_change is 'Primary keys of rows that changed in tables of a key that is being moved to another shard';
comment on column shardids.key_change.id is 'For publications of all tables, which need a key';
comment on column shardids.key_change.move is 'The number of the move in shardids_catalog.key_move';
comment on column shardids.key_change.part is 'The position of the table among those of the move';

create table shardids.key_return (
  move bigint primary key
);

comment on table shardids.key_return is 'Moves of keys that have come back: their refusal is over';

create function shardids.gate_of(move bigint) returns regclass
language sql stable set search_path = pg_catalog, pg_temp
return to_regclass(format('shardids.key_gate_%s', move));

comment on function shardids.gate_of(bigint) is 'The sequence that is used once the barrier of a key is closed';

-- Of the engine's owner: who may not read a sequence is told that it was never used, and would take the barrier for open.
create function shardids.make_gate(move bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format('create sequence if not exists shardids.key_gate_%s', move);
  execute format('alter sequence shardids.key_gate_%s owner to %I', move,
                 (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids'));
end
$$;

comment on function shardids.make_gate(bigint) is 'Creates the gate of a key, open';

-- row_security: rows that a policy hides would go without a note. The move asks before whether one binds the engine's owner.
create function shardids.make_note(name text, body text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format(
    'create or replace function shardids.%1$I() returns trigger language plpgsql security definer'
    ' set search_path = pg_catalog, pg_temp set row_security = off as %2$L', name, body);
  execute format('alter function shardids.%I() owner to %I', name,
                 (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids'));
  execute format('revoke execute on function shardids.%I() from public', name);
end
$$;

comment on function shardids.make_note(text, text) is 'Creates a function for triggers of a key''s move, which the engine''s owner owns';

create function shardids.pass_key(move bigint, target integer, key text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  gate regclass := shardids.gate_of(move);
begin
  if gate is not null then
    if not pg_try_advisory_xact_lock_shared(1936220545, move::integer) then
      perform shardids.wait_for_lock(1936220545, move::integer, shared => true);
    end if;
    if pg_sequence_last_value(gate) is null then
      return;
    end if;
  end if;
  if exists (select from shardids.key_return r where r.move = pass_key.move) then
    return;
  end if;
  raise exception using
    errcode = 'SI017', message = format('key %L has moved to shard %s [node "%s"]', key, target, (select n.name from shardids.node n)),
    detail = format('shard %s', target), hint = 'Read the directory of keys again and retry the transaction there.';
end
$$;

comment on function shardids.pass_key(bigint, integer, text) is
  'Waits for the barrier of a key, and refuses the key where it is closed or the key lives in another shard';

-- Arguments: the move, the shard that the key moves to, and the key. The trigger's condition finds the key's rows.
create function shardids.pass_key() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform shardids.pass_key(tg_argv[0]::bigint, tg_argv[1]::integer, tg_argv[2]);
  return case tg_op when 'DELETE' then old else new end;
end
$$;

create function shardids.keep_whole() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = 'SI008', hint = 'Wait until the move has ended: shardids tenant move --list. Or delete the rows.',
    message = format('table %s can''t be emptied while rows of key %L are being moved [node "%s"]', tg_relid::regclass, tg_argv[0],
                     (select n.name from shardids.node n));
end
$$;

comment on function shardids.keep_whole() is 'Refuses TRUNCATE of a table whose rows are being moved';

-- There is no CREATE OR REPLACE of such a trigger. One that is there runs the function that was replaced.
create function shardids.make_late_trigger(trigger text, operation text, name regclass, condition text, note text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = name and t.tgname = trigger) then
    execute format(
      'create constraint trigger %I after %s on %s deferrable initially deferred for each row %s execute function shardids.%I()',
      trigger, operation, name, case when condition is null then '' else format('when (%s)', condition) end, note);
  end if;
  execute format('alter table %s enable always trigger %I', name, trigger);
end
$$;

comment on function shardids.make_late_trigger(text, text, regclass, text, text) is 'Creates a trigger of a key''s move that runs at COMMIT';

-- name: of the table; part: its position. is_old, is_new: expressions that say whether a row, old or new, is the key's;
-- direct: they read its columns alone. keys: the columns of the primary key. is_fixed: rows of other tables find the key
-- by its rows, or refer to them, which may neither leave the key nor enter it meanwhile. links: of a path with a foreign key
-- that is deferrable, the columns that it begins with. is_whole: of the root, an expression that says whether a new row has both
-- the key and its primary key: one that has only one of them would be left behind, or taken along, as another key's. takes: of a
-- table whose rows others refer to by a foreign key that is deferrable, statements that note those which refer to a new row already:
-- they were another key's, whose row it has taken the place of.
create function shardids.guard_key(
  move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean,
  links name[] default null, is_whole text default null, takes text default null)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $do$
declare
  passes constant text := format('shardids.pass_key(%L, %L, %L)', move, target, key);
  notes constant text := format('key_note_%s_%s', move, part);
  operation text;
  condition text;
begin
  perform shardids.make_note(notes, format($body$
declare
  was boolean := false;
  is_now boolean := false;
begin
  if tg_op <> 'INSERT' then
    was := coalesce(%1$s, false);
  end if;
  if tg_op <> 'DELETE' then
    is_now := coalesce(%2$s, false);
  end if;
  if was or is_now then
    perform shardids.pass_key(%3$L::bigint, %4$L::integer, %5$L);
  end if;
  -- The key has left: nobody takes notes over any more, and its rows are removed.
  if pg_sequence_last_value(shardids.gate_of(%3$L)) is not null then
    return null;
  end if;
  if %6$L and tg_op = 'UPDATE' and was <> is_now then
    raise exception using errcode = 'SI008',
      message = format('a row of table %%s can''t change its key while the rows of key %%L are being moved', tg_relid::regclass, %5$L),
      hint = 'Wait until the move has ended: shardids tenant move --list';
  end if;
  if is_now and not coalesce(%12$s, false) then
    raise exception using errcode = 'SI008',
      message = format('a row of table %%s can''t have key %%L under another primary key, or another key under its, while the rows of the'
                       ' key are being moved', tg_relid::regclass, %5$L),
      hint = 'Wait until the move has ended: shardids tenant move --list';
  end if;
  if tg_op <> 'INSERT' then
    insert into shardids.key_change (move, part, key) values (%3$L, %7$L, jsonb_build_object(%8$s));
  end if;
  if tg_op = 'INSERT' or tg_op = 'UPDATE' and (%9$s) is distinct from (%10$s) then
    insert into shardids.key_change (move, part, key) values (%3$L, %7$L, jsonb_build_object(%11$s));
  end if;
  if is_now then
    %13$s
  end if;
  return null;
end
$body$, is_old, is_new, move, target, key, is_fixed, part,
        (select string_agg(format('%L, old.%I', k, k), ', ') from unnest(keys) k),
        (select string_agg(format('old.%I', k), ', ') from unnest(keys) k),
        (select string_agg(format('new.%I', k), ', ') from unnest(keys) k),
        (select string_agg(format('%L, new.%I', k, k), ', ') from unnest(keys) k), coalesce(is_whole, 'true'), coalesce(takes, 'null;')));
  foreach operation in array array['insert', 'update', 'delete'] loop
    condition := case when not direct then ''
                      else format('when (%s) ', case operation when 'insert' then is_new when 'delete' then is_old
                                                else format('%s or %s', is_old, is_new) end) end;
    if direct then
      execute format('create or replace trigger shardids_key_%s_%s before %s on %s for each row %sexecute function %s',
                     move, operation, operation, name, condition, passes);
      execute format('alter table %s enable always trigger shardids_key_%s_%s', name, move, operation);
    end if;
    execute format('create or replace trigger shardids_key_%s_%s_note after %s on %s for each row %sexecute function shardids.%I()',
                   move, operation, operation, name, condition, notes);
    execute format('alter table %s enable always trigger shardids_key_%s_%s_note', name, move, operation);
  end loop;
  if links is not null then
    -- Another session may commit the row that gives this one its key after the statement: at COMMIT it is known.
    perform shardids.make_note(notes || '_late', format($body$
declare
  was boolean := false;
  is_now boolean := coalesce(%2$s, false);
begin
  if is_now then
    perform shardids.pass_key(%3$L::bigint, %4$L::integer, %5$L);
  end if;
  if %6$L and tg_op = 'UPDATE' then
    was := coalesce(%1$s, false);
    if was <> is_now then
      raise exception using errcode = 'SI008',
        message = format('a row of table %%s can''t change its key while the rows of key %%L are being moved', tg_relid::regclass, %5$L),
        hint = 'Wait until the move has ended: shardids tenant move --list';
    end if;
  end if;
  return null;
end
$body$, is_old, is_new, move, target, key, is_fixed));
    perform shardids.make_late_trigger(
      format('shardids_key_%s_insert_late', move), 'insert', name, null, notes || '_late');
    perform shardids.make_late_trigger(
      format('shardids_key_%s_update_late', move), 'update', name,
      (select string_agg(format('old.%1$I is distinct from new.%1$I', l), ' or ') from unnest(links) l), notes || '_late');
  end if;
  execute format('create or replace trigger shardids_key_%s_whole before truncate on %s for each statement execute function shardids.keep_whole(%L)',
                 move, name, key);
  execute format('alter table %s enable always trigger shardids_key_%s_whole', name, move);
end
$do$;

comment on function shardids.guard_key(bigint, integer, regclass, integer, text, text, text, boolean, name[], boolean, name[], text, text) is
  'Lets writers of a key pass its barrier on a table, and notes the rows that they change';

-- number: of the reference among those of the move; name: the table that has it, and columns its columns there. is_own: an
-- expression that says whether a new row of that table is the key's; refers: one that says whether it refers to a row of the key.
-- direct: is_own reads the row's columns alone. late: whether either is only known at COMMIT.
create function shardids.guard_key_reference(
  move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $do$
declare
  trigger constant text := format('shardids_key_%s_ref_%s', move, number);
  note constant text := format('key_note_%s_ref_%s', move, number);
  condition constant text := (select string_agg(format('new.%I is not null', c), ' and ') from unnest(columns) c)
                             || case when direct then format(' and (%s) is not true', is_own) else '' end;
begin
  perform shardids.make_note(note, format($body$
begin
  if coalesce(%1$s, false) and not coalesce(%2$s, false) then
    raise exception using errcode = 'SI008',
      message = format('a row of table %%s can''t refer to rows of key %%L, which are being moved to another shard', tg_relid::regclass, %3$L),
      hint = 'Rows of one key may refer to rows of that key only. How far the move is: shardids tenant move --list';
  end if;
  return null;
end
$body$, refers, is_own, key));
  if late then
    perform shardids.make_late_trigger(trigger, 'insert or update', name, condition, note);
  else
    execute format('create or replace trigger %I after insert or update on %s for each row when (%s) execute function shardids.%I()',
                   trigger, name, condition, note);
    execute format('alter table %s enable always trigger %I', name, trigger);
  end if;
end
$do$;

comment on function shardids.guard_key_reference(bigint, integer, regclass, text, text, text, name[], boolean, boolean) is
  'Refuses rows of others that refer to rows of a key that is on its way';

-- Of a key that has left, the refusal stays.
create function shardids.unguard_key(move bigint, name regclass, refuses boolean) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  trigger name;
begin
  for trigger in
    select t.tgname from pg_trigger t
    where t.tgrelid = name and t.tgparentid = 0 and starts_with(t.tgname, format('shardids_key_%s_', move))
      and not (refuses and right(t.tgname, 7) in ('_insert', '_update', '_delete'))
  loop
    execute format('drop trigger %I on %s', trigger, name);
  end loop;
end
$$;

comment on function shardids.unguard_key(bigint, regclass, boolean) is 'Drops the triggers of a key on a table; with refuses, all but its refusal';

create function shardids.forget_key(move bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  note regprocedure;
begin
  for note in
    select p.oid::regprocedure from pg_proc p
    where p.pronamespace = 'shardids'::regnamespace and starts_with(p.proname, format('key_note_%s_', move))
  loop
    execute format('drop function %s', note);
  end loop;
  execute format('drop sequence if exists shardids.key_gate_%s', move);
  delete from shardids.key_change c where c.move = forget_key.move;
end
$$;

comment on function shardids.forget_key(bigint) is 'Drops the gate and the notes of a key''s move';

revoke execute on function
  shardids.gate_of(bigint), shardids.make_gate(bigint), shardids.make_note(text, text), shardids.pass_key(bigint, integer, text),
  shardids.pass_key(), shardids.keep_whole(), shardids.make_late_trigger(text, text, regclass, text, text),
  shardids.guard_key(bigint, integer, regclass, integer, text, text, text, boolean, name[], boolean, name[], text, text),
  shardids.guard_key_reference(bigint, integer, regclass, text, text, text, name[], boolean, boolean),
  shardids.unguard_key(bigint, regclass, boolean), shardids.forget_key(bigint)
  from public;
