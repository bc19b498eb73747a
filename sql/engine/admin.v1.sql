-- Purpose:    stopping, starting and granting shards, for the owner of schema shardids; what reading a table would run.
-- Locks:      fence, activate: advisory lock (1936220516, shard) for microseconds; FOR UPDATE on the
--             shard's row until commit. grant_usage, revoke_usage: advisory lock 1936220518, the installers',
--             until commit. enter_shard: advisory lock (1936220517, shard) until commit. strangers_code: ACCESS SHARE on
--             the table and its parts until commit, SHARE UPDATE EXCLUSIVE where others own one of them.
-- Privileges: CREATE on schema shardids.

-- Stops the shard at once and for every session, whatever becomes of the caller's transaction: a fence that
-- is rolled back stays, until activate(). Fenced is id_offset < 0; it keeps the offset, so that the next one
-- is above it. Every fence leaves another value, so that an activation releases only the fence that it saw.
create function shardids.fence(shard integer, moved_to text default null, out high_water_tick bigint)
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  this shardids.shard;
begin
  select s.* into this from shardids.shard s where s.id = fence.shard;
  if not found then
    perform shardids.refuse('SI001', shard);
  end if;
  high_water_tick := shardids.stop(shard, this.id_counter, this.id_offset);
  select s.* into this from shardids.shard s where s.id = fence.shard for update;
  high_water_tick := greatest(shardids.stop(shard, this.id_counter, this.id_offset), this.high_water_tick);
  update shardids.shard s
  set state = case when fence.moved_to is null then 'fenced' else 'moved' end,
      moved_to = fence.moved_to, high_water_tick = fence.high_water_tick, unfences = null,
      incarnation = shardids.incarnation(), changed_in = pg_current_xact_id()
  where s.id = fence.shard;
end
$$;

comment on function shardids.fence(integer, text) is
  'Stops a shard at once; returns the high-water tick, above which no ID was issued';

create function shardids.stop(shard integer, id_counter regclass, id_offset regclass, out high_water_tick bigint)
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  seen bigint;
  offset_ms bigint;
  base constant bigint := shardids.incarnation();
begin
  begin
    perform shardids.wait_for_lock(1936220516, shard);
    seen := coalesce(pg_sequence_last_value(id_offset), -1);
    offset_ms := shardids.offset_ms(seen);
    if (case when seen >= 0 then not shardids.is_marked(seen, base)
            else exists (select from shardids.shard s where s.id = stop.shard and s.unfences = seen
                         and s.incarnation is distinct from base) end) then
      -- Another incarnation may have issued more than it had stored, or released this fence. Twice the margin: it may
      -- have jumped by one itself.
      offset_ms := ((shardids.safe_tick(shard, id_counter, id_offset, 2) - coalesce(pg_sequence_last_value(id_counter), 0))
                    >> shardids.sequence_bits()) + 1;
    end if;
    perform setval(id_offset, -2 - offset_ms);
    -- Read after setval: a draw that still passed with the old offset has a counter no higher than this.
    high_water_tick := (offset_ms << shardids.sequence_bits()) + coalesce(pg_sequence_last_value(id_counter), 0);
    raise exception using errcode = 'SI099';
  exception when sqlstate 'SI099' then
    null;
  end;
end
$$;

-- What another incarnation issued is known only from the clock, from what is stored, and from the row.
create function shardids.safe_tick(shard integer, id_counter regclass, id_offset regclass, margins integer) returns bigint
language sql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
  select greatest((shardids.offset_ms(coalesce(pg_sequence_last_value(id_offset), -1)) << shardids.sequence_bits())
                    + coalesce(pg_sequence_last_value(id_counter), 0),
                  shardids.ms_of(clock_timestamp()) << shardids.sequence_bits(),
                  (select s.high_water_tick from shardids.shard s where s.id = safe_tick.shard))
         + ((margins * extract(epoch from n.safety_margin) * 1000)::bigint << shardids.sequence_bits())
  from shardids.node n;
$$;

comment on function shardids.safe_tick(integer, regclass, regclass, integer) is
  'A tick that no incarnation of a shard has issued, if none was more than so many margins ahead of its clock';

-- Changes the row only: the first draw after COMMIT releases the fence, so an activation that is rolled back
-- has released nothing.
create function shardids.activate(shard integer, above_tick bigint default -1) returns void
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  this shardids.shard;
  node shardids.node;
  seen bigint;
  sequence regclass;
  holder oid;
  owner constant oid := (select n.nspowner from pg_namespace n where n.nspname = 'shardids');
  base constant bigint := shardids.incarnation();
  ahead_ms bigint := (above_tick >> shardids.sequence_bits()) - shardids.ms_of(clock_timestamp());
