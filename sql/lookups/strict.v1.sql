-- Purpose:    strict look-ups: triggers that claim what SQL writes. Part of every node's engine; without effect before
--             shardids lookup create --strict has made dblink, its servers and shardids.lookup_place.
-- Locks:      add_claiming, drop_claiming: SHARE ROW EXCLUSIVE, ACCESS EXCLUSIVE on the table until commit. claim_rows: none
--             here; on other nodes those of single statements, and SHARE on the table there for up to 0.1 s at a time.
-- Privileges: CREATE on schema shardids; to call add_claiming and drop_claiming, ownership of the shard's tables.
--
-- The order is that of sessions: the row is written, its value is claimed in a transaction of its own, which dblink commits
-- at once, and then the row is committed. So no transaction waits for a claim while it holds one uncommitted.

create table shardids.lookup_place (
  shard      integer not null primary key,
  node       text    not null,
  server     text    not null,
  connection text    not null
);

comment on table shardids.lookup_place is 'Where claim_rows() finds each shard: its node, the foreign server, and the name of the connection to it';

create function shardids.claim_shard(kind text, value text, shard_count integer) returns integer
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  hash bigint;
begin
  if kind = 'date' and value::date not between '0001-01-01' and '9999-12-31' then
    raise exception using
      errcode = 'SI007', message = format('%s is no date of the years 1 to 9999, which look-up keys can have', value);
  end if;
  hash := ('x' || encode(substr(sha256(case kind
    when 'text' then convert_to('s:' || value, 'UTF8')
    when 'date' then convert_to('s:' || to_char(value::date, 'YYYY-MM-DD'), 'UTF8')
    when 'bigint' then convert_to('i:' || value, 'UTF8')
    -- No backslashes: what they mean is a setting of the session that writes.
    when 'bytea' then convert_to('b:', 'UTF8') || value::bytea
    when 'uuid' then convert_to('u:', 'UTF8') || uuid_send(value::uuid) end), 1, 8), 'hex'))::bit(64)::bigint;
  return mod(hash + case when hash < 0 then 18446744073709551616 else 0 end, shard_count);
end
$$;

comment on function shardids.claim_shard(text, text, integer) is 'The shard that keeps the claim of a value';

-- The next four are called over dblink, by the role of the user mapping.

create function shardids.claim(schema text, claims text, kind text, shard integer, given text[]) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('synchronous_commit') in ('off', 'local') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  return query execute format(
    'insert into %I.%I as c (value, shard) select g.value::%s, $1 from unnest($2) g (value) order by 1'
    ' on conflict (value) do update set stamp = default where c.shard = excluded.shard returning c.value::text',
    schema, claims, kind) using shard, given;
end
$$;

comment on function shardids.claim(text, text, text, integer, text[]) is 'Claims values for a shard; returns those that no other shard has claimed';

create function shardids.claim_of(schema text, claims text, kind text, value text) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  return query execute format('select c.shard || '' '' || c.stamp from %I.%I c where c.value = $1::%s', schema, claims, kind) using value;
end
$$;

comment on function shardids.claim_of(text, text, text, text) is 'The shard that a value is claimed for, and the stamp of the claim';

create function shardids.take_claim(schema text, claims text, kind text, value text, stamp uuid, shard integer) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('synchronous_commit') in ('off', 'local') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  return query execute format(
    'update %I.%I c set shard = $1, stamp = default where c.value = $2::%s and c.stamp = $3 returning c.value::text',
    schema, claims, kind) using shard, value, stamp;
end
$$;

comment on function shardids.take_claim(text, text, text, text, uuid, integer) is
  'Takes a claim from a shard that has no row, if nobody has claimed since it was read';

-- The UPDATE changes nothing: the write barrier of a shard that has moved refuses it. What triggers do is rolled back.
create function shardids.has_row(schema text, name text, key text, kind text, value text, after_writers boolean) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp set row_security = off as $$
declare
  found_one boolean;
begin
  perform set_config('lock_timeout', '100ms', true);
  if after_writers then
    execute format('lock table %I.%I in share mode', schema, name);
  end if;
  execute format('update %1$I.%2$I set %3$I = %3$I where false', schema, name, key);
  execute format('select exists (select from %I.%I where %I = $1::%s)', schema, name, key, kind) into found_one using value;
  raise exception using errcode = 'SI099';
exception
  when sqlstate 'SI099' then
    return case when found_one then 'yes' else 'no' end;
  when lock_not_available then
    return 'busy';
end
$$;

comment on function shardids.has_row(text, text, text, text, text, boolean) is
  'Whether a shard has a row with a value, when all who had written to the table have ended: yes, no, or busy';

