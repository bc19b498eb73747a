-- Purpose:    what moving one key's rows to another shard needs on the node that they leave: the key's barrier, the notes of
--             rows that change while they are copied, and the refusal of the key once it lives elsewhere.
-- Locks:      pass_key: advisory lock (1936220545, move), shared, until commit, in transactions that write rows of a key that
--             is on its way. guard_key, unguard_key: SHARE ROW EXCLUSIVE and ACCESS EXCLUSIVE on the table until commit, for
--             which writers queue: set lock_timeout.
-- Privileges: CREATE on schema shardids; to call them, ownership of the shard's tables.
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

-- name: of the table; part: its position. is_old, is_new: expressions that say whether a row, old or new, is the key's;
-- direct: they read its columns alone. keys: the columns of the primary key. is_fixed: rows of other tables find the key
-- by its rows, which may neither leave the key nor enter it meanwhile.
create function shardids.guard_key(
  move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $do$
declare
  passes constant text := format('shardids.pass_key(%L, %L, %L)', move, target, key);
  notes constant text := format('shardids.key_note_%s_%s', move, part);
  operation text;
  condition text;
begin
  execute format(
    'create or replace function %1$s() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as %2$L',
    notes, format($body$
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
  if %6$L and tg_op = 'UPDATE' and was <> is_now then
    raise exception using errcode = 'SI008',
      message = format('a row of table %%s can''t change its key while the rows of key %%L are being moved', tg_relid::regclass, %5$L),
      hint = 'Wait until the move has ended: shardids tenant move --list';
  end if;
  if tg_op <> 'INSERT' then
    insert into shardids.key_change (move, part, key) values (%3$L, %7$L, jsonb_build_object(%8$s));
  end if;
  if tg_op = 'INSERT' or tg_op = 'UPDATE' and (%9$s) is distinct from (%10$s) then
    insert into shardids.key_change (move, part, key) values (%3$L, %7$L, jsonb_build_object(%11$s));
  end if;
  return null;
end
$body$, is_old, is_new, move, target, key, is_fixed, part,
        (select string_agg(format('%L, old.%I', k, k), ', ') from unnest(keys) k),
        (select string_agg(format('old.%I', k), ', ') from unnest(keys) k),
        (select string_agg(format('new.%I', k), ', ') from unnest(keys) k),
        (select string_agg(format('%L, new.%I', k, k), ', ') from unnest(keys) k)));
  execute format('revoke execute on function %s() from public', notes);
  foreach operation in array array['insert', 'update', 'delete'] loop
    condition := case when not direct then ''
                      else format('when (%s) ', case operation when 'insert' then is_new when 'delete' then is_old
                                                else format('%s or %s', is_old, is_new) end) end;
    if direct then
      execute format('create or replace trigger shardids_key_%s_%s before %s on %s for each row %sexecute function %s',
                     move, operation, operation, name, condition, passes);
      execute format('alter table %s enable always trigger shardids_key_%s_%s', name, move, operation);
    end if;
    execute format('create or replace trigger shardids_key_%s_%s_note after %s on %s for each row %sexecute function %s()',
                   move, operation, operation, name, condition, notes);
    execute format('alter table %s enable always trigger shardids_key_%s_%s_note', name, move, operation);
  end loop;
  execute format('create or replace trigger shardids_key_%s_whole before truncate on %s for each statement execute function shardids.keep_whole(%L)',
                 move, name, key);
  execute format('alter table %s enable always trigger shardids_key_%s_whole', name, move);
end
$do$;

comment on function shardids.guard_key(bigint, integer, regclass, integer, text, text, text, boolean, name[], boolean) is
  'Lets writers of a key pass its barrier on a table, and notes the rows that they change';

-- Of a key that has left, the refusal stays.
create function shardids.unguard_key(move bigint, name regclass, refuses boolean) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  trigger name;
begin
  for trigger in
    select t.tgname from pg_trigger t
    where t.tgrelid = name and starts_with(t.tgname, format('shardids_key_%s_', move))
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
  shardids.gate_of(bigint), shardids.make_gate(bigint), shardids.pass_key(bigint, integer, text), shardids.pass_key(), shardids.keep_whole(),
  shardids.guard_key(bigint, integer, regclass, integer, text, text, text, boolean, name[], boolean),
  shardids.unguard_key(bigint, regclass, boolean), shardids.forget_key(bigint)
  from public;
