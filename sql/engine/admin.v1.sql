-- Purpose:    stopping, starting and granting shards, for the owner of schema shardids.
-- Locks:      fence, activate: advisory lock (1936220516, shard) for microseconds; FOR UPDATE on the
--             shard's row until commit. grant_usage, revoke_usage: advisory lock 1936220518, the installers',
--             until commit. enter_shard: advisory lock (1936220517, shard) until commit.
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
      -- Another incarnation may have issued more than it had stored, or released this fence.
      offset_ms := ((shardids.safe_tick(shard, id_counter, id_offset) - coalesce(pg_sequence_last_value(id_counter), 0))
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

-- What another incarnation issued is known only from the clock, from what is stored, and from the row. Its own jump was up to two
-- margins past what is stored, and up to four past the clock; what it issued last, up to a margin, may be lost.
create function shardids.safe_tick(shard integer, id_counter regclass, id_offset regclass) returns bigint
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  bits constant integer := shardids.sequence_bits();
  stored_ms constant bigint := greatest(
    shardids.offset_ms(coalesce(pg_sequence_last_value(id_offset), -1)) + (coalesce(pg_sequence_last_value(id_counter), 0) >> bits),
    (select s.high_water_tick >> bits from shardids.shard s where s.id = safe_tick.shard));
  now_ms constant bigint := shardids.ms_of(clock_timestamp());
  node shardids.node;
begin
  select n.* into node from shardids.node n;
  -- A tick that is too high would stay in the shard's row.
  if now_ms >= 1::bigint << shardids.time_bits() then
    perform shardids.refuse('SI006', shard);
  elsif stored_ms > 0 and now_ms - stored_ms > extract(epoch from node.max_step) * 1000 and not shardids.is_believed(now_ms) then
    perform shardids.refuse('SI012', shard, now_ms - stored_ms);
  elsif now_ms - stored_ms > 3600000 then
    perform shardids.note_step(now_ms, stored_ms);
  end if;
  return ((greatest(stored_ms + 3 * extract(epoch from node.safety_margin)::numeric * 1000,
                    now_ms + 5 * extract(epoch from node.safety_margin)::numeric * 1000)::bigint + 1) << bits);
end
$$;

comment on function shardids.safe_tick(integer, regclass, regclass) is
  'A tick that no incarnation of a shard has issued, if what was lost of each was at most a margin ahead of what is stored or of its jump';

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
    above_tick := greatest(above_tick, shardids.safe_tick(shard, this.id_counter, this.id_offset));
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

-- ALTER SEQUENCE writes the sequence anew, and a rollback takes what it held since with it. So this is for a fenced shard or a
-- copy only, with whose offset nobody has drawn, nor can before COMMIT. Where an open transaction has read the sequence, or
-- draws from copies are let through, the shard stays unbound, which costs time only. A shard that has ticks to pass over is unbound.
create function shardids.bind(shard integer, id_counter regclass, id_offset regclass) returns void
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp set lock_timeout = '50ms' as $$
declare
  is_limited constant boolean := shardids.skips_from(shard) is not null;
  is_changed boolean := false;
begin
  if shardids.is_bound(id_counter, id_offset, shard) is distinct from not is_limited
     and not shardids.is_marked(coalesce(pg_sequence_last_value(id_offset), -1), shardids.incarnation())
     and exists (select from shardids.node n where n.on_copy = 'refuse') then
    begin
      execute format('alter sequence %s start %s', id_offset,
                     case when is_limited then 0 else shardids.bound_to(id_counter, shard) end);
    exception when lock_not_available then
      if is_limited then
        raise;
      end if;
    end;
    is_changed := true;
  end if;
  -- A copy of the shard from before its range may be unbound already, and its next_id() without a limit.
  if is_changed or is_limited then
    -- Where sequences were made by hand there is none.
    perform shardids.define_next_id(shard, n.nspname)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = id_offset and to_regprocedure(format('%I.late_id_%s(regclass)', n.nspname, shard)) is not null;
  end if;
end
$$;

comment on function shardids.bind(integer, regclass, regclass) is
  'Makes a shard''s id_offset name its counter and its shard, so that draws follow the clock without looking at rows';

-- The first tick still to come that the shard passes over, by what is stored of the shard: the clock may be wrong again.
-- In PL/pgSQL, which keeps the plan: each new shard asks twice.
create function shardids.skips_from(shard integer) returns bigint
language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $$
begin
  return (select min(k.first_tick) from shardids.skipped k
    where k.shard = skips_from.shard
      and k.last_tick >= coalesce(
        (select greatest(s.high_water_tick, (shardids.offset_ms(coalesce(pg_sequence_last_value(i.oid), -1)) << shardids.sequence_bits())
                                            + coalesce(pg_sequence_last_value(c.oid), 0))
         from shardids.shard s left join pg_class i on i.oid = s.id_offset left join pg_class c on c.oid = s.id_counter
         where s.id = skips_from.shard), 0));
end
$$;

-- The shard's own next_id(). On Citus it is one call in PL/pgSQL: the coordinator evaluates each function of an expression by
-- itself, for each row, and all branches of a COALESCE. Its body is on every node of Citus, and only the coordinator has the
-- sequences: so only there does it get past its first statement. While it has ticks to pass over, an ID that is not below them is given up, and the draw goes to
-- late_id_N(), which looks at them; where IDs turn negative all draws do.
create function shardids.define_next_id(shard integer, schema name, called name default 'next_id') returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  skips_from constant bigint := shardids.skips_from(shard);
  below constant bigint := shardids.id_of(skips_from, 0);
  is_distributed constant boolean := (select n.engine = 'citus' from shardids.node n);
  draw text := 'shardids.current_id(pg_catalog.pg_sequence_last_value(''%1$I.id_offset''::pg_catalog.regclass), '
    '''%1$I.id_counter''::pg_catalog.regclass, ''%1$I.id_offset''::pg_catalog.regclass, %2$s)';
  follow text := 'shardids.lagging_id(''%1$I.id_counter''::pg_catalog.regclass, ''%1$I.id_offset''::pg_catalog.regclass, %2$s)';
begin
  if skips_from is not null then
    draw := format('NULLIF(LEAST(%1$s, %2$L::bigint), %2$L::bigint)', draw, below);
    follow := format('NULLIF(LEAST(%1$s, %2$L::bigint), %2$L::bigint)', follow, below);
  end if;
  -- A new shard's is not there yet: to replace one would leave it to the role that put it there.
  execute format(
    case called when 'next_id' then 'create or replace' else 'create' end || ' function %1$I.%3$I() returns bigint language '
    || case when is_distributed
            then 'plpgsql volatile parallel unsafe as $body$begin if pg_catalog.to_regclass(%4$L) is null then '
                 'raise exception using errcode = ''SI001'', message = ''shard %2$s issues IDs on the coordinator of Citus only'', '
                 'hint = ''Send the statement to the coordinator. INSERT ... SELECT from tables of shards: through a temporary table.''; end if; return '
            else 'sql volatile parallel unsafe return ' end
    || 'COALESCE('
    || case when skips_from is null or shardids.time_bits() + shardids.shard_bits() + shardids.sequence_bits() < 64
            then draw || ', ' || follow || ', ' else '' end
    || '%1$I.late_id_%2$s(''%1$I.id_offset''::pg_catalog.regclass))' || case when is_distributed then '; end$body$' else '' end,
    schema, shard, called, format('%I.id_offset', schema));
end
$$;

comment on function shardids.define_next_id(integer, name, name) is 'Creates a shard''s function next_id()';

comment on function shardids.activate(integer, bigint) is
  'Lets a shard issue IDs on this server, all above its high-water tick and above_tick';

-- What an application role may execute in a shard's schema.
create function shardids.granted_functions(shard integer) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
  select string_agg(format('%I.%s', shardids.schema_of(shard), f.signature), ', ')
  from unnest(array['next_id()', 'next_ids(integer)', format('late_id_%s(regclass)', shard),
                    format('set_aside_%s(regclass, integer, bigint)', shard), 'next_number(text, text, timestamptz)']) f (signature)
  where f.signature not like 'next\_number%' or to_regprocedure(format('%I.%s', shardids.schema_of(shard), f.signature)) is not null;
$$;

-- What an application role needs to draw, reserve and decode; nothing that can set a sequence. One statement for the functions of all
-- shards: it looks up their names before it changes the first, so PostgreSQL lists all functions of a name once.
create function shardids.grant_usage(shards integer[], role name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- Two sessions that change the grants of one schema at once would fail.
  perform shardids.wait_for_installer();
  execute (
    select format('grant usage on schema shardids, shardids_ref, %s to %I', string_agg(quote_ident(shardids.schema_of(s)), ', '), role)
    from unnest(shards) s);
  execute format('grant select on shardids.node, shardids.shard, shardids.skipped, shardids.key_home to %I', role);
  -- Those of the engine are needed where functions are not everybody's by default.
  execute (
    select format('grant execute on function %s, %s to %I',
                  string_agg(p.oid::regprocedure::text, ', '), (select string_agg(shardids.granted_functions(s), ', ') from unnest(shards) s), role)
    from pg_proc p
    where p.pronamespace = 'shardids'::regnamespace
      and p.proname in ('epoch_ms', 'time_bits', 'shard_bits', 'sequence_bits', 'schema_prefix', 'schema_of', 'id_of', 'shard_of',
                        'sequence_of', 'time_of', 'tick_of', 'ms_of', 'clamped_ms', 'min_id', 'max_id', 'server', 'offset_base',
                        'is_current', 'is_nearly_current', 'is_ahead', 'is_unchanged', 'drawn_id', 'catch_up', 'current_id', 'lagging_id',
                        'offset_ms', 'refuse', 'reserve', 'tick_before', 'is_past', 'max_past_ms', 'advance_past', 'decide', 'await_references',
                        'shard_for_key', 'shard_for_hash', 'refused_count', 'home_of'));
  execute (
    select format('grant usage on sequence %s to %I', string_agg(format('%I.id_counter', shardids.schema_of(s)), ', '), role) from unnest(shards) s);
  execute (
    select format('grant select on sequence %s to %I', string_agg(format('%I.id_offset', shardids.schema_of(s)), ', '), role) from unnest(shards) s);
end
$$;

comment on function shardids.grant_usage(integer[], name) is 'Lets a role draw IDs from shards';

create function shardids.revoke_usage(shards integer[], role name) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform shardids.wait_for_installer();
  execute (
    select format('revoke execute on function %s from %I', string_agg(shardids.granted_functions(s), ', '), role) from unnest(shards) s);
  execute (
    select format('revoke all on sequence %s from %I', string_agg(format('%1$I.id_counter, %1$I.id_offset', shardids.schema_of(s)), ', '), role)
    from unnest(shards) s);
end
$$;

comment on function shardids.revoke_usage(integer[], name) is 'Takes back what grant_usage gave on shards';

-- The tick, in ms, from which on the shard would issue IDs again, and the range that it would pass over. From the present on: what
-- it issued before the jump was at most max_ahead past the clock.
create function shardids.plan_reset(
  shard integer, from_ms bigint default null,
  out lead_ms bigint, out starts_ms bigint, out first_ms bigint, out last_ms bigint)
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  this shardids.shard;
  node shardids.node;
  bits constant integer := shardids.sequence_bits();
  now_ms constant bigint := shardids.ms_of(clock_timestamp());
  ahead_ms bigint;
  before_ms bigint;
begin
  select s.* into this from shardids.shard s where s.id = plan_reset.shard;
  if not found then
    perform shardids.refuse('SI001', shard);
  elsif this.state = 'moved' then
    perform shardids.refuse('SI002', shard);
  end if;
  select n.* into node from shardids.node n;
  ahead_ms := extract(epoch from node.max_ahead) * 1000;
  if now_ms not between 0 and (1::bigint << shardids.time_bits()) - 1 then
    perform shardids.refuse('SI006', shard);
  end if;
  last_ms := greatest(this.high_water_tick >> bits,
                      shardids.offset_ms(coalesce(pg_sequence_last_value(this.id_offset), -1))
                      + (coalesce(pg_sequence_last_value(this.id_counter), 0) >> bits));
  lead_ms := last_ms - now_ms;
  starts_ms := now_ms + ahead_ms;
  if lead_ms <= ahead_ms then
    raise exception using
      errcode = 'SI007',
      message = format('shard %s is %s: there is nothing to reset [node "%s"]', shard,
                       case when lead_ms < 0 then format('%s ms behind the clock', -lead_ms)
                            else format('%s ms ahead of the clock, within max_ahead = %s', lead_ms, node.max_ahead) end,
                       node.name),
      hint = format('To let it issue IDs if it is fenced: shardids shard activate %s', shard);
  end if;
  if from_ms is null then
    select k.step_ms, (select max(b.before_ms) from shardids.noted_steps() b where b.step_ms > now_ms and b.before_ms < k.step_ms)
    into from_ms, before_ms from shardids.noted_steps() k where k.step_ms > now_ms order by 1 limit 1;
    if from_ms is null or pg_sequence_last_value('shardids.step_dropped') > now_ms then
      raise exception using
        errcode = 'SI007',
        message = format('when the clock of shard %s went ahead is not recorded [node "%s"]', shard, node.name),
        hint = 'Name the earliest time that the wrong clock can have shown: --from TIME.';
    -- A second: draws under way while the step was noted.
    elsif before_ms > starts_ms - 1000 then
      raise exception using
        errcode = 'SI007',
        message = format('a shard of the node was at %s, past the present and max_ahead, when the clock went to %s: since when it was wrong is not recorded [node "%s"]',
                         shardids.time_of(shardids.id_of(before_ms << bits, 0)), shardids.time_of(shardids.id_of(from_ms << bits, 0)), node.name),
        hint = 'Name the earliest time that the wrong clock can have shown: --from TIME.';
    end if;
  end if;
  first_ms := from_ms;
  if first_ms <= starts_ms + 1000 or first_ms > last_ms then
    raise exception using
      errcode = 'SI007',
      message = format('shard %s issued IDs by the wrong clock from %s to %s; it can''t begin between the present and those [node "%s"]',
                       shard, shardids.time_of(shardids.id_of(first_ms << bits, 0)), shardids.time_of(shardids.id_of(least(last_ms, (1::bigint << shardids.time_bits()) - 1) << bits, 0)), node.name),
      hint = 'The present, max_ahead and a second must lie before the first of them. Otherwise wait until the clock has passed the last, less max_ahead.';
  end if;
end
$$;

comment on function shardids.plan_reset(integer, bigint) is 'What shardids.reset_clock(shard) would do';

-- For a fenced shard: its fence is committed, so that a rollback of this leaves it as high as it was. ALTER SEQUENCE, before the
-- offset is lowered, writes the sequence anew: with a rollback the old one is back. Its lock waits for transactions that drew.
create function shardids.reset_clock(shard integer, from_ms bigint default null, out starts_ms bigint, out first_tick bigint, out last_tick bigint)
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp set lock_timeout = '10s' as $$
#variable_conflict use_variable
declare
  this shardids.shard;
  plan record;
  bits constant integer := shardids.sequence_bits();
  counter bigint;
  offset_ms bigint;
begin
  select s.* into this from shardids.shard s where s.id = reset_clock.shard for update;
  select * into plan from shardids.plan_reset(shard, from_ms);
  if this.state <> 'fenced' or this.changed_in = pg_current_xact_id_if_assigned() then
    raise exception using
      errcode = 'SI007',
      message = format('shard %s must be fenced before its clock is reset [node "%s"]', shard, (select n.name from shardids.node n)),
      hint = format('select shardids.fence(%s), and COMMIT', shard);
  end if;
  starts_ms := plan.starts_ms;
  first_tick := plan.first_ms << bits;
  last_tick := greatest(this.high_water_tick, ((plan.last_ms + 1) << bits) - 1);
  insert into shardids.skipped (shard, first_tick, last_tick) values (shard, first_tick, last_tick)
  on conflict on constraint skipped_pkey do update set last_tick = greatest(skipped.last_tick, excluded.last_tick);
  execute format('alter sequence %s start 0', this.id_offset);
  -- The lock of who would raise it, until COMMIT: the shard is fenced.
  perform shardids.wait_for_lock(1936220516, shard);
  counter := coalesce(pg_sequence_last_value(this.id_counter), 0);
  offset_ms := starts_ms - (counter >> bits);
  if offset_ms < 0 then
    perform shardids.refuse('SI006', shard);
  end if;
  perform setval(this.id_offset, -2 - offset_ms);
  update shardids.shard s
  set high_water_tick = starts_ms << bits, unfences = null, incarnation = shardids.incarnation(), changed_in = pg_current_xact_id()
  where s.id = reset_clock.shard;
  -- By what is stored of the shard by now.
  perform shardids.define_next_id(shard, this.schema);
  update shardids.node n set clock_confirmed_at = null where n.clock_confirmed_at > clock_timestamp();
end
$$;

comment on function shardids.reset_clock(integer, bigint) is
  'Brings a fenced shard, which a wrong clock took into the future, back to the present; activate it after COMMIT';

revoke execute on function
  shardids.fence(integer, text), shardids.stop(integer, regclass, regclass),
  shardids.safe_tick(integer, regclass, regclass), shardids.skips_from(integer), shardids.define_next_id(integer, name, name),
  shardids.plan_reset(integer, bigint), shardids.reset_clock(integer, bigint),
  shardids.bind(integer, regclass, regclass), shardids.activate(integer, bigint), shardids.granted_functions(integer), shardids.grant_usage(integer[], name), shardids.revoke_usage(integer[], name)
  from public;

-- Opens a transaction on one shard, for migrations: makes the schema if there is none, and sets search_path
-- and shardids.shard until COMMIT.
create function shardids.enter_shard(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  schema text := shardids.schema_of(shard);
  owner name := (select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'shardids');
  bound integer := 1 << shardids.shard_bits();
  stranger record;
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
    if (select n.engine from shardids.node n) = 'citus' then
      perform set_config('citus.enable_schema_based_sharding', 'on', true);
    end if;
    execute format('create schema %I authorization %I', schema, owner);
  elsif not has_schema_privilege(current_user, quote_ident(schema)::regnamespace, 'create') then
    raise insufficient_privilege using
      message = format('role "%s" lacks CREATE on schema %I, which is there already', current_user, schema),
      hint = format('As its owner: GRANT CREATE ON SCHEMA %I TO %I', schema, current_user);
  elsif not exists (select from shardids.shard s where s.id = enter_shard.shard) then
    for stranger in select * from shardids.strangers_objects(array[schema]::name[], owner) loop
      raise insufficient_privilege using message = stranger.message, hint = stranger.fix;
    end loop;
  end if;
  perform set_config('shardids.shard', shard::text, true);
end
$$;

comment on function shardids.enter_shard(integer) is
  'Makes a shard''s schema if missing and names it in shardids.shard until the end of the transaction';