-- A connection is named for the options of its server, so that one to a node's former address is not used again.
create function shardids.ask_node(connection text, server text, statement text) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  attempts integer := 0;
begin
  loop
    attempts := attempts + 1;
    begin
      if connection <> all (coalesce(shardids_dblink.dblink_get_connections(), '{}')) then
        perform shardids_dblink.dblink_disconnect(c.name)
        from unnest(shardids_dblink.dblink_get_connections()) c (name) where starts_with(c.name, left(connection, 22));
        -- By its name alone: dblink would take any other text for the options of a connection.
        perform shardids_dblink.dblink_connect(connection, s.srvname::text) from pg_foreign_server s where s.srvname = server;
        if not found then
          raise undefined_object using message = format('this node has no foreign server "%s" for look-ups', server),
            hint = 'shardids lookup refresh';
        end if;
      end if;
      return query select answer.value from shardids_dblink.dblink(connection, statement) answer (value text);
      return;
    exception when connection_exception or admin_shutdown or crash_shutdown or cannot_connect_now then
      if attempts > 1 then
        raise;
      end if;
      perform shardids_dblink.dblink_disconnect(c.name)
      from unnest(shardids_dblink.dblink_get_connections()) c (name) where c.name = connection;
    end;
  end loop;
end
$$;

comment on function shardids.ask_node(text, text, text) is 'Runs a statement on a node in a transaction of its own; if the connection was lost, again';

create function shardids.ask_shard(shard integer, statement text) returns setof text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  place shardids.lookup_place;
begin
  select p.* into place from shardids.lookup_place p where p.shard = ask_shard.shard;
  if not found then
    raise exception using
      errcode = 'object_not_in_prerequisite_state',
      message = format('this node does not know where shard %s is, which strict look-ups need', shard),
      hint = 'shardids lookup refresh';
  end if;
  return query select a.value from shardids.ask_node(place.connection, place.server, statement) a (value);
end
$$;

comment on function shardids.ask_shard(integer, text) is 'Runs a statement on the node of a shard in a transaction of its own';

create function shardids.claim_values(claims text, kind text, shard_count integer, shard integer, given text[]) returns text[]
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  part record;
  held text[] := '{}';
begin
  for part in
    select min(v.keeper) as shard,
           string_agg(format('select shardids.claim(%L, %L, %L, %s, %L)', shardids.schema_of(v.keeper), claims, kind, claim_values.shard, v.part),
                      ' union all ' order by v.keeper) as statement
    from (select shardids.claim_shard(kind, g.value, shard_count), array_agg(g.value)
          from unnest(given) g (value) group by 1) v (keeper, part)
    left join shardids.lookup_place p on p.shard = v.keeper
    group by p.connection order by 1
  loop
    held := held || array(select a.value from shardids.ask_shard(part.shard, part.statement) a (value));
  end loop;
  return held;
end
$$;

comment on function shardids.claim_values(text, text, integer, integer, text[]) is
  'Claims values for a shard wherever their claims are; returns those that no other shard has claimed';

-- As shardids.client.lookups.Claims does it: docs/decisions/0035-unique-over-shards.md.
create function shardids.settle_claim(claims text, kind text, shard_count integer, shard integer, name text, key text, value text)
returns boolean
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  mine constant integer := shardids.claim_shard(kind, value, shard_count);
  schema constant text := shardids.schema_of(mine);
  claimed text;
  other integer;
  answer text;
begin
  for round in 1 .. 50 loop
    -- Read before the row is looked for: whoever claims after this gives it another stamp.
    select a.value into claimed
    from shardids.ask_shard(mine, format('select shardids.claim_of(%L, %L, %L, %L)', schema, claims, kind, value)) a (value);
    other := split_part(claimed, ' ', 1)::integer;
    if other is null or other = shard then
      if value = any (shardids.claim_values(claims, kind, shard_count, shard, array[value])) then
        return true;
      end if;
      continue;
    end if;
    answer := 'busy';
    for attempt in 0 .. 20 loop
      select a.value into answer
      from shardids.ask_shard(other, format('select shardids.has_row(%L, %L, %L, %L, %L, %L)', shardids.schema_of(other),
                                            name, key, kind, value, attempt > 0)) a (value);
      exit when answer = 'yes' or attempt > 0 and answer = 'no';
      if attempt > 0 then
        perform pg_sleep(0.1);
      end if;
      answer := 'busy';
    end loop;
    if answer = 'yes' then
      return false;
    elsif answer = 'busy' then
      raise exception using
        errcode = 'SI014',
        message = format('%s.%s: shard %s has claimed %s, and transactions that have written to %s there, or vacuum or alter it,'
                         ' have not ended for 4 s', name, key, other, left(value, 60), name),
        hint = 'Run it again when they have. If it is this transaction itself: a value leaves its shard in one, and is'
               ' written in another shard in the next.';
    end if;
    select a.value into answer
    from shardids.ask_shard(mine, format('select shardids.take_claim(%L, %L, %L, %L, %L, %s)', schema, claims, kind, value,
                                         split_part(claimed, ' ', 2), shard)) a (value);
    if found then
      return true;
    end if;
  end loop;
  raise exception using
    errcode = 'SI014', message = format('%s.%s: others claim %s and give it up again, 50 times', name, key, left(value, 60)),
    hint = 'Run the transaction again.';