begin
  select n.* into node from shardids.node n;
  if ahead_ms > extract(epoch from node.max_ahead) * 1000 then
    raise exception using
      errcode = 'SI005',
      message = format('shard %s can''t start above tick %s, which is %s ms ahead of the clock; the limit is max_ahead = %s [node "%s"]',
                       shard, above_tick, ahead_ms, node.max_ahead, node.name),
      hint = 'Pass what fence() returned: a tick, not an ID. If it is right, look at the clocks of both servers.';
  end if;
  select s.* into this from shardids.shard s where s.id = activate.shard for update;
  if not found then
    -- The schema was copied here without its row, by pg_dump -n for example.
    if shard is null or to_regclass(format('%I.id_offset', shardids.schema_of(shard))) is null then
      perform shardids.refuse('SI001', shard);
    end if;
    insert into shardids.shard (id, schema, id_counter, id_offset, server)
    values (shard, shardids.schema_of(shard), format('%I.id_counter', shardids.schema_of(shard))::regclass,
            format('%I.id_offset', shardids.schema_of(shard))::regclass, 'another server')
    returning * into this;
  elsif not exists (select from pg_class c where c.oid = this.id_offset) then
    -- The schema was dropped and restored: its sequences are others, of the same names.
    this.server := 'another server';
    this.id_counter := format('%I.id_counter', this.schema)::regclass;
    this.id_offset := format('%I.id_offset', this.schema)::regclass;
    update shardids.shard s set id_counter = this.id_counter, id_offset = this.id_offset where s.id = activate.shard;
  end if;
  select c.oid, c.relowner into sequence, holder
  from pg_class c where c.oid in (this.id_counter, this.id_offset) and c.relowner <> owner
  order by c.relname limit 1;
  if found then
    -- Its owner could set it back, or drop it.
    raise insufficient_privilege using
      message = format('shard %s can''t start: sequence %s belongs to role "%s", not to "%s", the owner of schema shardids [node "%s"]',
                       shard, sequence, pg_get_userbyid(holder), pg_get_userbyid(owner), node.name),
      hint = format('If what is in schema %I can be trusted: ALTER SEQUENCE %s OWNER TO %I', this.schema, sequence, pg_get_userbyid(owner));
  end if;
  seen := coalesce(pg_sequence_last_value(this.id_offset), -1);
  -- What the original, an old primary, or an incarnation whose last changes were lost issued since is unknown.
  if this.server <> shardids.server()
     or (this.incarnation is distinct from base and not shardids.is_marked(seen, base)) then
    above_tick := greatest(above_tick, shardids.safe_tick(shard, this.id_counter, this.id_offset, 1));
  end if;
  -- Draws that are current don't look at the row: fencing makes them.
  if greatest(this.high_water_tick, above_tick) >=
     (shardids.offset_ms(seen) << shardids.sequence_bits()) + coalesce(pg_sequence_last_value(this.id_counter), 0) then
    perform shardids.stop(shard, this.id_counter, this.id_offset);
  end if;
  perform shardids.bind(shard, this.id_counter, this.id_offset);
  update shardids.shard s
  set state = 'active', moved_to = null, arrived = null, unfences = coalesce(pg_sequence_last_value(this.id_offset), -1),
      high_water_tick = greatest(this.high_water_tick, above_tick),
      server = shardids.server(), timeline = shardids.timeline(), incarnation = base,
      changed_in = pg_current_xact_id(), activated_at = clock_timestamp()
  where s.id = activate.shard;
end
$$;

-- ALTER SEQUENCE writes the sequence anew, and a rollback takes what it held since with it. So this is for a
-- copy only, with whose offset nobody has drawn, nor can before COMMIT. Where an open transaction has read the sequence, or
-- draws from copies are let through, the shard stays unbound, which costs time only.
create function shardids.bind(shard integer, id_counter regclass, id_offset regclass) returns void
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp set lock_timeout = '50ms' as $$
begin
  if not shardids.is_bound(id_counter, id_offset, shard)
     and not shardids.is_marked(coalesce(pg_sequence_last_value(id_offset), -1), shardids.incarnation())
     and exists (select from shardids.node n where n.on_copy = 'refuse') then
    execute format('alter sequence %s start %s', id_offset, shardids.bound_to(id_counter, shard));
  end if;
exception when lock_not_available then
  null;
end
$$;

comment on function shardids.bind(integer, regclass, regclass) is
  'Tells a shard''s id_offset its counter and its shard, so that draws follow the clock without looking at rows';

comment on function shardids.activate(integer, bigint) is
  'Lets a shard issue IDs on this server, all above its high-water tick and above_tick';

-- What an application role needs to draw, reserve and decode; nothing that can set a sequence.
create function shardids.grant_usage(shard integer, role name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema name := shardids.schema_of(shard);
begin
  -- Two sessions that change the grants of one schema at once would fail.
  perform shardids.wait_for_installer();
  execute format('grant usage on schema shardids, shardids_ref, %I to %I', schema, role);
  execute format('grant select on shardids.node, shardids.shard to %I', role);
  -- Needed where functions are not everybody's by default.
  execute (
    select format('grant execute on function %s to %I', string_agg(p.oid::regprocedure::text, ', '), role)
    from pg_proc p
    where p.pronamespace = 'shardids'::regnamespace
      and p.proname in ('epoch_ms', 'time_bits', 'shard_bits', 'sequence_bits', 'schema_prefix', 'schema_of', 'id_of', 'shard_of',
                        'sequence_of', 'time_of', 'tick_of', 'ms_of', 'clamped_ms', 'min_id', 'max_id', 'server', 'offset_base',
                        'is_current', 'is_nearly_current', 'is_ahead', 'is_unchanged', 'is_in_time', 'drawn_id', 'catch_up', 'next_id', 'lagging_id',
                        'offset_ms', 'refuse', 'reserve', 'tick_before', 'is_past', 'advance_past', 'decide', 'await_references'));
  execute format('grant execute on function %1$I.next_id(), %1$I.next_ids(integer), %1$I.late_id(regclass), %1$I.set_aside(regclass, integer, bigint) to %2$I', schema, role);
  if to_regprocedure(format('%I.next_number(text, text, timestamptz)', schema)) is not null then
    execute format('grant execute on function %I.next_number(text, text, timestamptz) to %I', schema, role);
  end if;
  execute format('grant usage on sequence %I.id_counter to %I', schema, role);
  execute format('grant select on sequence %I.id_offset to %I', schema, role);
end
$$;

comment on function shardids.grant_usage(integer, name) is 'Lets a role draw IDs from a shard';

create function shardids.revoke_usage(shard integer, role name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema name := shardids.schema_of(shard);
begin
  perform shardids.wait_for_installer();
  execute format('revoke execute on function %1$I.next_id(), %1$I.next_ids(integer), %1$I.late_id(regclass), %1$I.set_aside(regclass, integer, bigint) from %2$I', schema, role);
  if to_regprocedure(format('%I.next_number(text, text, timestamptz)', schema)) is not null then
    execute format('revoke execute on function %I.next_number(text, text, timestamptz) from %I', schema, role);
  end if;
  execute format('revoke all on sequence %1$I.id_counter, %1$I.id_offset from %2$I', schema, role);
end
$$;

comment on function shardids.revoke_usage(integer, name) is 'Takes back what grant_usage gave on a shard';

revoke execute on function
  shardids.fence(integer, text), shardids.stop(integer, regclass, regclass),
  shardids.safe_tick(integer, regclass, regclass, integer),
  shardids.bind(integer, regclass, regclass), shardids.activate(integer, bigint), shardids.grant_usage(integer, name), shardids.revoke_usage(integer, name)
  from public;

-- Opens a transaction on one shard, for migrations: makes the schema if there is none, and sets search_path
-- and shardids.shard until COMMIT.
create function shardids.enter_shard(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema text := shardids.schema_of(shard);
  owner name := (select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'shardids');
  bound integer := 1 << shardids.shard_bits();
begin
  if shard is null or shard < 0 or shard >= bound then
    raise exception using errcode = 'SI007',
      message = format('there is no shard %s in this layout', shard),
      hint = format('Shards are numbered 0 to %s.', bound - 1);
  elsif not pg_has_role(current_user, owner, 'usage') then
    raise insufficient_privilege using
      message = format('role "%s" can''t change shards: it lacks membership in "%s", the owner of schema shardids',
                       current_user, owner),
      hint = format('grant %I to %I', owner, current_user);
  end if;
  perform shardids.wait_for_lock(1936220517, shard);
  if to_regnamespace(quote_ident(schema)) is null then
    execute format('create schema %I authorization %I', schema, owner);
  elsif not has_schema_privilege(current_user, quote_ident(schema)::regnamespace, 'create') then
    raise insufficient_privilege using
      message = format('role "%s" lacks CREATE on schema %I, which is there already', current_user, schema),
      hint = format('As its owner: GRANT CREATE ON SCHEMA %I TO %I', schema, current_user);
  elsif not exists (select from shardids.shard s where s.id = enter_shard.shard)
        and (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = schema) <> owner then
    -- Its owner could drop the sequences, or put others in their place.
    raise insufficient_privilege using
      message = format('schema %I exists and belongs to role "%s", not to "%s", the owner of schema shardids', schema,
                       (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = schema), owner),
      hint = format('If what is in it can be trusted: ALTER SCHEMA %I OWNER TO %I', schema, owner);
  end if;
  perform set_config('shardids.shard', shard::text, true);
end
$$;

comment on function shardids.enter_shard(integer) is
  'Makes a shard''s schema if missing and names it in shardids.shard until the end of the transaction';

-- Who reads a table runs what its owner put into its policies, and functions in its indexes, statistics, CHECK constraints and
-- partition keys already while the query is planned. Operators run functions; built-in ones depend on nothing. Superusers
-- and whoever acts for the engine's owner or for the caller are trusted. The lock keeps the owner from adding an index,
-- statistics or a part after the look, which ACCESS SHARE lets him; a role that may only read can take no other.
create function shardids.strangers_code(schema name, table_name name) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  engine constant oid := (select n.nspowner from pg_namespace n where n.nspname = 'shardids');
  patience constant text := current_setting('lock_timeout');
  this regclass;
  parts oid[];
  code text;
begin
  execute format('lock table %I.%I in access share mode', schema, table_name);
  this := to_regclass(format('%I.%I', schema, table_name));
  if (select c.relkind from pg_class c where c.oid = this) not in ('r', 'p') then
    return 'it is not a table';
  end if;
  for looks in 1 .. 2 loop
    with recursive part as (
      select this::oid as oid union select i.inhrelid from pg_inherits i join part on part.oid = i.inhparent)
    select array_agg(part.oid) into parts from part;
    exit when looks = 2 or not exists (
      select from pg_class c
      where c.oid = any (parts)
        and not pg_has_role(c.relowner, current_user, 'member') and not pg_has_role(c.relowner, engine, 'member'));
    begin
      -- Short of deadlock_timeout, so that no autovacuum gives way.
      perform set_config('lock_timeout', '200ms', true);
      execute format('lock table %s in share update exclusive mode', this);
      perform set_config('lock_timeout', patience, true);
    exception
      when insufficient_privilege then
        null;
      when lock_not_available or read_only_sql_transaction then
        return 'its owner could change it meanwhile: it can''t be locked now';
    end;
  end loop;
  select w.what into code
  from (
    select format('policies of it apply to role %I', current_user) where row_security_active(this)
    union all
    select format('%s calls %s, which belongs to role %I', o.what, p.oid::regprocedure, pg_get_userbyid(r.role))
    from (
      select 'pg_class'::regclass as classid, c.oid as objid, format('the partition key of %s', c.oid::regclass) as what
      from pg_class c where c.oid = any (parts)
      union all
      select 'pg_class'::regclass, i.indexrelid, format('index %s', i.indexrelid::regclass)
      from pg_index i where i.indrelid = any (parts)
      union all
      select 'pg_constraint'::regclass, k.oid, format('CHECK %I of %s', k.conname, k.conrelid::regclass)
      from pg_constraint k where k.conrelid = any (parts) and k.contype = 'c'
      union all
      select 'pg_statistic_ext'::regclass, e.oid, format('statistics %I of %s', e.stxname, e.stxrelid::regclass)
      from pg_statistic_ext e where e.stxrelid = any (parts)) o
    join pg_depend d on d.classid = o.classid and d.objid = o.objid
      and d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass)
    left join pg_operator b on d.refclassid = 'pg_operator'::regclass and b.oid = d.refobjid
    join pg_proc p on p.oid = coalesce(b.oprcode::oid, d.refobjid)
    cross join lateral (values (p.proowner), (b.oprowner)) r (role)
    where not pg_has_role(r.role, current_user, 'member') and not pg_has_role(r.role, engine, 'member')
    union all
    select format('%s is a foreign table of role %I', c.oid::regclass, pg_get_userbyid(c.relowner))
    from pg_class c
    where c.oid = any (parts) and c.relkind = 'f'
      and not pg_has_role(c.relowner, current_user, 'member') and not pg_has_role(c.relowner, engine, 'member')) w (what)
  limit 1;
  return code;
end
$$;

comment on function shardids.strangers_code(name, name) is
  'What code of others a query of a table would run as the caller; null if none. The table is locked until the end of the transaction';