end
$$;

comment on function shardids.settle_claim(text, text, integer, integer, text, text, text) is
  'Claims a value that another shard had claimed; false if that has a row with it';

-- Arguments of the trigger: the column, the table of the claims, their type, the number of shards. As the owner of the engine,
-- whose user mappings dblink takes.
create function shardids.claim_rows() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set datestyle = 'ISO' set bytea_output = 'hex' as $$
declare
  this constant integer := (select s.id from shardids.shard s where s.schema = tg_table_schema);
  name constant text := format('%s.%s', tg_table_schema, tg_argv[1]);
  deadline constant timestamptz := clock_timestamp() + interval '5 s';
  written text[];
  given text[];
  held text[];
  value text;
begin
  execute format(
    case tg_op when 'INSERT' then 'select array_agg(n.%1$I::text) from new_rows n where n.%1$I is not null'
               else 'select array_agg(w.value::text) from (select n.%1$I from new_rows n where n.%1$I is not null'
                    ' except select o.%1$I from old_rows o) w (value)' end, tg_argv[0])
  into written;
  for beginning in 1 .. coalesce(cardinality(written), 0) by 1000 loop
    given := written[beginning:beginning + 999];
    loop
      begin
        held := shardids.claim_values(tg_argv[1], tg_argv[2], tg_argv[3]::integer, this, given);
        foreach value in array given loop
          if value <> all (held)
             and not shardids.settle_claim(tg_argv[1], tg_argv[2], tg_argv[3]::integer, this, tg_table_name, tg_argv[0], value) then
            raise exception using
              errcode = 'unique_violation', schema = tg_table_schema, table = tg_table_name, column = tg_argv[0],
              message = format('duplicate key value violates look-up "%s.%s"', tg_table_name, tg_argv[0]),
              detail = format('Key (%s)=(%s) already exists in another shard.', tg_argv[0], left(value, 60));
          end if;
        end loop;
        exit;
      exception when sqlstate 'SI002' or sqlstate 'SI003' or object_not_in_prerequisite_state then
        -- A shard moves, or has come here: the move tells this node where all are.
        if clock_timestamp() > deadline then
          raise;
        end if;
        perform pg_sleep(0.05);
      end;
    end loop;
  end loop;
  -- Sessions need not claim what was claimed in their transaction.
  if written is not null and name <> all (string_to_array(coalesce(current_setting('shardids.claimed', true), ''), ' ')) then
    perform set_config('shardids.claimed', concat_ws(' ', current_setting('shardids.claimed', true), name), true);
  end if;
  return null;
end
$$;

comment on function shardids.claim_rows() is 'Claims what a statement has written of a strict look-up key';

create function shardids.add_claiming(name regclass, key text, claims text, kind text, shard_count integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  call constant text := format('execute function shardids.claim_rows(%L, %L, %L, %s)', key, claims, kind, shard_count);
begin
  execute format('create or replace trigger %I after insert on %s referencing new table as new_rows for each statement %s',
                 claims || '_ins', name, call);
  execute format('create or replace trigger %I after update on %s referencing old table as old_rows new table as new_rows'
                 ' for each statement %s', claims || '_upd', name, call);
end
$$;

comment on function shardids.add_claiming(regclass, text, text, text, integer) is 'Makes the triggers of a strict look-up on a table';

create function shardids.drop_claiming(name regclass, claims text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format('drop trigger if exists %I on %s', claims || '_ins', name);
  execute format('drop trigger if exists %I on %s', claims || '_upd', name);
end
$$;

comment on function shardids.drop_claiming(regclass, text) is 'Drops the triggers of a strict look-up from a table';

revoke execute on function
  shardids.claim_shard(text, text, integer), shardids.claim(text, text, text, integer, text[]),
  shardids.claim_of(text, text, text, text), shardids.take_claim(text, text, text, text, uuid, integer),
  shardids.has_row(text, text, text, text, text, boolean), shardids.ask_node(text, text, text),
  shardids.ask_shard(integer, text), shardids.claim_values(text, text, integer, integer, text[]),
  shardids.settle_claim(text, text, integer, integer, text, text, text), shardids.claim_rows(),
  shardids.add_claiming(regclass, text, text, text, integer), shardids.drop_claiming(regclass, text)
from public;
