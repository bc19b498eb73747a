--
-- PostgreSQL database dump
--


-- Dumped from database version 18.6
-- Dumped by pg_dump version 18.6

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Name: shard_0000; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA shard_0000;


--
-- Name: shard_0001; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA shard_0001;


--
-- Name: shardids; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA shardids;


--
-- Name: SCHEMA shardids; Type: COMMENT; Schema: -; Owner: -
--

COMMENT ON SCHEMA shardids IS 'shardids: the ID generator of this database''s shards';


--
-- Name: shardids_catalog; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA shardids_catalog;


--
-- Name: shardids_ref; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA shardids_ref;


--
-- Name: SCHEMA shardids_ref; Type: COMMENT; Schema: -; Owner: -
--

COMMENT ON SCHEMA shardids_ref IS 'Reference tables: the same rows on every node, written to on one of them';


--
-- Name: late_id_0(regclass); Type: FUNCTION; Schema: shard_0000; Owner: -
--

CREATE FUNCTION shard_0000.late_id_0(id_offset regclass) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$begin return shardids.late_id(id_offset, 0); end$$;


--
-- Name: FUNCTION late_id_0(id_offset regclass); Type: COMMENT; Schema: shard_0000; Owner: -
--

COMMENT ON FUNCTION shard_0000.late_id_0(id_offset regclass) IS 'What next_id() calls where the clock has gone ahead';


--
-- Name: current_id(bigint, regclass, regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.current_id(seen bigint, counter regclass, id_offset regclass, shard integer) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
begin
  return case when shardids.is_current(seen, pg_catalog.nextval(counter))
              then case when shardids.is_unchanged(seen, id_offset)
                   then shardids.drawn_id(seen, pg_catalog.currval(counter), pg_catalog.currval(counter), shard) end end;
end
$$;


--
-- Name: FUNCTION current_id(seen bigint, counter regclass, id_offset regclass, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.current_id(seen bigint, counter regclass, id_offset regclass, shard integer) IS 'Draws an ID, or null if the shard is not at the clock; call it as the shard''s own next_id()';


--
-- Name: lagging_id(regclass, regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.lagging_id(counter regclass, id_offset regclass, shard integer) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
declare
  -- Whoever finds the lock taken draws up to 100 ms behind the clock, and does not wait. Not so from sequences that were
  -- restored beside the shard's: null, and late_id() refuses.
  seen constant bigint := case when shardids.catch_up(pg_catalog.pg_sequence_last_value(id_offset), counter, id_offset, shard) is false
                               then pg_catalog.pg_sequence_last_value(id_offset) end;
  id constant bigint := case when shardids.is_nearly_current(seen, pg_catalog.nextval(counter))
                             then case when shardids.is_unchanged(seen, id_offset)
                                  then shardids.drawn_id(seen, pg_catalog.currval(counter), pg_catalog.currval(counter), shard) end end;
begin
  if id is not null then
    return id;
  end if;
  -- More than a minute ahead, after the clock stepped back for example. The draw passes where advance() would change
  -- nothing: its lock is for those who change the offset, and that nobody did is seen below as on the usual path.
  if shardids.is_ahead(seen, pg_catalog.currval(counter), '10 years') then
    perform from shardids.node n, shardids.shard s
    where s.id operator(pg_catalog.=) lagging_id.shard and s.id_offset operator(pg_catalog.=) lagging_id.id_offset
      and shardids.is_ahead(seen, pg_catalog.currval(counter), n.max_ahead);
    if found and shardids.is_unchanged(seen, id_offset) then
      return shardids.drawn_id(seen, pg_catalog.currval(counter), pg_catalog.currval(counter), shard);
    end if;
  end if;
  -- Older servers raise this themselves. Null is also what was never set: in a copy without rows, for example.
  if seen is null and not pg_catalog.has_sequence_privilege(id_offset, 'select') then
    raise insufficient_privilege using message = pg_catalog.format('permission denied for sequence %s', id_offset);
  end if;
  return null;
end
$$;


--
-- Name: FUNCTION lagging_id(counter regclass, id_offset regclass, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.lagging_id(counter regclass, id_offset regclass, shard integer) IS 'Brings a shard that lags to the clock and draws an ID, or null if late_id() has to; what a shard''s next_id() calls';


--
-- Name: id_counter; Type: SEQUENCE; Schema: shard_0000; Owner: -
--

CREATE SEQUENCE shard_0000.id_counter
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: id_offset; Type: SEQUENCE; Schema: shard_0000; Owner: -
--

CREATE SEQUENCE shard_0000.id_offset
    START WITH 74113955659776
    INCREMENT BY 16
    MINVALUE -9223372036854775808
    NO MAXVALUE
    CACHE 1;


--
-- Name: next_id(); Type: FUNCTION; Schema: shard_0000; Owner: -
--

CREATE FUNCTION shard_0000.next_id() RETURNS bigint
    LANGUAGE sql
    RETURN COALESCE(shardids.current_id(pg_sequence_last_value('shard_0000.id_offset'::regclass), 'shard_0000.id_counter'::regclass, 'shard_0000.id_offset'::regclass, 0), shardids.lagging_id('shard_0000.id_counter'::regclass, 'shard_0000.id_offset'::regclass, 0), shard_0000.late_id_0('shard_0000.id_offset'::regclass));


--
-- Name: FUNCTION next_id(); Type: COMMENT; Schema: shard_0000; Owner: -
--

COMMENT ON FUNCTION shard_0000.next_id() IS 'The next ID of shard 0';


--
-- Name: set_aside_0(regclass, integer, bigint); Type: FUNCTION; Schema: shard_0000; Owner: -
--

CREATE FUNCTION shard_0000.set_aside_0(id_offset regclass, n integer, past_tick bigint DEFAULT NULL::bigint, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$begin select r.first_tick, r.last_tick into first_tick, last_tick from shardids.set_aside(id_offset, 0, n, past_tick) r; end$$;


--
-- Name: FUNCTION set_aside_0(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shard_0000; Owner: -
--

COMMENT ON FUNCTION shard_0000.set_aside_0(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) IS 'What next_ids(n), shardids.reserve() and shardids.advance_past() call';


--
-- Name: sequence_bits(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.sequence_bits() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN 10;


--
-- Name: FUNCTION sequence_bits(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.sequence_bits() IS 'Width of an ID''s sequence field';


--
-- Name: shard_bits(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_bits() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN 12;


--
-- Name: FUNCTION shard_bits(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_bits() IS 'Width of an ID''s shard field';


--
-- Name: id_of(bigint, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.id_of(tick bigint, shard integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (((((tick >> shardids.sequence_bits()) << shardids.shard_bits()) + shard) << shardids.sequence_bits()) + (tick & (((1)::bigint << shardids.sequence_bits()) - 1)));


--
-- Name: FUNCTION id_of(tick bigint, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.id_of(tick bigint, shard integer) IS 'The ID of a tick in a shard';


--
-- Name: next_ids(integer); Type: FUNCTION; Schema: shard_0000; Owner: -
--

CREATE FUNCTION shard_0000.next_ids(n integer) RETURNS SETOF bigint
    LANGUAGE sql
    BEGIN ATOMIC
 SELECT shard_0000.next_id() AS id
    FROM generate_series(1, next_ids.n) generate_series(generate_series)
   WHERE ((next_ids.n >= 1) AND (next_ids.n <= 63))
 UNION ALL
  SELECT shardids.id_of(generate_series(r.first_tick, r.last_tick), 0) AS id_of
    FROM shard_0000.set_aside_0('shard_0000.id_offset'::regclass, next_ids.n) r(first_tick, last_tick)
   WHERE (((next_ids.n >= 1) AND (next_ids.n <= 63)) IS NOT TRUE);
END;


--
-- Name: FUNCTION next_ids(n integer); Type: COMMENT; Schema: shard_0000; Owner: -
--

COMMENT ON FUNCTION shard_0000.next_ids(n integer) IS 'The next n IDs of shard 0, in order';


--
-- Name: late_id_1(regclass); Type: FUNCTION; Schema: shard_0001; Owner: -
--

CREATE FUNCTION shard_0001.late_id_1(id_offset regclass) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$begin return shardids.late_id(id_offset, 1); end$$;


--
-- Name: FUNCTION late_id_1(id_offset regclass); Type: COMMENT; Schema: shard_0001; Owner: -
--

COMMENT ON FUNCTION shard_0001.late_id_1(id_offset regclass) IS 'What next_id() calls where the clock has gone ahead';


--
-- Name: id_counter; Type: SEQUENCE; Schema: shard_0001; Owner: -
--

CREATE SEQUENCE shard_0001.id_counter
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: id_offset; Type: SEQUENCE; Schema: shard_0001; Owner: -
--

CREATE SEQUENCE shard_0001.id_offset
    START WITH 74169790234625
    INCREMENT BY 16
    MINVALUE -9223372036854775808
    NO MAXVALUE
    CACHE 1;


--
-- Name: next_id(); Type: FUNCTION; Schema: shard_0001; Owner: -
--

CREATE FUNCTION shard_0001.next_id() RETURNS bigint
    LANGUAGE sql
    RETURN COALESCE(shardids.current_id(pg_sequence_last_value('shard_0001.id_offset'::regclass), 'shard_0001.id_counter'::regclass, 'shard_0001.id_offset'::regclass, 1), shardids.lagging_id('shard_0001.id_counter'::regclass, 'shard_0001.id_offset'::regclass, 1), shard_0001.late_id_1('shard_0001.id_offset'::regclass));


--
-- Name: FUNCTION next_id(); Type: COMMENT; Schema: shard_0001; Owner: -
--

COMMENT ON FUNCTION shard_0001.next_id() IS 'The next ID of shard 1';


--
-- Name: set_aside_1(regclass, integer, bigint); Type: FUNCTION; Schema: shard_0001; Owner: -
--

CREATE FUNCTION shard_0001.set_aside_1(id_offset regclass, n integer, past_tick bigint DEFAULT NULL::bigint, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$begin select r.first_tick, r.last_tick into first_tick, last_tick from shardids.set_aside(id_offset, 1, n, past_tick) r; end$$;


--
-- Name: FUNCTION set_aside_1(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shard_0001; Owner: -
--

COMMENT ON FUNCTION shard_0001.set_aside_1(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) IS 'What next_ids(n), shardids.reserve() and shardids.advance_past() call';


--
-- Name: next_ids(integer); Type: FUNCTION; Schema: shard_0001; Owner: -
--

CREATE FUNCTION shard_0001.next_ids(n integer) RETURNS SETOF bigint
    LANGUAGE sql
    BEGIN ATOMIC
 SELECT shard_0001.next_id() AS id
    FROM generate_series(1, next_ids.n) generate_series(generate_series)
   WHERE ((next_ids.n >= 1) AND (next_ids.n <= 63))
 UNION ALL
  SELECT shardids.id_of(generate_series(r.first_tick, r.last_tick), 1) AS id_of
    FROM shard_0001.set_aside_1('shard_0001.id_offset'::regclass, next_ids.n) r(first_tick, last_tick)
   WHERE (((next_ids.n >= 1) AND (next_ids.n <= 63)) IS NOT TRUE);
END;


--
-- Name: FUNCTION next_ids(n integer); Type: COMMENT; Schema: shard_0001; Owner: -
--

COMMENT ON FUNCTION shard_0001.next_ids(n integer) IS 'The next n IDs of shard 1, in order';


--
-- Name: activate(integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.activate(shard integer, above_tick bigint DEFAULT '-1'::integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION activate(shard integer, above_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.activate(shard integer, above_tick bigint) IS 'Lets a shard issue IDs on this server, all above its high-water tick and above_tick';


--
-- Name: add_barrier(integer, regclass, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.add_barrier(shard integer, name regclass, replicated boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION add_barrier(shard integer, name regclass, replicated boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.add_barrier(shard integer, name regclass, replicated boolean) IS 'Lets INSERT, UPDATE, DELETE, TRUNCATE and COPY pass on a table of a shard only while the shard issues IDs';


--
-- Name: tables_of(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.tables_of(shard integer) RETURNS regclass[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return array(
    select c.oid::regclass from pg_class c
    where c.relnamespace = to_regnamespace(shardids.schema_of(shard)) and c.relkind in ('r', 'p')
    order by c.relname);
end
$$;


--
-- Name: FUNCTION tables_of(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.tables_of(shard integer) IS 'The tables of a shard, partitions and partitioned ones included';


--
-- Name: without_barrier(integer, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.without_barrier(shard integer, replicated boolean) RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 SELECT name.name
    FROM unnest(shardids.tables_of(without_barrier.shard)) name(name)
   WHERE (NOT (EXISTS ( SELECT
            FROM pg_trigger t
           WHERE ((t.tgrelid = (name.name)::oid) AND (t.tgname = 'shardids_barrier'::name) AND ((t.tgenabled = 'A'::"char") OR (NOT without_barrier.replicated))))));
END;


--
-- Name: FUNCTION without_barrier(shard integer, replicated boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.without_barrier(shard integer, replicated boolean) IS 'The tables of a shard without a write barrier, or with one that was disabled';


--
-- Name: add_barriers(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.add_barriers(shard integer) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 SELECT shardids.add_barrier(add_barriers.shard, name.name, false) AS add_barrier
    FROM shardids.without_barrier(add_barriers.shard, false) name(name);
END;


--
-- Name: FUNCTION add_barriers(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.add_barriers(shard integer) IS 'Adds the write barriers of a shard that is being moved here';


--
-- Name: add_route(regclass, name, integer, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.add_route(part regclass, route name, shard integer, adoption text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_attribute a where a.attrelid = part and a.attname = route and not a.attisdropped) then
    execute format('alter table %s add column %I integer default %L::integer', part, route, shard);
    execute format('comment on column %s.%I is %L', part, route, adoption);
  end if;
end
$$;


--
-- Name: FUNCTION add_route(part regclass, route name, shard integer, adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.add_route(part regclass, route name, shard integer, adoption text) IS 'Gives a table of a shard the column by which rows without a key arrive';


--
-- Name: advance(integer, regclass, bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.advance(shard integer, id_offset regclass, ticks bigint DEFAULT 0, past_tick bigint DEFAULT '-1'::integer, OUT seen bigint, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_variable
declare
  this shardids.shard;
  node shardids.node;
  base bigint := shardids.offset_base();
  bits constant integer := shardids.sequence_bits();
  limit_ms constant bigint := 1::bigint << shardids.time_bits();
  now_ms bigint;
  -- In ms, less what the counter adds: the offset that is there, that of the clock, and the one to be stored.
  offset_ms bigint;
  clock_ms bigint;
  target_ms bigint;
  margin_ms bigint;
  begins_ms bigint;
  c1 bigint;
  spare_ticks bigint;
  wait_ms bigint;
  waited_ms bigint := 0;
  reason text;
  is_new boolean;
  is_promoted boolean;
  is_logged boolean;
  is_limited boolean;
begin
  select n.* into node from shardids.node n;
  margin_ms := extract(epoch from node.safety_margin) * 1000;
  loop
    spare_ticks := 0;
    wait_ms := 0;
    is_new := false;
    is_logged := true;
    begin
      if not pg_try_advisory_xact_lock(1936220516, shard) then
        perform shardids.wait_for_lock(1936220516, shard);
      end if;
      -- With the lock held: the row is no older than what the others under the lock went by.
      select s.* into this from shardids.shard s where s.id = advance.shard;
      reason := case
        when this.id is null then 'SI001'
        when this.id_offset <> id_offset then 'SI004'
        when this.state = 'active' and this.server <> shardids.server() and node.on_copy = 'refuse' then 'SI004'
        when (ticks between 0 and node.max_reserve) is not true then 'SI007'
        when this.state <> 'active' then 'SI002'
        end;
      if reason is not null then
        perform shardids.refuse(reason, shard, ticks);
      end if;
      seen := coalesce(pg_sequence_last_value(this.id_offset), -1);
      -- Null before the first draw.
      c1 := coalesce(pg_sequence_last_value(this.id_counter), 0);
      now_ms := floor(date_part('epoch', clock_timestamp()) * 1000)::bigint - shardids.epoch_ms();
      clock_ms := now_ms - (c1 >> bits);
      offset_ms := shardids.offset_ms(seen);
      if seen < 0 or seen - offset_ms <> base then
        if this.changed_in = pg_current_xact_id_if_assigned() or (seen < 0 and this.unfences is distinct from seen) then
          perform shardids.refuse('SI002', shard);
        end if;
        perform shardids.check_sequences(shard, this.id_counter, this.id_offset);
        -- This session may have computed its own when the owner had other rights, or before a promotion.
        base := shardids.incarnation();
        is_logged := false;
        -- An activation may have been released, and the release lost in a crash since.
        is_new := case when seen < 0 then this.incarnation is distinct from base
                       else not shardids.is_marked(seen, base) end;
        is_promoted := this.server <> shardids.server()
          or shardids.is_of_another_timeline(case when seen < 0 then this.incarnation else seen end, base);
        if this.server <> shardids.server() then
          raise warning 'shardids: shard % of node "%" is a copy that was not activated, and issues IDs', shard, node.name
            using hint = format('If the original still issues IDs, some will be issued twice. Otherwise: shardids shard activate %s', shard);
        end if;
      end if;
      target_ms := greatest(offset_ms + (seen < 0)::integer,
                            ((greatest(this.high_water_tick, past_tick) - c1) >> bits) + 1);
      begins_ms := greatest(offset_ms, ((this.high_water_tick - c1) >> bits)) + (c1 >> bits);
      if is_new then
        target_ms := shardids.begin_ms(target_ms, clock_ms, margin_ms, base, is_promoted);
        wait_ms := shardids.wait_ms(target_ms, clock_ms, margin_ms, is_promoted);
      else
        target_ms := greatest(target_ms, clock_ms);
      end if;
      if seen < 0 or is_new then
        offset_ms := target_ms;
      end if;
      is_limited := exists (select from shardids.skipped k where k.shard = advance.shard);
      if not is_limited and (pg_sequence_parameters(this.id_offset)).start_value = 0 then
        raise serialization_failure using
          message = format('shard %s has ticks to pass over that this transaction is too old to see [node "%s"]', shard, node.name),
          hint = 'Run the transaction again.';
      end if;
      while wait_ms = 0 loop
        c1 := coalesce(pg_sequence_last_value(this.id_counter), 0);
        if ticks > 0 then
          target_ms := greatest(target_ms, offset_ms + ((ticks + spare_ticks) >> bits) + 1);
        end if;
        if is_limited then
          target_ms := shardids.past_skipped(shard, target_ms + (c1 >> bits), ticks) - (c1 >> bits);
        end if;
        if now_ms >= limit_ms or target_ms + (c1 >> bits) >= limit_ms then
          perform shardids.refuse('SI006', shard);
        elsif target_ms + (c1 >> bits) - now_ms > extract(epoch from node.max_ahead) * 1000 then
          perform shardids.refuse('SI005', shard, target_ms + (c1 >> bits) - now_ms);
        elsif begins_ms > 0 and now_ms - begins_ms > 3600000 then
          if now_ms - begins_ms > extract(epoch from node.max_step) * 1000 and not shardids.is_believed(now_ms) then
            perform shardids.refuse('SI012', shard, now_ms - begins_ms);
          end if;
          -- What is set aside lies before the clock.
          perform shardids.note_step(now_ms - (ticks >> bits) - 1, begins_ms);
        end if;
        if base + target_ms <> seen then
          -- Past half the margin ahead of the clock, nobody draws before this offset, or one an eighth of the margin
          -- below it, is on disk.
          if (target_ms + (c1 >> bits) - now_ms) * 2 > margin_ms
             and not (is_logged and target_ms * 8 / margin_ms = (seen & 4398046511103) * 8 / margin_ms) then
            perform shardids.log_offset(this.id_offset, base, target_ms);
          end if;
          seen := setval(this.id_offset, base + target_ms);
          is_logged := true;
        end if;
        exit when ticks = 0;
        first_tick := (offset_ms << bits) + coalesce(pg_sequence_last_value(this.id_counter), 0) + 1;
        last_tick := (target_ms << bits) + c1;
        exit when last_tick - first_tick >= ticks - 1;
        -- Others drew more than the spare meanwhile. What was set aside may be partly theirs: begin again from
        -- the offset that they see now.
        offset_ms := target_ms;
        spare_ticks := (spare_ticks + 1024) * 4;
      end loop;
      raise exception using errcode = 'SI099';
    exception
      when sqlstate 'SI099' then
        -- The latest of what is ours: after a pause most of it lies in the past.
        first_tick := last_tick - ticks + 1;
    end;
    exit when wait_ms = 0;
    if waited_ms >= 10000 then
      perform shardids.refuse('restarted', shard, wait_ms);
    end if;
    perform pg_sleep(least(wait_ms, 500) / 1000.0);
    waited_ms := waited_ms + least(wait_ms, 500);
  end loop;
end
$$;


--
-- Name: FUNCTION advance(shard integer, id_offset regclass, ticks bigint, past_tick bigint, OUT seen bigint, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.advance(shard integer, id_offset regclass, ticks bigint, past_tick bigint, OUT seen bigint, OUT first_tick bigint, OUT last_tick bigint) IS 'Raises a shard''s offset to the clock and past a tick, and by as many ticks as are to be set aside';


--
-- Name: advance_past(integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.advance_past(shard integer, id bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  counter regclass;
  id_offset regclass;
  schema regnamespace;
  node shardids.node;
  past_tick constant bigint := shardids.tick_before(id, shard);
  ahead_ms bigint;
begin
  select s.id_counter, s.id_offset into counter, id_offset from shardids.shard s where s.id = advance_past.shard;
  if counter is null then
    perform shardids.refuse('SI001', shard);
  elsif past_tick is null then
    raise exception using
      errcode = 'SI007',
      message = format('shard %s can''t go past %s, which is no ID of this layout [node "%s"]', shard, coalesce(id::text, 'null'),
                       (select n.name from shardids.node n)),
      hint = 'Pass an ID that a shard of this cluster has issued.';
  elsif shardids.is_past(pg_sequence_last_value(id_offset), pg_sequence_last_value(counter), past_tick) then
    return false;
  end if;
  select n.* into node from shardids.node n;
  ahead_ms := (shardids.tick_of(id) >> shardids.sequence_bits()) - shardids.ms_of(clock_timestamp());
  if ahead_ms > shardids.max_past_ms() then
    -- An ID of a clock that was wrong: its own shard passes over it when its time comes.
    if exists (select from shardids.skipped k
               where k.shard = shardids.shard_of(id) and shardids.tick_of(id) between k.first_tick and k.last_tick) then
      return false;
    end if;
    raise exception using
      errcode = 'SI005',
      message = format('shard %s can''t go past ID %s, which is %s ms ahead of the clock; the limit is max_past = %s [node "%s"]',
                       shard, id, ahead_ms, make_interval(secs => shardids.max_past_ms() / 1000), node.name),
      hint = 'Is it an ID of this cluster? Then set the clocks of both servers right, or raise shardids.node.max_past.';
  end if;
  select c.relnamespace into schema from pg_class c where c.oid = id_offset;
  if schema is null then
    perform shardids.refuse('SI004', shard);
  end if;
  execute format('select from %s.set_aside_%s($1, 0, $2)', schema, shard) using id_offset, past_tick;
  return true;
end
$_$;


--
-- Name: FUNCTION advance_past(shard integer, id bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.advance_past(shard integer, id bigint) IS 'Lets a shard issue no ID from now on that sorts before this one; whether it had to be raised';


--
-- Name: analyze(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids."analyze"(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION "analyze"(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids."analyze"(shard integer) IS 'Fills materialized views of a shard, and gathers statistics of its tables';


--
-- Name: await_references(name[], pg_lsn, double precision); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.await_references(slots name[], wanted pg_lsn, patience_s double precision) RETURNS SETOF name
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION await_references(slots name[], wanted pg_lsn, patience_s double precision); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.await_references(slots name[], wanted pg_lsn, patience_s double precision) IS 'Waits until the followers of the slots have a position of the log on disk; returns those that have not in time';


--
-- Name: database(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.database() RETURNS oid
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (SELECT d.oid FROM pg_database d WHERE (d.datname = current_database()));


--
-- Name: FUNCTION database(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.database() IS 'The OID of this database';


--
-- Name: schema_prefix(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.schema_prefix() RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN 'shard_'::text;


--
-- Name: FUNCTION schema_prefix(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.schema_prefix() IS 'What a shard''s schema name starts with';


--
-- Name: schema_of(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.schema_of(shard integer) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (shardids.schema_prefix() || lpad((shard)::text, GREATEST(4, length((shard)::text)), '0'::text));


--
-- Name: FUNCTION schema_of(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.schema_of(shard integer) IS 'Name of the schema of a logical shard';


--
-- Name: barrier_holders(integer, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.barrier_holders(shard integer, waiting boolean) RETURNS TABLE(pid integer, holder text, seconds integer)
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 WITH held AS MATERIALIZED (
          SELECT l.locktype,
             l.database,
             l.relation,
             l.page,
             l.tuple,
             l.virtualxid,
             l.transactionid,
             l.classid,
             l.objid,
             l.objsubid,
             l.virtualtransaction,
             l.pid,
             l.mode,
             l.granted,
             l.fastpath,
             l.waitstart,
             c.relnamespace,
             c.relkind
            FROM (pg_locks l
              LEFT JOIN pg_class c ON (((l.locktype = 'relation'::text) AND (l.database = shardids.database()) AND (c.oid = l.relation))))
           WHERE (l.granted AND (l.pid IS DISTINCT FROM pg_backend_pid()))
         ), writer AS (
          SELECT h.pid,
             array_agg((h.transactionid)::text) AS xids,
             bool_or(((h.database = shardids.database()) AND
                 CASE h.locktype
                     WHEN 'advisory'::text THEN (barrier_holders.waiting AND (h.classid = (1936220521)::oid) AND (h.objid = (barrier_holders.shard)::oid) AND (h.objsubid = 2))
                     WHEN 'object'::text THEN ((h.classid = ('pg_namespace'::regclass)::oid) AND (h.objid = n.oid))
                     WHEN 'relation'::text THEN ((h.relnamespace = n.oid) AND (h.mode <> ALL (ARRAY['AccessShareLock'::text, 'RowShareLock'::text])) AND (barrier_holders.waiting OR (h.mode <> 'RowExclusiveLock'::text)))
                     ELSE false
                 END)) AS is_here,
             bool_or((h.locktype = 'transactionid'::text)) AS has_written,
             bool_or(((h.locktype = 'relation'::text) AND (h.mode <> ALL (ARRAY['AccessShareLock'::text, 'RowShareLock'::text])) AND ((h.relation >= (16384)::oid) OR (h.database IS DISTINCT FROM shardids.database())))) AS has_table
            FROM held h,
             pg_namespace n
           WHERE (n.oid = (to_regnamespace(shardids.schema_of(barrier_holders.shard)))::oid)
           GROUP BY h.pid, h.virtualtransaction
         )
  SELECT w.pid,
         CASE
             WHEN (w.pid IS NULL) THEN format('prepared transaction %L'::text, p.gid)
             ELSE format('process %s of %s'::text, a.pid, a.usename)
         END AS format,
     (EXTRACT(epoch FROM (clock_timestamp() - COALESCE(a.xact_start, p.prepared))))::integer AS "extract"
    FROM ((writer w
      LEFT JOIN pg_stat_activity a ON ((a.pid = w.pid)))
      LEFT JOIN pg_prepared_xacts p ON (((w.pid IS NULL) AND ((p.transaction)::text = ANY (w.xids)))))
   WHERE ((COALESCE(a.datname, p.database) = current_database()) AND (w.is_here OR (w.has_written AND (NOT w.has_table))) AND (COALESCE(a.backend_type, 'client backend'::text) = 'client backend'::text) AND (NOT (EXISTS ( SELECT
            FROM pg_stat_progress_vacuum v
           WHERE (v.pid = w.pid)))) AND (NOT (EXISTS ( SELECT
            FROM pg_stat_progress_analyze v
           WHERE (v.pid = w.pid)))))
   ORDER BY COALESCE(a.xact_start, p.prepared);
END;


--
-- Name: FUNCTION barrier_holders(shard integer, waiting boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.barrier_holders(shard integer, waiting boolean) IS 'Who writes to a shard, or changes its schema, although or because its write barrier is open';


--
-- Name: begin_ms(bigint, bigint, bigint, bigint, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.begin_ms(stored_ms bigint, clock_ms bigint, margin_ms bigint, base bigint, is_promoted boolean) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN GREATEST((clock_ms + (margin_ms * CASE WHEN is_promoted THEN 4 ELSE 1 END)), ((stored_ms + margin_ms) + CASE WHEN (stored_ms > clock_ms) THEN ((margin_ms * ((base >> 42) & (524287)::bigint)) >> 19) ELSE (0)::bigint END));


--
-- Name: bind(integer, regclass, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.bind(shard integer, id_counter regclass, id_offset regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '50ms'
    AS $$
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


--
-- Name: FUNCTION bind(shard integer, id_counter regclass, id_offset regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.bind(shard integer, id_counter regclass, id_offset regclass) IS 'Makes a shard''s id_offset name its counter and its shard, so that draws follow the clock without looking at rows';


--
-- Name: bound_to(regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.bound_to(counter regclass, shard integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((((counter)::oid)::bigint << 32) + shard);


--
-- Name: catch_up(bigint, regclass, regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.catch_up(seen bigint, counter regclass, id_offset regclass, shard integer) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    AS $$
declare
  target bigint;
  raised bigint;
  is_locked boolean;
begin
  -- Any session can set such a name: the node knows.
  if pg_catalog.current_setting('citus.version', true) is not null and exists (select from shardids.node n where n.engine operator(pg_catalog.=) 'citus') then
    return shardids.catch_up_on_citus(seen, counter, id_offset, shard);
  end if;
  begin
    target := shardids.clock_offset(counter);
    is_locked := case when shardids.is_late(seen, target)
                      then case when case when shardids.is_near(seen, target)
                                     then shardids.is_bound(counter, id_offset, shard) end
                                  or shardids.is_followed(counter, id_offset, shard, seen, target)
                           then pg_catalog.pg_try_advisory_lock(1936220516, shard) end
                      else false end;
    if is_locked then
      -- Nobody else changes it now.
      raised := pg_catalog.pg_sequence_last_value(id_offset);
      while shardids.is_late(raised, target) loop
        raised := shardids.raised(raised, target, id_offset);
      end loop;
      is_locked := not pg_catalog.pg_advisory_unlock(1936220516, shard);
    end if;
    return is_locked;
  exception when query_canceled or assert_failure or others then
    if is_locked then
      perform pg_catalog.pg_advisory_unlock(1936220516, shard);
    end if;
    raise;
  end;
end
$$;


--
-- Name: FUNCTION catch_up(seen bigint, counter regclass, id_offset regclass, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.catch_up(seen bigint, counter regclass, id_offset regclass, shard integer) IS 'Brings a shard that lags to the clock, if it belongs to this incarnation of the server';


--
-- Name: catch_up_on_citus(bigint, regclass, regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
declare
  target constant bigint := shardids.clock_offset(counter);
  raised bigint := seen;
begin
  if not shardids.is_late(seen, target) then
    return false;
  elsif not coalesce(case when shardids.is_near(seen, target) then shardids.is_bound(counter, id_offset, shard) end, false)
        and not shardids.is_followed(counter, id_offset, shard, seen, target) then
    return null;
  end if;
  while shardids.is_late(raised, target) loop
    raised := case when pg_catalog.pg_try_advisory_lock(1936220516, shard)
                   then coalesce(case when pg_catalog.pg_sequence_last_value(id_offset) operator(pg_catalog.=) raised
                                      then shardids.raised(raised, target, id_offset) end,
                                 pg_catalog.pg_sequence_last_value(id_offset))
                        operator(pg_catalog.+) case when pg_catalog.pg_advisory_unlock(1936220516, shard) then 0 end
                   end;
  end loop;
  return false;
end
$$;


--
-- Name: FUNCTION catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer) IS 'What catch_up() does on a server with Citus, without a subtransaction; for catch_up() only';


--
-- Name: check_sequences(integer, regclass, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.check_sequences(shard integer, counter regclass, id_offset regclass) RETURNS void
    LANGUAGE plpgsql STABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  changed record;
begin
  select q.sequence, q.increment into changed
  from (values (counter, 1), (id_offset, 16)) q (sequence, increment)
  cross join lateral pg_sequence_parameters(q.sequence) p
  where (p.increment, p.cache_size, p.cycle_option) <> (q.increment::bigint, 1::bigint, false);
  if found then
    raise exception using
      errcode = 'SI004',
      message = format('shard %s can''t issue IDs: sequence %s was altered [node "%s"]', shard, changed.sequence,
                       (select n.name from shardids.node n)),
      hint = format('alter sequence %s increment %s cache 1 no cycle; reconnect the sessions that draw from it', changed.sequence, changed.increment);
  end if;
end
$$;


--
-- Name: epoch_ms(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.epoch_ms() RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN '1704067200000'::bigint;


--
-- Name: FUNCTION epoch_ms(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.epoch_ms() IS 'Milliseconds from 1970 to the time that an ID calls 0';


--
-- Name: ms_of(timestamp with time zone); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.ms_of(at timestamp with time zone) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((floor((EXTRACT(epoch FROM at) * (1000)::numeric)))::bigint - shardids.epoch_ms());


--
-- Name: FUNCTION ms_of(at timestamp with time zone); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.ms_of(at timestamp with time zone) IS 'Milliseconds since the layout''s epoch, rounded down';


--
-- Name: time_bits(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.time_bits() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN 41;


--
-- Name: FUNCTION time_bits(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.time_bits() IS 'Width of an ID''s time field';


--
-- Name: clamped_ms(timestamp with time zone); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.clamped_ms(at timestamp with time zone) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (at IS NOT NULL) THEN GREATEST((0)::bigint, LEAST(shardids.ms_of(at), (((1)::bigint << shardids.time_bits()) - 1))) ELSE NULL::bigint END;


--
-- Name: FUNCTION clamped_ms(at timestamp with time zone); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.clamped_ms(at timestamp with time zone) IS 'Milliseconds since the layout''s epoch, within the layout''s time';


--
-- Name: offset_base(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.offset_base() RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return shardids.incarnation();
end
$$;


--
-- Name: FUNCTION offset_base(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.offset_base() IS 'shardids.incarnation() when the session first asked';


--
-- Name: clock_offset(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.clock_offset(counter regclass) RETURNS bigint
    LANGUAGE sql PARALLEL SAFE
    RETURN (((floor(LEAST((date_part('epoch'::text, clock_timestamp()) * (1000)::double precision), (((shardids.epoch_ms() + ((1)::bigint << shardids.time_bits())) - 17))::double precision)))::bigint - (shardids.epoch_ms() - shardids.offset_base())) - (pg_sequence_last_value(counter) >> shardids.sequence_bits()));


--
-- Name: close_back(regclass, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.close_back(name regclass, message text, hint text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  execute format('create or replace trigger shardids_adoption before insert or update or delete or truncate on %s '
                 'for each statement execute function shardids.refuse_with(%L, %L)', name, message, hint);
end
$$;


--
-- Name: FUNCTION close_back(name regclass, message text, hint text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.close_back(name regclass, message text, hint text) IS 'Keeps clients from writing to a table; open_table undoes it';


--
-- Name: close_table(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.close_table(name regclass) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from pg_trigger t where t.tgrelid = name and t.tgname = 'shardids_adoption') then
    return false;
  end if;
  execute format('create trigger shardids_adoption before insert or update or delete or truncate on %s '
                 'for each statement execute function shardids.refuse_writes()', name);
  return true;
end
$$;


--
-- Name: FUNCTION close_table(name regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.close_table(name regclass) IS 'Adds the barrier of refuse_writes to a table; false if it has one';


--
-- Name: counter_changes(integer, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.counter_changes(shard integer, tenant text DEFAULT NULL::text) RETURNS TABLE(of_tenant text, of_kind text, period date, changed_at timestamp with time zone, changed_by text, highest_before bigint, next_number bigint, reason text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  if to_regclass(format('%I.shardids_counter_change', shardids.schema_of(shard))) is not null then
    return query execute format(
      'select c.tenant, c.kind, c.period, c.changed_at, c.changed_by, c.highest_before, c.next_number, c.reason '
      'from %I.shardids_counter_change c where $1 is null or c.tenant = $1 order by c.changed_at', shardids.schema_of(shard))
    using tenant;
  end if;
end
$_$;


--
-- Name: FUNCTION counter_changes(shard integer, tenant text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.counter_changes(shard integer, tenant text) IS 'How counters of a shard were set by hand, when, by whom and why';


--
-- Name: counters(integer, text, text, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.counters(shard integer, tenant text DEFAULT NULL::text, kind text DEFAULT NULL::text, whole boolean DEFAULT true) RETURNS TABLE(of_tenant text, of_kind text, per text, period date, highest bigint)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  if to_regclass(format('%I.shardids_counter', shardids.schema_of(shard))) is not null then
    return query execute format(
      'select c.tenant, c.kind, k.per, c.period, max(c.next_number) - k.lanes '
      'from %1$I.shardids_counter c join %1$I.shardids_counter_kind k using (kind) '
      'where ($1 is null or c.tenant = $1) and ($2 is null or c.kind = $2) and ($3 or not exists ('
      'select from %1$I.shardids_counter l where l.tenant = c.tenant and l.kind = c.kind and l.period > c.period)) '
      'group by c.tenant, c.kind, c.period, k.per, k.lanes order by 1, 2, 4', shardids.schema_of(shard))
    using tenant, kind, whole;
  end if;
end
$_$;


--
-- Name: FUNCTION counters(shard integer, tenant text, kind text, whole boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.counters(shard integer, tenant text, kind text, whole boolean) IS 'The counters of a shard, and the highest number of each';


--
-- Name: create_counters(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.create_counters(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  schema constant text := shardids.schema_of(shard);
  owner constant name := (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids');
  name text;
  stranger record;
begin
  if not exists (select from shardids.shard s where s.id = create_counters.shard) then
    perform shardids.refuse('SI001', shard);
  end if;
  perform shardids.wait_for_lock(1936220517, shard);
  for stranger in select * from shardids.strangers_objects(array[schema]::name[], owner) loop
    raise insufficient_privilege using message = stranger.message, hint = stranger.fix;
  end loop;
  if to_regclass(format('%I.shardids_counter', schema)) is not null then
    return;
  end if;
  execute format(
    'create table %1$I.shardids_counter_kind ('
    'kind text collate "C" primary key, per text not null, zone text not null, prefix text not null, '
    'padding integer not null, lanes integer not null, keep_days integer not null, '
    'constraint shardids_counter_kind_per check (per in (''day'', ''month'', ''year'', ''never'')), '
    'constraint shardids_counter_kind_padding check (padding between 0 and 18), '
    'constraint shardids_counter_kind_lanes check (lanes between 1 and 1024), '
    'constraint shardids_counter_kind_keep_days check (keep_days between 1 and 100000))', schema);
  execute format(
    'create table %1$I.shardids_counter_zone (tenant text collate "C" primary key, zone text not null)', schema);
  -- A counter's rows are updated all the time: there is room for the new versions beside the old ones.
  execute format(
    'create table %1$I.shardids_counter ('
    'tenant text collate "C", kind text collate "C", period date, lane integer, next_number bigint not null, '
    'is_whole boolean not null default false, era bigint not null default 0, '
    'constraint shardids_counter_pkey primary key (tenant, kind, period, lane)) with (fillfactor = 50)', schema);
  execute format('create index shardids_counter_era on %I.shardids_counter (tenant, kind, period, era)', schema);
  execute format(
    'create table %1$I.shardids_counter_change ('
    'tenant text collate "C", kind text collate "C", changed_at timestamptz default clock_timestamp(), '
    'period date not null, highest_before bigint not null, next_number bigint not null, '
    'changed_by text not null default session_user, reason text not null, '
    'constraint shardids_counter_change_pkey primary key (tenant, kind, changed_at))', schema);
  execute format('comment on table %I.shardids_counter_kind is ''The kinds of numbers: when each begins again, and how it is written''', schema);
  execute format('comment on table %I.shardids_counter_zone is ''The time zones of tenants that have another than that of the kind''', schema);
  execute format('comment on table %I.shardids_counter is ''The next number of each lane of each counter''', schema);
  execute format('comment on column %I.shardids_counter.is_whole is ''Whether all lanes of the counter are begun; of a few it may not be known yet''', schema);
  execute format('comment on column %I.shardids_counter.era is ''Rises every eighth number of a lane: draws read rows of the last two, whatever versions of older ones are kept''', schema);
  execute format('comment on table %I.shardids_counter_change is ''Who has set a counter by hand, and why''', schema);
  execute replace(replace($create$
-- Where a lane has to be begun or waited for, or the transaction may hold some already.
create function {schema}.next_lane_number(of_tenant text, of_kind text, of_period date, lanes integer) returns bigint
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  begun integer;
  own integer;
  newest bigint;
  oldest bigint;
  drawn_lane integer;
  held record;
  number bigint;
begin
  select max(c.era) into newest
  from {schema}.shardids_counter c where c.tenant = of_tenant and c.kind = of_kind and c.period = of_period;
  select count(*), count(*) filter (where c.xmin = pg_current_xact_id()::xid) into begun, own
  from {schema}.shardids_counter c
  where c.tenant = of_tenant and c.kind = of_kind and c.period = of_period and c.era >= newest - 1;
  -- A transaction that draws many numbers leaves half of the lanes to the others; what it drew under savepoints is not counted.
  if begun < lanes and own < lanes / 2 then
    for drawn_lane in
      select l from generate_series(1, lanes) l
      where not exists (select from {schema}.shardids_counter c
                        where c.tenant = of_tenant and c.kind = of_kind and c.period = of_period and c.lane = l)
      order by l
    loop
      -- An INSERT would wait for another's of the same lane, until that commits.
      if pg_try_advisory_xact_lock(1936220540, hashtext(format('%s %s %s %L %L', {literal}, of_period, drawn_lane, of_kind, of_tenant))) then
        insert into {schema}.shardids_counter as c (tenant, kind, period, lane, next_number, era)
        values (of_tenant, of_kind, of_period, drawn_lane, drawn_lane + lanes, coalesce(newest, 0))
        on conflict do nothing returning c.lane into number;
        if number is not null then
          return number;
        end if;
      end if;
    end loop;
  end if;
  -- Lanes out of sight, too, before it waits. Two statements: the row may be locked in a version that the snapshot of the
  -- first has not, as after a concurrent draw.
  foreach oldest in array array[newest - 1, -1] loop
    select f.ctid, f.next_number into held from {schema}.shardids_counter f
    where f.tenant = of_tenant and f.kind = of_kind and f.period = of_period and f.era >= oldest
      and (own < lanes / 2 or f.xmin = pg_current_xact_id()::xid)
    order by f.next_number limit 1 for update skip locked;
    exit when held.ctid is not null;
  end loop;
  if held.ctid is not null then
    number := held.next_number;
    update {schema}.shardids_counter c
    set next_number = number + next_lane_number.lanes, is_whole = c.is_whole or begun = next_lane_number.lanes,
        era = greatest(c.era, newest - 1, (number + next_lane_number.lanes) / (8 * next_lane_number.lanes))
    where c.ctid = held.ctid;
  end if;
  if number is null then
    -- Others hold all lanes: it waits for one of them.
    drawn_lane := 1 + pg_backend_pid() % lanes;
    insert into {schema}.shardids_counter as c (tenant, kind, period, lane, next_number, era)
    values (of_tenant, of_kind, of_period, drawn_lane, drawn_lane + lanes, coalesce(newest, 0))
    on conflict (tenant, kind, period, lane) do update
    set next_number = c.next_number + next_lane_number.lanes, era = greatest(c.era, newest)
    returning c.next_number - next_lane_number.lanes into number;
  end if;
  return number;
end
$$;
create function {schema}.next_number(tenant text, kind text, moment timestamptz default statement_timestamp()) returns text
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  this record;
  of_tenant constant text := tenant;
  of_kind constant text := kind;
  now_in date;
  held record;
  number bigint;
begin
  select k.*, shardids.period_of(k.per, moment at time zone coalesce(z.zone, k.zone)) as period into this
  from {schema}.shardids_counter_kind k left join {schema}.shardids_counter_zone z on z.tenant = of_tenant
  where k.kind = of_kind;
  if this.kind is null or coalesce(of_tenant, '') = '' or moment is null then
    perform shardids.refuse_number({literal}, 'SI007',
      case when this.kind is null then format('there are no numbers of kind %L', of_kind)
           when moment is null then format('a number of kind %L needs a time', of_kind)
           else format('a number of kind %L needs a tenant', of_kind) end,
      'The kinds: shardids counter define --help');
  end if;
  now_in := this.period;
  if this.lanes = 1 then
    insert into {schema}.shardids_counter as c (tenant, kind, period, lane, next_number)
    values (of_tenant, of_kind, now_in, 1, 2)
    on conflict (tenant, kind, period, lane) do update set next_number = c.next_number + 1
    returning c.next_number - 1 into number;
  else
    -- A transaction that has written may hold lanes already.
    if pg_current_xact_id_if_assigned() is null then
      select f.ctid, f.next_number, f.is_whole into held from {schema}.shardids_counter f
      where f.tenant = of_tenant and f.kind = of_kind and f.period = now_in
        and f.era >= (select max(e.era) - 1 from {schema}.shardids_counter e
                      where e.tenant = of_tenant and e.kind = of_kind and e.period = now_in)
      order by f.next_number limit 1 for update skip locked;
      if held.is_whole then
        number := held.next_number;
        update {schema}.shardids_counter c
        set next_number = number + this.lanes, era = greatest(c.era, (number + this.lanes) / (8 * this.lanes))
        where c.ctid = held.ctid;
      end if;
    end if;
    if number is null then
      number := {schema}.next_lane_number(of_tenant, of_kind, now_in, this.lanes);
    end if;
    -- A lane that was held while others drew hundreds of numbers is out of their sight: one draw of some thousand brings it back.
    if (number + this.lanes) / this.lanes % 128 = 0 and (number + this.lanes) / this.lanes / 128 % this.lanes = number % this.lanes then
      update {schema}.shardids_counter c set era = (number + this.lanes) / (8 * this.lanes)
      where c.ctid = any (array(
        select f.ctid from {schema}.shardids_counter f
        where f.tenant = of_tenant and f.kind = of_kind and f.period = now_in
          and f.era < (number + this.lanes) / (8 * this.lanes) - 1
        for update skip locked));
    end if;
  end if;
  -- The first of a row: the period is new, or it was pruned, and would begin again.
  if number <= this.lanes then
    if exists (select from {schema}.shardids_counter c
               where c.tenant = of_tenant and c.kind = of_kind and c.period - this.keep_days > now_in) then
      perform shardids.refuse_number({literal}, 'SI007',
        format('the numbers of kind %L of tenant %L of %s are not kept any more', of_kind, of_tenant, now_in),
        format('They are kept for %s days before the newest. If a wrong clock has begun later periods, delete their rows of {schema}.shardids_counter, and set the present counter above its rows.', this.keep_days));
    end if;
    if now_in - this.keep_days > statement_timestamp()::date then
      perform shardids.refuse_number({literal}, 'SI007',
        format('a number of kind %L of tenant %L of %s is more than %s days ahead', of_kind, of_tenant, now_in, this.keep_days),
        'It would end the periods before it. Look at the time that was given.');
    end if;
    -- Kept before the newest of the others: one draw by a clock that is years ahead prunes nothing.
    delete from {schema}.shardids_counter c
    where c.tenant = of_tenant and c.kind = of_kind
      and c.period < (select max(o.period) from {schema}.shardids_counter o
                      where o.tenant = of_tenant and o.kind = of_kind and o.period < now_in) - this.keep_days;
  end if;
  if this.padding > 0 and length(number::text) > this.padding then
    perform shardids.refuse_number({literal}, 'SI011',
      format('number %s of kind %L of tenant %L needs more than %s digits', number, of_kind, of_tenant, this.padding),
      'Define the kind again, with more padding.');
  end if;
  return replace(replace(this.prefix, '{period}', case this.per
           when 'day' then to_char(now_in, 'YYYY-MM-DD') when 'month' then to_char(now_in, 'YYYY-MM')
           when 'year' then to_char(now_in, 'YYYY') else '' end), '{tenant}', of_tenant)
         || lpad(number::text, greatest(this.padding, length(number::text)), '0');
end
$$
$create$, '{schema}', quote_ident(schema)), '{literal}', quote_literal(schema));
  execute format('revoke execute on function %I.next_lane_number(text, text, date, integer) from public', schema);
  execute format('comment on function %I.next_lane_number(text, text, date, integer) is ''What next_number() calls where a lane has to be begun''', schema);
  execute format('comment on function %I.next_number(text, text, timestamptz) is ''The next number of a kind for a tenant''', schema);
  execute format('revoke execute on function %I.next_number(text, text, timestamptz) from public', schema);
  if owner <> current_user then
    foreach name in array array['kind', 'zone', 'change'] loop
      execute format('alter table %I.%I owner to %I', schema, 'shardids_counter_' || name, owner);
    end loop;
    execute format('alter table %I.shardids_counter owner to %I', schema, owner);
    execute format('alter function %I.next_lane_number(text, text, date, integer) owner to %I', schema, owner);
    execute format('alter function %I.next_number(text, text, timestamptz) owner to %I', schema, owner);
  end if;
  -- Whoever may draw IDs may draw numbers.
  for name in
    select distinct a.grantee::regrole
    from pg_proc p, aclexplode(p.proacl) a
    where p.oid = to_regprocedure(format('%I.next_id()', schema)) and a.grantee not in (0, p.proowner)
  loop
    execute format('grant execute on function %I.next_number(text, text, timestamptz) to %s', schema, name);
  end loop;
end
$_$;


--
-- Name: FUNCTION create_counters(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.create_counters(shard integer) IS 'Makes the tables of a shard''s counters, and its next_number()';


--
-- Name: create_generator(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.create_generator(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
#variable_conflict use_variable
declare
  schema constant text := shardids.schema_of(shard);
  owner constant name := (select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'shardids');
  base constant bigint := shardids.incarnation();
  now_ms constant bigint := shardids.ms_of(clock_timestamp());
  propagation constant text := current_setting('citus.enable_ddl_propagation', true);
  counter regclass;
  id_offset regclass;
begin
  -- On Citus: the generator is the coordinator's alone. Citus itself takes next_id() to its workers with the first table.
  if propagation is not null then
    perform set_config('citus.enable_ddl_propagation', 'off', true);
  end if;
  execute format('create sequence %I.id_counter as bigint no cycle', schema);
  counter := format('%I.id_counter', schema)::regclass;
  -- One nextval of id_offset is a step of 16 ms.
  execute format('create sequence %I.id_offset as bigint increment 16 minvalue -9223372036854775808 start %s no cycle', schema,
                 case when shardids.skips_from(shard) is null then shardids.bound_to(counter, shard) else 0 end);
  id_offset := format('%I.id_offset', schema)::regclass;
  -- To find one function by its name, PostgreSQL lists those of that name in all schemas, and again after each change of any
  -- function. So these two have the shard's number in their names, the two of applications get their names last, and no function of
  -- the engine that they call has one of those names.
  --
  -- Whoever may execute these two raises the shard's offset, as the owner of the engine. In PL/pgSQL, which keeps plans;
  -- so they name no sequence: that name would be another's after the schema was renamed.
  execute format(
    'create function %1$I.late_id_%2$s(id_offset regclass) returns bigint '
    'language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as '
    '$$begin return shardids.late_id(id_offset, %2$s); end$$; '
    'create function %1$I.set_aside_%2$s(id_offset regclass, n integer, past_tick bigint default null, out first_tick bigint, out last_tick bigint) '
    'language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as '
    '$$begin select r.first_tick, r.last_tick into first_tick, last_tick '
    'from shardids.set_aside(id_offset, %2$s, n, past_tick) r; end$$', schema, shard);
  perform shardids.define_next_id(shard, schema, format('next_id_%s', shard));
  execute format(
    'create function %1$I.next_ids_%2$s(n integer) returns setof bigint language sql volatile parallel unsafe rows 1000 '
    'begin atomic '
    -- A reservation moves the shard by at least a millisecond; a few IDs are cheaper drawn.
    'select %1$I.next_id_%2$s() as id from generate_series(1, n) where n between 1 and 63 '
    'union all '
    'select shardids.id_of(generate_series(r.first_tick, r.last_tick), %2$s) '
    'from %1$I.set_aside_%2$s(''%1$I.id_offset''::regclass, n) r where (n between 1 and 63) is not true; end; '
    'revoke execute on function %1$I.next_id_%2$s(), %1$I.next_ids_%2$s(integer), %1$I.late_id_%2$s(regclass), '
    '%1$I.set_aside_%2$s(regclass, integer, bigint) from public; '
    'comment on function %1$I.next_id_%2$s() is ''The next ID of shard %2$s''; '
    'comment on function %1$I.next_ids_%2$s(integer) is ''The next n IDs of shard %2$s, in order''; '
    'comment on function %1$I.late_id_%2$s(regclass) is ''What next_id() calls where the clock has gone ahead''; '
    'comment on function %1$I.set_aside_%2$s(regclass, integer, bigint) is ''What next_ids(n), shardids.reserve() and shardids.advance_past() call''',
    schema, shard);
  if owner <> current_user then
    execute format(
      'alter sequence %1$I.id_counter owner to %3$I; alter sequence %1$I.id_offset owner to %3$I; '
      'alter function %1$I.next_id_%2$s() owner to %3$I; alter function %1$I.next_ids_%2$s(integer) owner to %3$I; '
      'alter function %1$I.late_id_%2$s(regclass) owner to %3$I; '
      'alter function %1$I.set_aside_%2$s(regclass, integer, bigint) owner to %3$I; '
      'alter table if exists %1$I.shardids_version owner to %3$I', schema, shard, owner);
  end if;
  execute format('alter function %1$I.next_id_%2$s() rename to next_id; alter function %1$I.next_ids_%2$s(integer) rename to next_ids',
                 schema, shard);
  if propagation is not null then
    perform set_config('citus.enable_ddl_propagation', propagation, true);
  end if;
  -- Issues IDs from now on: if this is rolled back, the sequences go with it.
  if now_ms >= 1::bigint << shardids.time_bits() then
    perform shardids.refuse('SI006', shard);
  elsif shardids.is_believed(now_ms) is false then
    perform shardids.refuse('SI012', shard);
  end if;
  perform shardids.note_step(now_ms, 0);
  perform setval(id_offset, base + greatest(0, now_ms));
  insert into shardids.shard
    (id, schema, state, unfences, id_counter, id_offset, server, timeline, incarnation, activated_at)
  values (shard, schema, 'active', -1, counter, id_offset, shardids.server(), shardids.timeline(), base, clock_timestamp());
end
$_$;


--
-- Name: FUNCTION create_generator(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.create_generator(shard integer) IS 'Creates a shard''s sequences and functions, and lets it issue IDs';


--
-- Name: create_subscription(name, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.create_subscription(name name, conninfo text, options text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  execute format('create subscription %1$I connection %2$L publication %1$I with (create_slot = false, %3$s)',
                 name, conninfo, options);
exception when others then
  raise exception using errcode = sqlstate, message = sqlerrm;
end
$_$;


--
-- Name: FUNCTION create_subscription(name name, conninfo text, options text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.create_subscription(name name, conninfo text, options text) IS 'CREATE SUBSCRIPTION, without a trace of the password when it fails';


--
-- Name: define_counter(integer, text, text, text, text, integer, integer, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.define_counter(shard integer, kind text, per text, zone text DEFAULT 'UTC'::text, prefix text DEFAULT NULL::text, padding integer DEFAULT 4, lanes integer DEFAULT 1, keep_days integer DEFAULT 400) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  schema constant text := shardids.schema_of(shard);
  form constant text := coalesce(prefix, case per when 'never' then '{tenant}-' else '{tenant}-{period}-' end);
  what text;
  defined record;
begin
  what := case
    when coalesce(kind, '') = '' or length(kind) > 100 then 'the name of a kind of numbers has 1 to 100 characters'
    when (per in ('day', 'month', 'year', 'never')) is not true then format('a kind of numbers begins again per day, month, year or never, not per %L', per)
    when (padding between 0 and 18) is not true then format('numbers are padded to 0 to 18 digits, not to %s', padding)
    when (lanes between 1 and 1024) is not true then format('a kind of numbers has 1 to 1024 lanes, not %s', lanes)
    when (keep_days between 1 and 100000) is not true then format('counters are kept for 1 to 100000 days, not %s', keep_days)
    when form ~ '[{}]' and replace(replace(form, '{tenant}', ''), '{period}', '') ~ '[{}]'
      then format('prefix %L has another placeholder than {tenant} and {period}', form)
    when per = 'never' and strpos(form, '{period}') > 0 then format('prefix %L has a {period}, and numbers that never begin again have none', form)
    end;
  if what is not null then
    perform shardids.refuse_number(schema, 'SI007', what, 'Nothing was defined.');
  end if;
  perform shardids.require_zone(shardids.schema_of(shard), zone);
  perform shardids.create_counters(shard);
  execute format('select k.per, k.lanes from %I.shardids_counter_kind k where k.kind = $1', schema) into defined using kind;
  if (defined.per, defined.lanes) <> (per, lanes) then
    perform shardids.refuse_number(schema, 'SI007',
      format('numbers of kind %L are defined already, per %s and with %s lanes: that can''t be changed to per %s and %s lanes',
             kind, defined.per, defined.lanes, per, lanes),
      'Define another kind.');
  end if;
  execute format(
    'insert into %I.shardids_counter_kind as k (kind, per, zone, prefix, padding, lanes, keep_days) '
    'values ($1, $2, $3, $4, $5, $6, $7) on conflict (kind) do update '
    'set zone = excluded.zone, prefix = excluded.prefix, padding = excluded.padding, keep_days = excluded.keep_days '
    'where k is distinct from excluded', schema)
  using kind, per, zone, form, padding, lanes, keep_days;
end
$_$;


--
-- Name: FUNCTION define_counter(shard integer, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.define_counter(shard integer, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer) IS 'Defines a kind of numbers in a shard: when it begins again, how it is written, and whether numbers may be missing';


--
-- Name: define_next_id(integer, name, name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.define_next_id(shard integer, schema name, called name DEFAULT 'next_id'::name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;


--
-- Name: FUNCTION define_next_id(shard integer, schema name, called name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.define_next_id(shard integer, schema name, called name) IS 'Creates a shard''s function next_id()';


--
-- Name: objects_of(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.objects_of(shard integer) RETURNS TABLE(classid oid, objid oid, version text)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 WITH schema(oid) AS (
          SELECT (to_regnamespace(shardids.schema_of(objects_of.shard)))::oid AS to_regnamespace
         ), relation AS (
          SELECT c.oid,
             c.reltoastrelid,
             (ROW(c.relname, c.reloftype, c.relowner, c.relam, c.relfilenode, c.reltablespace, c.relpersistence, c.relnatts, c.relchecks, c.relhasrules, c.relrowsecurity, c.relforcerowsecurity, c.relispopulated, c.relreplident, c.relispartition, c.relacl, c.reloptions, t.reloptions))::text AS version
            FROM (pg_class c
              LEFT JOIN pg_class t ON ((t.oid = c.reltoastrelid)))
           WHERE (c.relnamespace = ( SELECT schema.oid
                    FROM schema))
         ), toast AS (
          SELECT r.reltoastrelid AS oid
            FROM relation r
           WHERE (r.reltoastrelid <> (0)::oid)
         )
  SELECT ('pg_namespace'::regclass)::oid AS oid,
     n.oid,
     (n.xmin)::text AS xmin
    FROM pg_namespace n
   WHERE (n.oid = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_class'::regclass AS regclass,
     r.oid,
     r.version
    FROM relation r
 UNION ALL
  SELECT 'pg_class'::regclass AS regclass,
     t.oid,
     NULL::text AS version
    FROM toast t
 UNION ALL
  SELECT 'pg_class'::regclass AS regclass,
     i.indexrelid,
     NULL::text AS version
    FROM (toast t
      JOIN pg_index i ON ((i.indrelid = t.oid)))
 UNION ALL
  SELECT 'pg_attrdef'::regclass AS regclass,
     d.oid,
     (d.xmin)::text AS xmin
    FROM (pg_attrdef d
      JOIN relation r ON ((r.oid = d.adrelid)))
 UNION ALL
  SELECT 'pg_constraint'::regclass AS regclass,
     c.oid,
     (c.xmin)::text AS xmin
    FROM pg_constraint c
   WHERE (c.connamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_rewrite'::regclass AS regclass,
     w.oid,
     (w.xmin)::text AS xmin
    FROM (pg_rewrite w
      JOIN relation r ON ((r.oid = w.ev_class)))
 UNION ALL
  SELECT 'pg_policy'::regclass AS regclass,
     p.oid,
     (p.xmin)::text AS xmin
    FROM (pg_policy p
      JOIN relation r ON ((r.oid = p.polrelid)))
 UNION ALL
  SELECT 'pg_trigger'::regclass AS regclass,
     t.oid,
     (t.xmin)::text AS xmin
    FROM (pg_trigger t
      JOIN relation r ON ((r.oid = t.tgrelid)))
   WHERE ((NOT t.tgisinternal) AND (t.tgname <> 'shardids_barrier'::name))
 UNION ALL
  SELECT 'pg_statistic_ext'::regclass AS regclass,
     s.oid,
     (s.xmin)::text AS xmin
    FROM pg_statistic_ext s
   WHERE (s.stxnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_type'::regclass AS regclass,
     t.oid,
     (t.xmin)::text AS xmin
    FROM pg_type t
   WHERE (t.typnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_proc'::regclass AS regclass,
     p.oid,
     (p.xmin)::text AS xmin
    FROM pg_proc p
   WHERE (p.pronamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_operator'::regclass AS regclass,
     o.oid,
     (o.xmin)::text AS xmin
    FROM pg_operator o
   WHERE (o.oprnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_opclass'::regclass AS regclass,
     o.oid,
     (o.xmin)::text AS xmin
    FROM pg_opclass o
   WHERE (o.opcnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_opfamily'::regclass AS regclass,
     o.oid,
     (o.xmin)::text AS xmin
    FROM pg_opfamily o
   WHERE (o.opfnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_amop'::regclass AS regclass,
     a.oid,
     (a.xmin)::text AS xmin
    FROM (pg_amop a
      JOIN pg_opfamily f ON ((f.oid = a.amopfamily)))
   WHERE (f.opfnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_amproc'::regclass AS regclass,
     a.oid,
     (a.xmin)::text AS xmin
    FROM (pg_amproc a
      JOIN pg_opfamily f ON ((f.oid = a.amprocfamily)))
   WHERE (f.opfnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_collation'::regclass AS regclass,
     c.oid,
     (c.xmin)::text AS xmin
    FROM pg_collation c
   WHERE (c.collnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_conversion'::regclass AS regclass,
     c.oid,
     (c.xmin)::text AS xmin
    FROM pg_conversion c
   WHERE (c.connamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_ts_config'::regclass AS regclass,
     c.oid,
     (c.xmin)::text AS xmin
    FROM pg_ts_config c
   WHERE (c.cfgnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_ts_dict'::regclass AS regclass,
     d.oid,
     (d.xmin)::text AS xmin
    FROM pg_ts_dict d
   WHERE (d.dictnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_ts_parser'::regclass AS regclass,
     p.oid,
     (p.xmin)::text AS xmin
    FROM pg_ts_parser p
   WHERE (p.prsnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_ts_template'::regclass AS regclass,
     t.oid,
     (t.xmin)::text AS xmin
    FROM pg_ts_template t
   WHERE (t.tmplnamespace = ( SELECT schema.oid
            FROM schema))
 UNION ALL
  SELECT 'pg_default_acl'::regclass AS regclass,
     a.oid,
     (a.xmin)::text AS xmin
    FROM pg_default_acl a
   WHERE (a.defaclnamespace = ( SELECT schema.oid
            FROM schema));
END;


--
-- Name: FUNCTION objects_of(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.objects_of(shard integer) IS 'All objects of a shard''s schema, and a version of each';


--
-- Name: dependents_of(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.dependents_of(shard integer) RETURNS SETOF text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 WITH own AS MATERIALIZED (
          SELECT o_1.classid,
             o_1.objid
            FROM shardids.objects_of(dependents_of.shard) o_1(classid, objid, version)
         ), dependent(classid, objid, objsubid) AS (
          SELECT d_1.classid,
             d_1.objid,
             d_1.objsubid
            FROM (own o_1
              JOIN pg_depend d_1 ON (((d_1.refclassid = o_1.classid) AND (d_1.refobjid = o_1.objid))))
         UNION
          SELECT d_1.refclassid,
             d_1.refobjid,
             d_1.refobjsubid
            FROM (own o_1
              JOIN pg_depend d_1 ON (((d_1.classid = o_1.classid) AND (d_1.objid = o_1.objid))))
           WHERE (d_1.deptype = ANY (ARRAY['e'::"char", 'i'::"char"]))
         )
  SELECT DISTINCT
         CASE
             WHEN (w.oid IS NULL) THEN pg_describe_object(d.classid, d.objid, d.objsubid)
             ELSE pg_describe_object(('pg_class'::regclass)::oid, w.ev_class, 0)
         END AS pg_describe_object
    FROM (((dependent d
      LEFT JOIN own o ON (((o.classid = d.classid) AND (o.objid = d.objid))))
      LEFT JOIN pg_rewrite w ON (((d.classid = ('pg_rewrite'::regclass)::oid) AND (w.oid = d.objid))))
      LEFT JOIN pg_trigger t ON (((d.classid = ('pg_trigger'::regclass)::oid) AND (t.oid = d.objid))))
   WHERE ((o.objid IS NULL) AND (t.tgisinternal IS NOT TRUE) AND (t.tgname IS DISTINCT FROM 'shardids_barrier'::name) AND (NOT (EXISTS ( SELECT
            FROM pg_depend m
           WHERE ((m.classid = d.classid) AND (m.objid = d.objid) AND (m.deptype = 'e'::"char"))))) AND (((d.classid)::regclass)::text <> ALL (ARRAY['pg_publication_rel'::text, 'pg_publication_namespace'::text])))
   ORDER BY
         CASE
             WHEN (w.oid IS NULL) THEN pg_describe_object(d.classid, d.objid, d.objsubid)
             ELSE pg_describe_object(('pg_class'::regclass)::oid, w.ev_class, 0)
         END;
END;


--
-- Name: FUNCTION dependents_of(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.dependents_of(shard integer) IS 'What is outside of a shard''s schema and would be dropped with it: extensions, views, constraints, columns ...';


--
-- Name: drawn_id(bigint, bigint, bigint, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drawn_id(seen bigint, drawn bigint, again bigint, shard integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((((NULLIF(LEAST(((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits())), ((1)::bigint << shardids.time_bits())), ((1)::bigint << shardids.time_bits())) << shardids.shard_bits()) + shard) << shardids.sequence_bits()) + (again & (((1)::bigint << shardids.sequence_bits()) - 1)));


--
-- Name: drop_barriers(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drop_barriers(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  name regclass;
begin
  foreach name in array shardids.tables_of(shard) loop
    execute format('drop trigger if exists shardids_barrier on %s', name);
  end loop;
end
$$;


--
-- Name: FUNCTION drop_barriers(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.drop_barriers(shard integer) IS 'Drops the write barriers of a shard''s tables';


--
-- Name: drop_copy(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drop_copy(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION drop_copy(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.drop_copy(shard integer) IS 'Drops a shard that was moved away or fenced, with all that is in it';


--
-- Name: drop_route(regclass, name, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drop_route(part regclass, route name, adoption text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if part in (select shardids.routed(route, adoption)) then
    execute format('alter table %s drop column %I', part, route);
  end if;
end
$$;


--
-- Name: FUNCTION drop_route(part regclass, route name, adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.drop_route(part regclass, route name, adoption text) IS 'Drops the column of add_route';


--
-- Name: drop_staging(text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drop_staging(adoption text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION drop_staging(adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.drop_staging(adoption text) IS 'Drops the tables of stage that an adoption has made, and their schemas if nothing else is in them';


--
-- Name: drop_unknown(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.drop_unknown(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION drop_unknown(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.drop_unknown(shard integer) IS 'Drops a schema that has a shard''s name and is no shard of this node';


--
-- Name: enter_lease(integer, uuid); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.enter_lease(shard integer, epoch uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not pg_try_advisory_xact_lock(1936220533, shard) then
    raise exception using errcode = 'SI008',
      message = format('shard %s is being changed by another session%s [node "%s"]', shard,
        (select string_agg(format(' (%sprocess %s)', nullif(a.application_name, '') || ', ', a.pid), '')
         from pg_locks l join pg_stat_activity a using (pid)
         where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
           and l.classid = 1936220533 and l.objid = shard::oid and l.objsubid = 2 and l.granted),
        (select n.name from shardids.node n)),
      hint = 'Wait until it has ended, and run the command again.';
  end if;
  perform shardids.refuse_lease(shard, epoch);
end
$$;


--
-- Name: FUNCTION enter_lease(shard integer, epoch uuid); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.enter_lease(shard integer, epoch uuid) IS 'As require_lease, for a session that works alone; with null it needs no lease, and nobody may hold one';


--
-- Name: enter_moved(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.enter_moved(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_variable
begin
  insert into shardids.shard (id, schema, state, id_counter, id_offset, server, timeline, incarnation, arrived)
  values (shard, shardids.schema_of(shard), 'fenced', format('%I.id_counter', shardids.schema_of(shard))::regclass,
          format('%I.id_offset', shardids.schema_of(shard))::regclass, shardids.server(), shardids.timeline(), shardids.incarnation(), 'tables');
end
$$;


--
-- Name: FUNCTION enter_moved(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.enter_moved(shard integer) IS 'Enters a shard that is being moved here, fenced';


--
-- Name: enter_shard(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.enter_shard(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION enter_shard(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.enter_shard(shard integer) IS 'Makes a shard''s schema if missing and names it in shardids.shard until the end of the transaction';


--
-- Name: fence(integer, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.fence(shard integer, moved_to text DEFAULT NULL::text, OUT high_water_tick bigint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION fence(shard integer, moved_to text, OUT high_water_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.fence(shard integer, moved_to text, OUT high_water_tick bigint) IS 'Stops a shard at once; returns the high-water tick, above which no ID was issued';


--
-- Name: follow(name, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.follow(name name, conninfo text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_subscription s where s.subname = name and s.subdbid = shardids.database()) then
    perform shardids.create_subscription(name, conninfo, 'binary = false');
  end if;
end
$$;


--
-- Name: FUNCTION follow(name name, conninfo text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.follow(name name, conninfo text) IS 'Subscribes to a publication of a database that is adopted';


--
-- Name: follow_writer(name, text, name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.follow_writer(name name, conninfo text, publication name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  -- A COMMIT is on disk before the writer hears of it, so that nobody waits for the next flush.
  execute format('create subscription %1$I connection %2$L publication %3$I'
                 ' with (create_slot = false, slot_name = %1$I, copy_data = false, synchronous_commit = on)', name, conninfo, publication);
exception when others then
  raise exception using errcode = sqlstate, message = sqlerrm;
end
$_$;


--
-- Name: FUNCTION follow_writer(name name, conninfo text, publication name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.follow_writer(name name, conninfo text, publication name) IS 'Subscribes to the writer of reference tables, from where its slot is';


--
-- Name: forget_key(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.forget_key(move bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION forget_key(move bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.forget_key(move bigint) IS 'Drops the gate and the notes of a key''s move';


--
-- Name: gate_of(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.gate_of(move bigint) RETURNS regclass
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    RETURN to_regclass(format('shardids.key_gate_%s'::text, move));


--
-- Name: FUNCTION gate_of(move bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.gate_of(move bigint) IS 'The sequence that is used once the barrier of a key is closed';


--
-- Name: grant_usage(integer[], name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.grant_usage(shards integer[], role name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION grant_usage(shards integer[], role name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.grant_usage(shards integer[], role name) IS 'Lets a role draw IDs from shards';


--
-- Name: granted_functions(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.granted_functions(shard integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  select string_agg(format('%I.%s', shardids.schema_of(shard), f.signature), ', ')
  from unnest(array['next_id()', 'next_ids(integer)', format('late_id_%s(regclass)', shard),
                    format('set_aside_%s(regclass, integer, bigint)', shard), 'next_number(text, text, timestamptz)']) f (signature)
  where f.signature not like 'next\_number%' or to_regprocedure(format('%I.%s', shardids.schema_of(shard), f.signature)) is not null;
$$;


--
-- Name: guard_key(bigint, integer, regclass, integer, text, text, text, boolean, name[], boolean, name[], text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guard_key(move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean, links name[] DEFAULT NULL::name[], is_whole text DEFAULT NULL::text, takes text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;


--
-- Name: FUNCTION guard_key(move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean, links name[], is_whole text, takes text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guard_key(move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean, links name[], is_whole text, takes text) IS 'Lets writers of a key pass its barrier on a table, and notes the rows that they change';


--
-- Name: guard_key_reference(bigint, integer, regclass, text, text, text, name[], boolean, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guard_key_reference(move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;


--
-- Name: FUNCTION guard_key_reference(move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guard_key_reference(move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean) IS 'Refuses rows of others that refer to rows of a key that is on its way';


--
-- Name: guard_part(regclass, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guard_part(part regclass, logs_all boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from pg_trigger t where t.tgrelid = part and t.tgname in ('shardids_back', 'shardids_back_full')) then
    return;
  end if;
  execute format('create trigger %I before truncate on %s for each statement execute function shardids.refuse_with(%L, %L)',
                 case when logs_all then 'shardids_back_full' else 'shardids_back' end, part,
                 'table %s can''t be truncated as long as its changes are sent to the adopted database',
                 'DELETE is sent. To end the way back: shardids adopt finish');
  if logs_all then
    execute format('alter table %s replica identity full', part);
  end if;
end
$$;


--
-- Name: FUNCTION guard_part(part regclass, logs_all boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guard_part(part regclass, logs_all boolean) IS 'Refuses TRUNCATE of a table whose changes are sent back, and lets it log whole rows where the other side needs them';


--
-- Name: guard_reference(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guard_reference() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION guard_reference(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guard_reference() IS 'Refuses writes to a reference table elsewhere than on its writer, and DELETE and TRUNCATE there';


--
-- Name: guard_reference_table(regclass, text, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guard_reference_table(name regclass, writer text, is_writer boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION guard_reference_table(name regclass, writer text, is_writer boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guard_reference_table(name regclass, writer text, is_writer boolean) IS 'Lets writes to a reference table pass on its writer alone';


--
-- Name: guarded(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.guarded() RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 SELECT (t.tgrelid)::regclass AS tgrelid
    FROM pg_trigger t
   WHERE ((t.tgname = ANY (ARRAY['shardids_back'::name, 'shardids_back_full'::name])) AND (t.tgfoid = (to_regprocedure('shardids.refuse_with()'::text))::oid));
END;


--
-- Name: FUNCTION guarded(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.guarded() IS 'The tables that guard_part has changed';


SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: key_home; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.key_home (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    shard integer NOT NULL,
    since timestamp with time zone NOT NULL,
    version bigint NOT NULL
);


--
-- Name: TABLE key_home; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.key_home IS 'Keys whose rows live in another shard than that of their hash: as the catalog had them at homes_version of shardids.node';


--
-- Name: home_of(text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.home_of(kind text, key text) RETURNS integer
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
    RETURN (SELECT h.shard FROM shardids.key_home h WHERE ((h.kind = home_of.kind) AND (h.key = home_of.key)));


--
-- Name: FUNCTION home_of(kind text, key text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.home_of(kind text, key text) IS 'The shard that the directory of keys has for a key, by the kind text, bigint, uuid or bytea; null: that of shardids.shard_for_key';


--
-- Name: incarnation(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.incarnation() RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  -- A right that the owner gets after the installation makes no other incarnation. One that it loses makes one other.
  sees_all boolean := (select n.sees_all from shardids.node n)
                      and pg_has_role(current_user, 'pg_read_all_stats', 'usage');
  checkpointer_start timestamptz;
begin
  -- Right after a crash the first sessions may come before the new checkpointer is listed; one that went
  -- on without it would disagree with all later ones.
  while sees_all and checkpointer_start is null loop
    select backend_start into checkpointer_start from pg_stat_activity where backend_type = 'checkpointer';
    if checkpointer_start is null then
      perform pg_sleep(0.001), pg_stat_clear_snapshot();
    end if;
  end loop;
  return ((case when pg_is_in_recovery() then 0 else shardids.timeline() & 3 end::bigint << 19)
          + greatest(64, hashtextextended(
              concat_ws(' ', shardids.server(), extract(epoch from pg_postmaster_start_time()),
                        extract(epoch from checkpointer_start)), 0) & 524287)) << 42;
end
$$;


--
-- Name: FUNCTION incarnation(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.incarnation() IS 'What this incarnation of the server adds to the stored offset of a shard';


--
-- Name: is_ahead(bigint, bigint, interval); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_ahead(seen bigint, drawn bigint, max_ahead interval) RETURNS boolean
    LANGUAGE sql PARALLEL SAFE
    RETURN ((((((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits())) >= 0) AND (((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits())) <= (((1)::bigint << shardids.time_bits()) - 1))) IS TRUE) AND ((((((((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits())) + shardids.epoch_ms()))::double precision - (date_part('epoch'::text, clock_timestamp()) * (1000)::double precision)) >= (0)::double precision) AND ((((((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits())) + shardids.epoch_ms()))::double precision - (date_part('epoch'::text, clock_timestamp()) * (1000)::double precision)) <= (date_part('epoch'::text, max_ahead) * (1000)::double precision))) IS TRUE));


--
-- Name: is_believed(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_believed(clock_ms bigint) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  least_ms constant bigint := (select clock_ms - (extract(epoch from n.max_step) * 1000)::bigint from shardids.node n);
begin
  -- The usual answer is that of the first shard: to read a sequence locks it until the end of the transaction.
  if (select shardids.ms_of(n.clock_confirmed_at) >= least_ms from shardids.node n)
     or exists (select from shardids.shard s where shardids.reached_ms(s.id_counter, s.id_offset, s.high_water_tick) >= least_ms) then
    return true;
  elsif (select n.clock_confirmed_at is not null from shardids.node n)
        or exists (select from shardids.shard s where shardids.reached_ms(s.id_counter, s.id_offset, s.high_water_tick) is not null) then
    return false;
  end if;
  return null;
end
$$;


--
-- Name: FUNCTION is_believed(clock_ms bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.is_believed(clock_ms bigint) IS 'Whether a clock is at most max_step past the latest time that this node has reason to believe; null where it has none';


--
-- Name: is_bound(regclass, regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_bound(counter regclass, id_offset regclass, shard integer) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN ((pg_sequence_parameters((id_offset)::oid)).start_value = ((((counter)::oid)::bigint << 32) + shard));


--
-- Name: is_current(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_current(seen bigint, drawn bigint) RETURNS boolean
    LANGUAGE sql PARALLEL SAFE
    RETURN (abs(((date_part('epoch'::text, clock_timestamp()) * (1000)::double precision) - (((seen + (drawn >> shardids.sequence_bits())) + ((shardids.epoch_ms() - shardids.offset_base()) - 29999)))::double precision)) < (30001)::double precision);


--
-- Name: is_followed(regclass, regclass, integer, bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_followed(counter regclass, id_offset regclass, shard integer, seen bigint, target bigint) RETURNS boolean
    LANGUAGE plpgsql PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return exists (
    select from shardids.shard s
    where s.id = is_followed.shard and s.id_offset = is_followed.id_offset and s.id_counter = is_followed.counter
      and s.state = 'active' and s.server = shardids.server())
    and not exists (
    select from shardids.skipped k
    where k.shard = is_followed.shard
      and k.last_tick >> shardids.sequence_bits()
          >= shardids.offset_ms(seen) + (pg_sequence_last_value(counter) >> shardids.sequence_bits())
      and k.first_tick >> shardids.sequence_bits()
          <= shardids.offset_ms(target) + (pg_sequence_last_value(counter) >> shardids.sequence_bits()) + 3600000);
end
$$;


--
-- Name: is_free(integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_free(shard integer, tick bigint) RETURNS boolean
    LANGUAGE plpgsql STABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return tick >> shardids.sequence_bits() < 1::bigint << shardids.time_bits()
    and not exists (
      select from shardids.skipped k where k.shard = is_free.shard and tick between k.first_tick and k.last_tick);
end
$$;


--
-- Name: is_late(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_late(seen bigint, target bigint) RETURNS boolean
    LANGUAGE sql PARALLEL SAFE
    RETURN ((seen >= GREATEST(shardids.offset_base(), (target - 3600000))) AND (seen <= (target - 2)));


--
-- Name: is_marked(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_marked(seen bigint, base bigint) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((seen >= 0) AND ((seen >> 42) = ANY (ARRAY[(base >> 42), ((base >> 42) # (1)::bigint)])));


--
-- Name: FUNCTION is_marked(seen bigint, base bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.is_marked(seen bigint, base bigint) IS 'Whether a value of id_offset was written in the incarnation with this base';


--
-- Name: is_near(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_near(seen bigint, target bigint) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((target - seen) <= 256);


--
-- Name: is_nearly_current(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_nearly_current(seen bigint, drawn bigint) RETURNS boolean
    LANGUAGE sql PARALLEL SAFE
    RETURN (abs(((date_part('epoch'::text, clock_timestamp()) * (1000)::double precision) - (((seen + (drawn >> shardids.sequence_bits())) + ((shardids.epoch_ms() - shardids.offset_base()) - 29950)))::double precision)) < (30050)::double precision);


--
-- Name: is_of_another_timeline(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_of_another_timeline(seen bigint, base bigint) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((seen IS NULL) OR (((seen >> 61) & (3)::bigint) <> ((base >> 61) & (3)::bigint)));


--
-- Name: is_past(bigint, bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_past(seen bigint, drawn bigint, past_tick bigint) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN ((seen >= 0) AND ((seen & (~ '4398046511103'::bigint)) = shardids.offset_base()) AND ((((seen & '4398046511103'::bigint) << shardids.sequence_bits()) + COALESCE(drawn, (0)::bigint)) >= past_tick));


--
-- Name: FUNCTION is_past(seen bigint, drawn bigint, past_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.is_past(seen bigint, drawn bigint, past_tick bigint) IS 'Whether a shard will issue no tick up to this one any more';


--
-- Name: is_unchanged(bigint, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.is_unchanged(seen bigint, id_offset regclass) RETURNS boolean
    LANGUAGE sql PARALLEL SAFE
    RETURN (pg_sequence_last_value(id_offset) = seen);


--
-- Name: keep_reference_key(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.keep_reference_key() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET extra_float_digits TO '3'
    AS $$
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


--
-- Name: FUNCTION keep_reference_key(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.keep_reference_key() IS 'Refuses changes of what foreign keys on other nodes can refer to';


--
-- Name: keep_whole(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.keep_whole() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = 'SI008', hint = 'Wait until the move has ended: shardids tenant move --list. Or delete the rows.',
    message = format('table %s can''t be emptied while rows of key %L are being moved [node "%s"]', tg_relid::regclass, tg_argv[0],
                     (select n.name from shardids.node n));
end
$$;


--
-- Name: FUNCTION keep_whole(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.keep_whole() IS 'Refuses TRUNCATE of a table whose rows are being moved';


--
-- Name: late_id(regclass, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.late_id(id_offset regclass, shard integer) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  counter constant regclass := (
    select s.id_counter from shardids.shard s where s.id = late_id.shard and s.id_offset = late_id.id_offset);
  seen bigint;
  tick bigint;
begin
  loop
    -- Of this incarnation, although offset_base() may be what the session computed before a promotion.
    seen := (shardids.advance(shard, id_offset)).seen;
    tick := (shardids.offset_ms(seen) << shardids.sequence_bits()) + nextval(counter);
    if pg_sequence_last_value(id_offset) = seen and shardids.is_free(shard, tick) then
      return shardids.id_of(tick, shard);
    end if;
  end loop;
end
$$;


--
-- Name: FUNCTION late_id(id_offset regclass, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.late_id(id_offset regclass, shard integer) IS 'Raises the offset and draws an ID: what next_id() calls where its offset is not current';


--
-- Name: lock_tables(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.lock_tables(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  tables constant regclass[] := shardids.tables_of(shard);
begin
  if tables <> '{}' then
    execute format('lock table %s in share row exclusive mode', array_to_string(tables, ', '));
  end if;
end
$$;


--
-- Name: FUNCTION lock_tables(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.lock_tables(shard integer) IS 'Keeps writers out of all tables of a shard until the end of the transaction';


--
-- Name: log_offset(regclass, bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.log_offset(id_offset regclass, base bigint, offset_ms bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if current_setting('server_version_num')::integer >= 170000 then
    perform setval(id_offset, (base # (1::bigint << 42)) + offset_ms);
    perform pg_logical_emit_message(false, 'shardids', '', true);
  end if;
end
$$;


--
-- Name: FUNCTION log_offset(id_offset regclass, base bigint, offset_ms bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.log_offset(id_offset regclass, base bigint, offset_ms bigint) IS 'Flushes the log with a shard''s next offset, on PostgreSQL 17 and later';


--
-- Name: make_gate(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.make_gate(move bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  execute format('create sequence if not exists shardids.key_gate_%s', move);
  execute format('alter sequence shardids.key_gate_%s owner to %I', move,
                 (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids'));
end
$$;


--
-- Name: FUNCTION make_gate(move bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.make_gate(move bigint) IS 'Creates the gate of a key, open';


--
-- Name: make_index(regclass, name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.make_index(part regclass, name name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION make_index(part regclass, name name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.make_index(part regclass, name name) IS 'Makes an index again that set_indexes_aside has dropped';


--
-- Name: make_late_trigger(text, text, regclass, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.make_late_trigger(trigger text, operation text, name regclass, condition text, note text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = name and t.tgname = trigger) then
    execute format(
      'create constraint trigger %I after %s on %s deferrable initially deferred for each row %s execute function shardids.%I()',
      trigger, operation, name, case when condition is null then '' else format('when (%s)', condition) end, note);
  end if;
  execute format('alter table %s enable always trigger %I', name, trigger);
end
$$;


--
-- Name: FUNCTION make_late_trigger(trigger text, operation text, name regclass, condition text, note text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.make_late_trigger(trigger text, operation text, name regclass, condition text, note text) IS 'Creates a trigger of a key''s move that runs at COMMIT';


--
-- Name: make_note(text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.make_note(name text, body text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  execute format(
    'create or replace function shardids.%1$I() returns trigger language plpgsql security definer'
    ' set search_path = pg_catalog, pg_temp set row_security = off as %2$L', name, body);
  execute format('alter function shardids.%I() owner to %I', name,
                 (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids'));
  execute format('revoke execute on function shardids.%I() from public', name);
end
$_$;


--
-- Name: FUNCTION make_note(name text, body text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.make_note(name text, body text) IS 'Creates a function for triggers of a key''s move, which the engine''s owner owns';


--
-- Name: max_id(timestamp with time zone); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.max_id(at timestamp with time zone) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((shardids.clamped_ms(at) << (shardids.shard_bits() + shardids.sequence_bits())) + (((1)::bigint << (shardids.shard_bits() + shardids.sequence_bits())) - 1));


--
-- Name: FUNCTION max_id(at timestamp with time zone); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.max_id(at timestamp with time zone) IS 'The highest ID that any shard can issue in a millisecond';


--
-- Name: max_past_ms(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.max_past_ms() RETURNS bigint
    LANGUAGE sql STABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  select (extract(epoch from greatest(n.max_past, n.safety_margin * 6)) * 1000)::bigint from shardids.node n;
$$;


--
-- Name: FUNCTION max_past_ms(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.max_past_ms() IS 'How many ms ahead of the clock an ID may be that a shard goes past';


--
-- Name: min_id(timestamp with time zone); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.min_id(at timestamp with time zone) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (shardids.clamped_ms(at) << (shardids.shard_bits() + shardids.sequence_bits()));


--
-- Name: FUNCTION min_id(at timestamp with time zone); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.min_id(at timestamp with time zone) IS 'The lowest ID that any shard can issue in a millisecond';


--
-- Name: note_step(bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.note_step(clock_ms bigint, reached_ms bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  latest bigint;
  slot integer;
  lowest bigint;
begin
  if clock_ms < 1 then
    return;
  end if;
  perform shardids.wait_for_lock(1936220516, -1);
  perform setval(format('shardids.before_%s', k.slot), reached_ms)
  from shardids.noted_steps() k where k.before_ms < reached_ms and reached_ms < k.step_ms;
  latest := coalesce(pg_sequence_last_value('shardids.step_latest'), -3600000);
  if clock_ms not between latest and latest + 3600000 then
    select k.slot, k.step_ms into slot, lowest from shardids.noted_steps() k order by 2 limit 1;
    -- First of all what is given up, so that it is never unknown.
    if least(lowest, clock_ms) > coalesce(pg_sequence_last_value('shardids.step_dropped'), 0) then
      perform setval('shardids.step_dropped', least(lowest, clock_ms));
    end if;
    if clock_ms > lowest then
      perform setval(format('shardids.before_%s', slot), greatest((
        select max(r.ms) from shardids.shard s
        cross join lateral (select shardids.reached_ms(s.id_counter, s.id_offset, s.high_water_tick)) r (ms) where r.ms < clock_ms), 1));
      perform setval(format('shardids.step_%s', slot), clock_ms);
    end if;
  end if;
  if clock_ms <> latest then
    perform setval('shardids.step_latest', clock_ms);
  end if;
  raise exception using errcode = 'SI099';
exception when sqlstate 'SI099' then
  null;
end
$$;


--
-- Name: FUNCTION note_step(clock_ms bigint, reached_ms bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.note_step(clock_ms bigint, reached_ms bigint) IS 'Notes that the clock has gone ahead by more than an hour at once';


--
-- Name: noted_steps(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.noted_steps() RETURNS TABLE(slot integer, step_ms bigint, before_ms bigint)
    LANGUAGE plpgsql ROWS 4 PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return query
    select n, coalesce(pg_sequence_last_value(format('shardids.step_%s', n)::regclass), 0),
           coalesce(pg_sequence_last_value(format('shardids.before_%s', n)::regclass), 0)
    from generate_series(1, 4) n;
end
$$;


--
-- Name: FUNCTION noted_steps(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.noted_steps() IS 'The times to which the node''s clock went ahead by more than an hour at once, and those that its shards had reached before; 0: none';


--
-- Name: number_rows(regclass, name, name, text, text, text, text, integer, integer, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.number_rows(numbered regclass, number name, tenant name, kind text, per text, zone text DEFAULT 'UTC'::text, prefix text DEFAULT NULL::text, padding integer DEFAULT 4, lanes integer DEFAULT 1, keep_days integer DEFAULT 400) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  shard integer;
  schema name;
  table_name name;
  trigger_name text;
  other regclass;
  missing text;
begin
  select s.id, s.schema, c.relname into shard, schema, table_name
  from pg_class c join pg_namespace n on n.oid = c.relnamespace join shardids.shard s on s.schema = n.nspname
  where c.oid = numbered;
  if shard is null then
    perform shardids.refuse_number(null, 'SI007', format('table %s is not in a shard', numbered), 'Name a table of a shard.');
  end if;
  select string_agg(quote_ident(w), ' and ') into missing
  from unnest(array[number, tenant]) w
  where not exists (select from pg_attribute a where a.attrelid = numbered and a.attname = w and a.attnum > 0 and not a.attisdropped);
  if missing is not null then
    perform shardids.refuse_number(schema, 'SI007', format('table %s has no column %s', numbered, missing),
      'Numbers need a column of text, and one with the tenant.');
  end if;
  if not exists (select from pg_attribute a where a.attrelid = numbered and a.attname = number
                 and a.atttypid in ('text'::regtype, 'varchar'::regtype)) then
    perform shardids.refuse_number(schema, 'SI007', format('column %I of table %s is not of type text or varchar', number, numbered),
      'A number for people is text.');
  end if;
  trigger_name := format('shardids_number_%s.%s', table_name, number);
  if octet_length(trigger_name) > 63 then
    perform shardids.refuse_number(schema, 'SI007', format('the names of table %s and column %I are longer than 46 bytes together', numbered, number),
      'The name of the trigger is made of them.');
  end if;
  perform shardids.define_counter(shard, kind, per, zone, prefix, padding, lanes, keep_days);
  -- A table that has been renamed takes its function along; a partition has a trigger of its parent's.
  select t.tgrelid into other from pg_trigger t
  where t.tgfoid = to_regprocedure(format('%I.%I()', schema, trigger_name)) and t.tgrelid <> numbered and t.tgparentid = 0 limit 1;
  if other is not null then
    perform shardids.refuse_number(schema, 'SI007', format('function %I.%I() numbers table %s already', schema, trigger_name, other),
      format('If that table was renamed: DROP FUNCTION %I.%I() CASCADE, and call number_rows() for both. Otherwise name the column differently.',
             schema, trigger_name));
  end if;
  execute format(
    'create or replace function %1$I.%2$I() returns trigger '
    'language plpgsql volatile set search_path = pg_catalog, pg_temp as '
    '$f$begin new.%3$I := %1$I.next_number(new.%4$I::text, %5$L); return new; end$f$', schema, trigger_name, number, tenant, kind);
  execute format('revoke execute on function %I.%I() from public', schema, trigger_name);
  execute format('alter function %I.%I() owner to %I', schema, trigger_name,
                 (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids'));
  execute format(
    'create or replace trigger %2$I before insert on %1$s for each row when (new.%3$I is null) execute function %4$I.%2$I()',
    numbered, trigger_name, number, schema);
end
$_$;


--
-- Name: FUNCTION number_rows(numbered regclass, number name, tenant name, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.number_rows(numbered regclass, number name, tenant name, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer) IS 'Defines a kind of numbers, and lets a column of a table draw them where an INSERT gives none';


--
-- Name: offset_ms(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.offset_ms(seen bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (seen < 0) THEN ('-1'::integer - seen) ELSE (seen & '4398046511103'::bigint) END;


--
-- Name: FUNCTION offset_ms(seen bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.offset_ms(seen bigint) IS 'The offset in ms that a value of id_offset holds, active or fenced';


--
-- Name: open_table(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.open_table(name regclass) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = name and t.tgname = 'shardids_adoption') then
    return false;
  end if;
  execute format('drop trigger shardids_adoption on %s', name);
  return true;
end
$$;


--
-- Name: FUNCTION open_table(name regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.open_table(name regclass) IS 'Drops the barrier of refuse_writes; false if there is none';


--
-- Name: pass_barrier(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.pass_barrier() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: pass_barrier(integer, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.pass_barrier(shard integer, name regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION pass_barrier(shard integer, name regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.pass_barrier(shard integer, name regclass) IS 'Waits for the write barrier of a table, and is refused where a write would be, without a write';


--
-- Name: pass_key(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.pass_key() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform shardids.pass_key(tg_argv[0]::bigint, tg_argv[1]::integer, tg_argv[2]);
  return case tg_op when 'DELETE' then old else new end;
end
$$;


--
-- Name: pass_key(bigint, integer, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.pass_key(move bigint, target integer, key text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION pass_key(move bigint, target integer, key text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.pass_key(move bigint, target integer, key text) IS 'Waits for the barrier of a key, and refuses the key where it is closed or the key lives in another shard';


--
-- Name: past_skipped(integer, bigint, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.past_skipped(shard integer, at_ms bigint, ticks bigint DEFAULT 0) RETURNS bigint
    LANGUAGE plpgsql STABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  k record;
  length_ms constant bigint := (ticks >> shardids.sequence_bits()) + 1;
begin
  for k in
    select s.first_tick >> shardids.sequence_bits() as first_ms, s.last_tick >> shardids.sequence_bits() as last_ms
    from shardids.skipped s where s.shard = past_skipped.shard order by 1
  loop
    if at_ms + 1000 >= k.first_ms and at_ms - length_ms <= k.last_ms then
      at_ms := k.last_ms + length_ms + 1;
    end if;
  end loop;
  return at_ms;
end
$$;


--
-- Name: period_of(text, timestamp without time zone); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.period_of(per text, moment timestamp without time zone) RETURNS date
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (per = 'never'::text) THEN '0001-01-01'::date ELSE (date_trunc(per, moment))::date END;


--
-- Name: FUNCTION period_of(per text, moment timestamp without time zone); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.period_of(per text, moment timestamp without time zone) IS 'The first day of the day, month or year in which a time lies';


--
-- Name: plan_reset(integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.plan_reset(shard integer, from_ms bigint DEFAULT NULL::bigint, OUT lead_ms bigint, OUT starts_ms bigint, OUT first_ms bigint, OUT last_ms bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION plan_reset(shard integer, from_ms bigint, OUT lead_ms bigint, OUT starts_ms bigint, OUT first_ms bigint, OUT last_ms bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.plan_reset(shard integer, from_ms bigint, OUT lead_ms bigint, OUT starts_ms bigint, OUT first_ms bigint, OUT last_ms bigint) IS 'What shardids.reset_clock(shard) would do';


--
-- Name: publish(integer, name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.publish(shard integer, name name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION publish(shard integer, name name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.publish(shard integer, name name) IS 'Publishes the tables of a shard';


--
-- Name: raised(bigint, bigint, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.raised(seen bigint, target bigint, id_offset regclass) RETURNS bigint
    LANGUAGE sql
    RETURN CASE WHEN shardids.is_near(seen, target) THEN nextval(id_offset) ELSE setval(id_offset, target) END;


--
-- Name: reached_ms(regclass, regclass, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.reached_ms(counter regclass, id_offset regclass, high_water_tick bigint) RETURNS bigint
    LANGUAGE plpgsql PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return greatest(
    (select shardids.offset_ms(pg_sequence_last_value(c.oid)) from pg_class c where c.oid = id_offset)
      + (coalesce((select pg_sequence_last_value(c.oid) from pg_class c where c.oid = counter), 0) >> shardids.sequence_bits()),
    nullif(high_water_tick, -1) >> shardids.sequence_bits());
end
$$;


--
-- Name: reference_columns(name[]); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.reference_columns(names name[]) RETURNS TABLE(name name, definition text)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION reference_columns(names name[]); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.reference_columns(names name[]) IS 'The columns of reference tables; null for tables that are not here';


--
-- Name: refuse(text, integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse(reason text, shard integer, amount bigint DEFAULT NULL::bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  this shardids.shard;
  node shardids.node;
  what text;
  next text;
begin
  select s.* into this from shardids.shard s where s.id = refuse.shard;
  select n.* into node from shardids.node n;
  if reason = 'SI002' and this.state = 'moved' then
    reason := 'SI003';
  elsif reason = 'SI001' and to_regnamespace(quote_ident(shardids.schema_of(shard))) is not null then
    reason := 'SI004';
  end if;
  case reason
    when 'SI001' then
      what := 'is not on this node';
      next := format('The catalog knows where it is: shardids shard list %s', shard);
    when 'SI002' then
      what := 'is fenced and issues no IDs';
      next := format('To let it issue again: shardids shard activate %s', shard);
      if this.state = 'active' and this.changed_in = pg_current_xact_id_if_assigned() then
        what := 'was activated in this transaction, and issues IDs from its COMMIT on';
        next := 'Commit, then draw: what is drawn before would stay drawn after a ROLLBACK.';
      elsif this.arrived is not null then
        what := 'is fenced: it is being moved here';
        next := format('The catalog knows where it is until then: shardids shard list %s', shard);
      end if;
    when 'SI003' then
      what := format('has moved to node "%s"', this.moved_to);
      next := 'Refresh the placement and retry the transaction there.';
    when 'SI004' then
      what := format('is a copy that was not activated here (activated on %s, this is %s)',
                     coalesce(this.server, 'another server'), shardids.server());
      next := format('If the original will never issue IDs again: shardids shard activate %s', shard);
    when 'SI005' then
      what := format('would issue IDs %s ms ahead of the clock; the limit is max_ahead = %s', amount, node.max_ahead);
      next := 'Set the server''s clock right, wait until it has caught up, or raise shardids.node.max_ahead.';
    when 'restarted' then
      what := format('issued IDs ahead of the clock when its server restarted, and waits for the clock for another %s ms', amount);
      next := 'Try again then. Restarts within seconds of each other must not take IDs further and further ahead.';
      reason := 'SI005';
    when 'SI012' then
      what := format('would follow a clock that went ahead by %s at once; the limit is max_step = %s',
                     coalesce(justify_hours(make_interval(secs => amount / 1000))::text, 'more than max_step'),
                     node.max_step);
      next := format('If the server''s clock is right: shardids node confirm-clock %s', node.name);
    when 'SI006' then
      what := format('has no more IDs: the layout''s time ended at %s',
                     shardids.time_of(shardids.id_of(((1::bigint << shardids.time_bits()) - 1) << shardids.sequence_bits(), 0)));
      next := 'Check the server''s clock; if it is right, the cluster needs a new layout.';
    when 'SI007' then
      what := format('can''t reserve %s IDs at once', coalesce(amount::text, 'null'));
      next := format('Ask for 1 to %s (shardids.node.max_reserve).', node.max_reserve);
  end case;
  raise exception using
    errcode = reason, hint = next,
    message = format('shard %s %s [node "%s"]', coalesce(shard::text, 'null'), what, node.name);
end
$$;


--
-- Name: refuse_lease(integer, uuid); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse_lease(shard integer, epoch uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  held shardids.lease;
  node constant text := (select n.name from shardids.node n);
begin
  select l.* into held from shardids.lease l where l.shard = refuse_lease.shard;
  if epoch is null and held.shard is null then
    return;
  elsif epoch is null then
    raise exception using errcode = 'SI008',
      message = format('shard %s is being changed: %s by %s [node "%s"]', shard, held.purpose, held.holder, node),
      hint = 'Wait until it has ended; if its process is gone, the next shardids command that changes the shard takes its lease over.';
  elsif held.epoch is distinct from epoch then
    raise exception using errcode = 'SI015',
      message = format('shard %s: this command no longer holds the shard''s lease%s [node "%s"]', shard,
        case when held.shard is null then '' else format(', which was taken over: %s by %s', held.purpose, held.holder) end, node),
      hint = 'Its process was stopped, or cut off from the catalog, for so long that it counted as gone. Nothing more was changed.';
  end if;
end
$$;


--
-- Name: FUNCTION refuse_lease(shard integer, epoch uuid); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refuse_lease(shard integer, epoch uuid) IS 'Refuses unless the lease of a shard is of this epoch, or with null unless nobody holds it; the caller has the advisory lock';


--
-- Name: refuse_number(name, text, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse_number(schema name, reason text, what text, next text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = reason, hint = next,
    message = format('%s [%snode "%s"]', what, 'shard ' || (select s.id from shardids.shard s where s.schema = refuse_number.schema) || ', ',
                     (select n.name from shardids.node n));
end
$$;


--
-- Name: FUNCTION refuse_number(schema name, reason text, what text, next text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refuse_number(schema name, reason text, what text, next text) IS 'Raises an error of the functions for numbers';


--
-- Name: refuse_unclaimed(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse_unclaimed() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = 'SI014', schema = tg_table_schema, table = tg_table_name, column = tg_argv[0],
    message = format('a statement without a claim writes %I.%I.%I, a look-up key: another shard could get the same value',
                     tg_table_schema, tg_table_name, tg_argv[0]),
    hint = format('Write it by a session of shardids. To write it anyway: SET LOCAL shardids.unclaimed_writes = ''allowed'';'
                  ' and afterwards: shardids lookup backfill %s', tg_argv[1]);
end
$$;


--
-- Name: FUNCTION refuse_unclaimed(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refuse_unclaimed() IS 'Refuses a statement that writes a look-up key without a claim';


--
-- Name: refuse_with(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse_with() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = 'SI002',
    message = format(tg_argv[0], format('%I.%I', tg_table_schema, tg_table_name)),
    hint = tg_argv[1];
end
$$;


--
-- Name: FUNCTION refuse_with(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refuse_with() IS 'Refuses a statement with the message and the hint that its trigger names';


--
-- Name: refuse_writes(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refuse_writes() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = 'SI002',
    message = format('table %I.%I is being filled from the database that the cluster adopts', tg_table_schema, tg_table_name),
    hint = 'It takes writes once the cluster has taken over: shardids adopt status';
end
$$;


--
-- Name: FUNCTION refuse_writes(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refuse_writes() IS 'Keeps clients from writing to a table while an adoption fills it';


--
-- Name: refused_count(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.refused_count(shard_count integer) RETURNS integer
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception using
    errcode = 'SI007', message = format('shard_count must be 1 to 65536, not %s', shard_count),
    hint = 'The number of shards is in shardids_catalog.cluster.';
end
$$;


--
-- Name: FUNCTION refused_count(shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.refused_count(shard_count integer) IS 'Refuses a number of shards that no cluster has';


--
-- Name: release(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.release(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if coalesce(pg_sequence_last_value(format('%I.id_offset', shardids.schema_of(shard))::regclass), -1) < 0 then
    execute format('select %I.next_id()', shardids.schema_of(shard));
  end if;
end
$$;


--
-- Name: FUNCTION release(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.release(shard integer) IS 'Draws an ID from a shard that is active and has none of its own yet';


--
-- Name: require_claimable(text, jsonb, integer, integer[]); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]) RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  caller constant name := case current_setting('role') when 'none' then session_user else current_setting('role') end;
  allowed int4multirange := '{}';
  given record;
  refused integer;
begin
  if pg_has_role(caller, current_user, 'usage') or pg_has_role(caller, 'pg_write_all_data', 'usage') then
    allowed := '{(,)}';
  else
    for given in
      select r.shards::int4multirange as shards from jsonb_each_text(rights) r (role, shards)
      where r.role = '' or pg_has_role(caller, (select p.oid from pg_roles p where p.rolname = r.role), 'usage')
    loop
      allowed := allowed + given.shards;
    end loop;
  end if;
  select s.number into refused from unnest(shards) s (number)
  where not s.number <@ allowed or s.number not between 0 and shard_count - 1 limit 1;
  if found then
    raise exception using
      errcode = 'insufficient_privilege',
      message = format('role "%s" may not change claims of shard %s in %s', caller, refused, claims),
      hint = 'INSERT or UPDATE on the table in that shard allows it; after GRANT: shardids lookup create TABLE.COLUMN';
  end if;
end
$$;


--
-- Name: FUNCTION require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]) IS 'Refuses changes of claims for shards in which the calling role may not write; rights has shards by role, and PUBLIC as ""';


--
-- Name: require_lease(integer, uuid); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.require_lease(shard integer, epoch uuid) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not pg_try_advisory_xact_lock_shared(1936220533, shard) then
    perform shardids.wait_for_lock(1936220533, shard, shared => true);
  end if;
  perform shardids.refuse_lease(shard, epoch);
end
$$;


--
-- Name: FUNCTION require_lease(shard integer, epoch uuid); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.require_lease(shard integer, epoch uuid) IS 'Refuses unless the lease of a shard is of this epoch, and keeps it so until the end of the transaction';


--
-- Name: require_zone(name, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.require_zone(schema name, zone text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_timezone_names z where z.name = zone) then
    perform shardids.refuse_number(schema, 'SI007', format('there is no time zone %L', zone),
      'The names are in pg_timezone_names, such as Europe/Berlin.');
  end if;
end
$$;


--
-- Name: reserve(integer, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.reserve(shard integer, n integer, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql
    AS $_$
declare
  id_offset pg_catalog.regclass;
  schema pg_catalog.regnamespace;
begin
  select s.id_offset into id_offset from shardids.shard s where s.id operator(pg_catalog.=) reserve.shard;
  if id_offset is null then
    perform shardids.refuse('SI001', shard);
  end if;
  select c.relnamespace into schema from pg_catalog.pg_class c where c.oid operator(pg_catalog.=) id_offset;
  if schema is null then
    perform shardids.refuse('SI004', shard);
  end if;
  execute pg_catalog.format('select r.first_tick, r.last_tick from %s.set_aside_%s($1, $2) r', schema, shard)
  into first_tick, last_tick using id_offset, n;
end
$_$;


--
-- Name: FUNCTION reserve(shard integer, n integer, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.reserve(shard integer, n integer, OUT first_tick bigint, OUT last_tick bigint) IS 'Sets n consecutive ticks of a shard aside for the caller; shardids.id_of(tick, shard) makes them IDs';


--
-- Name: reset_clock(integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.reset_clock(shard integer, from_ms bigint DEFAULT NULL::bigint, OUT starts_ms bigint, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10s'
    AS $$
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


--
-- Name: FUNCTION reset_clock(shard integer, from_ms bigint, OUT starts_ms bigint, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.reset_clock(shard integer, from_ms bigint, OUT starts_ms bigint, OUT first_tick bigint, OUT last_tick bigint) IS 'Brings a fenced shard, which a wrong clock took into the future, back to the present; activate it after COMMIT';


--
-- Name: lease; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.lease (
    shard integer NOT NULL,
    epoch uuid NOT NULL,
    purpose text NOT NULL,
    holder text NOT NULL,
    began_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT lease_shard_check CHECK (((shard >= 0) AND (shard <= ((1 << shardids.shard_bits()) - 1))))
);


--
-- Name: TABLE lease; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.lease IS 'The commands that are changing shards of this node; change it with shardids.take_leases and shardids.return_leases only';


--
-- Name: COLUMN lease.epoch; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.lease.epoch IS 'Drawn once by each command';


--
-- Name: COLUMN lease.holder; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.lease.holder IS 'The user, machine and process of the command';


--
-- Name: return_leases(integer[], uuid); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.return_leases(shards integer[], epoch uuid) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 DELETE FROM shardids.lease l
   WHERE ((l.shard = ANY (return_leases.shards)) AND (l.epoch = return_leases.epoch));
END;


--
-- Name: FUNCTION return_leases(shards integer[], epoch uuid); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.return_leases(shards integer[], epoch uuid) IS 'Returns the leases of shards, as far as they are of this epoch';


--
-- Name: revoke_usage(integer[], name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.revoke_usage(shards integer[], role name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  perform shardids.wait_for_installer();
  execute (
    select format('revoke execute on function %s from %I', string_agg(shardids.granted_functions(s), ', '), role) from unnest(shards) s);
  execute (
    select format('revoke all on sequence %s from %I', string_agg(format('%1$I.id_counter, %1$I.id_offset', shardids.schema_of(s)), ', '), role)
    from unnest(shards) s);
end
$_$;


--
-- Name: FUNCTION revoke_usage(shards integer[], role name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.revoke_usage(shards integer[], role name) IS 'Takes back what grant_usage gave on shards';


--
-- Name: routed(name, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.routed(route name, adoption text) RETURNS SETOF regclass
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 SELECT a.attrelid
    FROM (pg_attribute a
      JOIN pg_class c ON (((c.oid = a.attrelid) AND (c.relkind = 'r'::"char"))))
   WHERE ((a.attname = routed.route) AND (NOT a.attisdropped) AND (col_description(a.attrelid, (a.attnum)::integer) = routed.adoption))
   ORDER BY a.attrelid;
END;


--
-- Name: FUNCTION routed(route name, adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.routed(route name, adoption text) IS 'The tables of shards that add_route has given a column';


--
-- Name: safe_tick(integer, regclass, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.safe_tick(shard integer, id_counter regclass, id_offset regclass) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION safe_tick(shard integer, id_counter regclass, id_offset regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.safe_tick(shard integer, id_counter regclass, id_offset regclass) IS 'A tick that no incarnation of a shard has issued, if what was lost of each was at most a margin ahead of what is stored or of its jump';


--
-- Name: schema_version(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.schema_version(shard integer) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 WITH own AS MATERIALIZED (
          SELECT o.classid,
             o.objid,
             o.version
            FROM shardids.objects_of(schema_version.shard) o(classid, objid, version)
         ), part("row") AS (
          SELECT format('%s %s %s'::text, o.classid, o.objid, o.version) AS format
            FROM own o
           WHERE (o.version IS NOT NULL)
         UNION ALL
          SELECT format('column %s %s %s'::text, a.attrelid, a.attnum, a.xmin) AS format
            FROM (own o
              JOIN pg_attribute a ON ((a.attrelid = o.objid)))
           WHERE ((o.classid = ('pg_class'::regclass)::oid) AND (o.version IS NOT NULL) AND (a.attnum > 0))
         UNION ALL
          SELECT format('index %s %s'::text, i.indexrelid, i.xmin) AS format
            FROM (own o
              JOIN pg_index i ON ((i.indexrelid = o.objid)))
           WHERE (o.classid = ('pg_class'::regclass)::oid)
         UNION ALL
          SELECT format('trigger %s %s'::text, t.oid, t.tgenabled) AS format
            FROM (own o
              JOIN pg_trigger t ON ((t.tgrelid = o.objid)))
           WHERE ((o.classid = ('pg_class'::regclass)::oid) AND t.tgisinternal AND (t.tgenabled <> 'O'::"char"))
         UNION ALL
          SELECT format('child %s %s %s'::text, i.inhrelid, i.inhparent, i.xmin) AS format
            FROM (own o
              JOIN pg_inherits i ON (((o.objid = i.inhrelid) OR (o.objid = i.inhparent))))
           WHERE (o.classid = ('pg_class'::regclass)::oid)
         UNION ALL
          SELECT format('sequence %s %s'::text, s.seqrelid, s.xmin) AS format
            FROM (own o
              JOIN pg_sequence s ON ((s.seqrelid = o.objid)))
           WHERE (o.classid = ('pg_class'::regclass)::oid)
         UNION ALL
          SELECT format('label %s %s'::text, e.oid, e.xmin) AS format
            FROM (own o
              JOIN pg_enum e ON ((e.enumtypid = o.objid)))
           WHERE (o.classid = ('pg_type'::regclass)::oid)
         UNION ALL
          SELECT format('comment %s %s %s %s'::text, c.classoid, c.objoid, c.objsubid, c.xmin) AS format
            FROM (own o
              JOIN pg_description c ON (((c.classoid = o.classid) AND (c.objoid = o.objid))))
         UNION ALL
          SELECT format('security label %s %s %s %s'::text, l.classoid, l.objoid, l.objsubid, l.xmin) AS format
            FROM (own o
              JOIN pg_seclabel l ON (((l.classoid = o.classid) AND (l.objoid = o.objid))))
         )
  SELECT md5(string_agg(p."row", ','::text ORDER BY p."row")) AS md5
    FROM part p;
END;


--
-- Name: FUNCTION schema_version(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.schema_version(shard integer) IS 'Another text after each change of the definition of anything in a shard''s schema';


--
-- Name: sequence_of(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.sequence_of(id bigint) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((id & (((1)::bigint << shardids.sequence_bits()) - 1)))::integer;


--
-- Name: FUNCTION sequence_of(id bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.sequence_of(id bigint) IS 'The sequence field of an ID';


--
-- Name: sequences_of(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.sequences_of(shard integer) RETURNS TABLE(name text, last_value bigint, is_called boolean)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION sequences_of(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.sequences_of(shard integer) IS 'The application''s own sequences in a shard, and how far they are';


--
-- Name: server(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.server() RETURNS text
    LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  -- The table has another OID once a dump of the whole database was restored in the original's place.
  return format('%s/%s/%s', (select system_identifier from pg_control_system()),
                (select oid from pg_database where datname = current_database()),
                'shardids.shard'::regclass::oid);
end
$$;


--
-- Name: FUNCTION server(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.server() IS 'System identifier of this server, OID of this database, and OID of table shardids.shard';


--
-- Name: timeline(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.timeline() RETURNS integer
    LANGUAGE sql PARALLEL SAFE
    RETURN ((('x'::text || "left"(pg_walfile_name(pg_current_wal_lsn()), 8)))::bit(32))::integer;


--
-- Name: FUNCTION timeline(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.timeline() IS 'WAL timeline of this server; it changes when a standby is promoted';


--
-- Name: server_timeline(); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.server_timeline() RETURNS text
    LANGUAGE sql PARALLEL SAFE
    RETURN ((shardids.server() || '/'::text) || shardids.timeline());


--
-- Name: FUNCTION server_timeline(); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.server_timeline() IS 'This database on this server and its timeline; another one once it was restored elsewhere, or its standby promoted';


--
-- Name: set_aside(regclass, integer, integer, bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.set_aside(id_offset regclass, shard integer, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if n is null or (case when past_tick is null then n < 1 else n <> 0 end) then
    perform shardids.refuse('SI007', shard, n);
  elsif (past_tick >> shardids.sequence_bits()) - shardids.ms_of(clock_timestamp()) > shardids.max_past_ms() then
    raise exception using
      errcode = 'SI005',
      message = format('shard %s can''t go past tick %s, which is %s ms ahead of the clock; the limit is max_past [node "%s"]', shard, past_tick,
                       (past_tick >> shardids.sequence_bits()) - shardids.ms_of(clock_timestamp()), (select n.name from shardids.node n)),
      hint = 'Is it a tick of this cluster? Then set the clocks of both servers right, or raise shardids.node.max_past.';
  end if;
  select a.first_tick, a.last_tick into first_tick, last_tick from shardids.advance(shard, id_offset, n, past_tick) a;
end
$$;


--
-- Name: FUNCTION set_aside(id_offset regclass, shard integer, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.set_aside(id_offset regclass, shard integer, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) IS 'Sets n consecutive ticks of a shard aside, or raises it past a tick';


--
-- Name: set_copy_aside(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.set_copy_aside(shard integer) RETURNS name
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION set_copy_aside(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.set_copy_aside(shard integer) IS 'Renames the schema of an incomplete copy of a shard, and forgets the shard';


--
-- Name: set_counter_zone(integer, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.set_counter_zone(shard integer, tenant text, zone text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
begin
  perform shardids.require_zone(shardids.schema_of(shard), zone);
  perform shardids.create_counters(shard);
  execute format(
    'insert into %I.shardids_counter_zone (tenant, zone) values ($1, $2) on conflict (tenant) do update set zone = excluded.zone',
    shardids.schema_of(shard)) using tenant, zone;
end
$_$;


--
-- Name: FUNCTION set_counter_zone(shard integer, tenant text, zone text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.set_counter_zone(shard integer, tenant text, zone text) IS 'Gives a tenant a time zone of its own';


--
-- Name: set_indexes_aside(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.set_indexes_aside(part regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION set_indexes_aside(part regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.set_indexes_aside(part regclass) IS 'Drops indexes of a table of a shard while its rows arrive, and records them';


--
-- Name: set_number(integer, text, text, bigint, text, boolean, date, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.set_number(shard integer, tenant text, kind text, next bigint, reason text, again boolean DEFAULT false, period date DEFAULT NULL::date, skip boolean DEFAULT false, OUT highest_before bigint, OUT next_number bigint, OUT set_period date) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  schema constant text := shardids.schema_of(shard);
  lanes integer;
  per text;
  keep_days integer;
  newest date;
  what text;
begin
  if to_regclass(format('%I.shardids_counter', schema)) is null then
    perform shardids.refuse_number(schema, 'SI007', 'the shard has no counters', 'To define a kind: shardids counter define');
  end if;
  execute format(
    'select k.lanes, k.per, shardids.period_of(k.per, coalesce($3::timestamp, statement_timestamp() at time zone coalesce(z.zone, k.zone))), '
    'k.keep_days, (select max(c.period) from %1$I.shardids_counter c where c.tenant = $1 and c.kind = $2) '
    'from %1$I.shardids_counter_kind k left join %1$I.shardids_counter_zone z on z.tenant = $1 where k.kind = $2', schema)
  into lanes, per, set_period, keep_days, newest using tenant, kind, period;
  what := case
    when lanes is null then format('there are no numbers of kind %L', kind)
    when coalesce(tenant, '') = '' then format('a number of kind %L needs a tenant', kind)
    when (next between 1 and 999999999999999999) is not true then format('a counter can''t be set to %s', coalesce(next::text, 'null'))
    when coalesce(reason, '') = '' then 'who sets a counter says why'
    -- As next_number() has it: such a draw would end the periods before it.
    when set_period - keep_days > statement_timestamp()::date
      then format('%s is more than the %s days ahead that counters of kind %L are kept', set_period, keep_days, kind)
    end;
  if what is not null then
    perform shardids.refuse_number(schema, 'SI007', what, 'Nothing was changed.');
  end if;
  if newest - keep_days > set_period and not coalesce(again, false) then
    perform shardids.refuse_number(schema, 'SI007',
      format('the numbers of kind %L of tenant %L of %s are not kept any more, and may have been issued', kind, tenant, set_period),
      'If none of them is in use any more, say so: again => true, or shardids counter set --again.');
  end if;
  -- All lanes, begun or not: with their rows locked nobody draws.
  execute format(
    'insert into %I.shardids_counter as c (tenant, kind, period, lane, next_number) '
    'select $1, $2, $3, l, l from generate_series(1, $4) l order by l '
    'on conflict (tenant, kind, period, lane) do update set next_number = c.next_number', schema)
  using tenant, kind, set_period, lanes;
  execute format('select max(c.next_number) - $4 from %I.shardids_counter c where (c.tenant, c.kind, c.period) = ($1, $2, $3)', schema)
  into highest_before using tenant, kind, set_period, lanes;
  highest_before := greatest(highest_before, 0);
  next_number := case when skip then highest_before + 1 + next else next end;
  if next_number <= highest_before and not coalesce(again, false) then
    perform shardids.refuse_number(schema, 'SI007',
      format('numbers %s to %s of kind %L of tenant %L of %s may have been issued, and would be again', next_number, highest_before, kind, tenant, set_period),
      'If none of them is in use any more, say so: again => true, or shardids counter set --again.');
  end if;
  execute format(
    'update %I.shardids_counter c set is_whole = true, era = $5 / (8 * $4), next_number = $5 + ((c.lane - $5) %% $4 + $4) %% $4 '
    'where (c.tenant, c.kind, c.period) = ($1, $2, $3)', schema) using tenant, kind, set_period, lanes::bigint, next_number;
  execute format(
    'insert into %I.shardids_counter_change (tenant, kind, period, highest_before, next_number, reason) '
    'values ($1, $2, $3, $4, $5, $6)', schema) using tenant, kind, set_period, highest_before, next_number, reason;
end
$_$;


--
-- Name: FUNCTION set_number(shard integer, tenant text, kind text, next bigint, reason text, again boolean, period date, skip boolean, OUT highest_before bigint, OUT next_number bigint, OUT set_period date); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.set_number(shard integer, tenant text, kind text, next bigint, reason text, again boolean, period date, skip boolean, OUT highest_before bigint, OUT next_number bigint, OUT set_period date) IS 'Sets the next number of a counter, or skips so many, and records who did and why';


--
-- Name: shard_for_hash(bytea, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_for_hash(digest bytea, shard_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN (mod(((((('x'::text || encode(substr(digest, 1, 8), 'hex'::text)))::bit(64))::bigint)::numeric + CASE WHEN (get_byte(digest, 0) > 127) THEN '18446744073709551616'::numeric ELSE (0)::numeric END), (CASE WHEN ((shard_count >= 1) AND (shard_count <= 65536)) THEN shard_count ELSE shardids.refused_count(shard_count) END)::numeric))::integer;


--
-- Name: FUNCTION shard_for_hash(digest bytea, shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_for_hash(digest bytea, shard_count integer) IS 'The first eight bytes of a hash, without a sign, modulo the number of shards';


--
-- Name: shard_for_key(bytea, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_for_key(key bytea, shard_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN shardids.shard_for_hash(sha256(('\x623a'::bytea || key)), shard_count);


--
-- Name: FUNCTION shard_for_key(key bytea, shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_for_key(key bytea, shard_count integer) IS 'The shard of a key, by its hash, in a cluster of so many shards';


--
-- Name: shard_for_key(bigint, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_for_key(key bigint, shard_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN shardids.shard_for_hash(sha256(convert_to(('i:'::text || key), 'UTF8'::name)), shard_count);


--
-- Name: FUNCTION shard_for_key(key bigint, shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_for_key(key bigint, shard_count integer) IS 'The shard of a key, by its hash, in a cluster of so many shards';


--
-- Name: shard_for_key(text, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_for_key(key text, shard_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN shardids.shard_for_hash(sha256(convert_to(('s:'::text || key), 'UTF8'::name)), shard_count);


--
-- Name: FUNCTION shard_for_key(key text, shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_for_key(key text, shard_count integer) IS 'The shard of a key, by its hash, in a cluster of so many shards';


--
-- Name: shard_for_key(uuid, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_for_key(key uuid, shard_count integer) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN shardids.shard_for_hash(sha256(('\x753a'::bytea || uuid_send(key))), shard_count);


--
-- Name: FUNCTION shard_for_key(key uuid, shard_count integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_for_key(key uuid, shard_count integer) IS 'The shard of a key, by its hash, in a cluster of so many shards';


--
-- Name: shard_of(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.shard_of(id bigint) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (((id >> shardids.sequence_bits()) & (((1)::bigint << shardids.shard_bits()) - 1)))::integer;


--
-- Name: FUNCTION shard_of(id bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.shard_of(id bigint) IS 'The shard in which an ID was born';


--
-- Name: skips_from(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.skips_from(shard integer) RETURNS bigint
    LANGUAGE plpgsql STABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: stage(name, name, regclass, text, text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.stage(schema name, name name, template regclass, home text, adoption text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION stage(schema name, name name, template regclass, home text, adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.stage(schema name, name name, template regclass, home text, adoption text) IS 'Makes the table that takes in the rows of an adopted one, and gives them to the shards';


--
-- Name: stage_shard(regclass, integer, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.stage_shard(parent regclass, shard integer, part regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if not exists (select from pg_inherits i where i.inhparent = parent and i.inhrelid = part) then
    execute format('alter table %s attach partition %s for values in (%s)', parent, part, shard);
  end if;
end
$$;


--
-- Name: FUNCTION stage_shard(parent regclass, shard integer, part regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.stage_shard(parent regclass, shard integer, part regclass) IS 'Lets a table of a shard take rows in';


--
-- Name: staged(text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.staged(adoption text) RETURNS TABLE(parent regclass, part regclass)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 SELECT c.oid,
     i.inhrelid
    FROM ((pg_class c
      JOIN pg_description d ON (((d.classoid = ('pg_class'::regclass)::oid) AND (d.objoid = c.oid) AND (d.objsubid = 0))))
      LEFT JOIN pg_inherits i ON ((i.inhparent = c.oid)))
   WHERE ((c.relkind = 'p'::"char") AND (d.description = staged.adoption));
END;


--
-- Name: FUNCTION staged(adoption text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.staged(adoption text) IS 'The tables of stage that an adoption has made, each with the shards'' tables in it';


--
-- Name: stop(integer, regclass, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.stop(shard integer, id_counter regclass, id_offset regclass, OUT high_water_tick bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: strangers_objects(name[], name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.strangers_objects(schemas name[], owner name) RETURNS TABLE(schema name, kind text, object text, role text, message text, fix text)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
  with wanted as (
    select n.oid, n.nspname, n.nspowner, n.nspacl,
           n.nspname in ('shardids', 'shardids_catalog', 'shardids_query', 'shardids_nodes', 'shardids_foreign',
                         'shardids_local', 'shardids_inplace', 'shardids_relay', 'shardids_adopt', 'shardids_reader')
             as is_whole
    from pg_namespace n where n.nspname = any ($1)),
  ours as (select r.oid from pg_roles r where r.rolname = $2),
  object as (
    select o.*, n.nspname, n.is_whole
    from wanted n
    join (
      select 'pg_class'::regclass::oid as classid, c.oid, c.relnamespace as namespace, c.relname as name, c.relowner as owner
      from pg_class c where c.relkind not in ('i', 'I', 't')
      union all select 'pg_proc'::regclass, p.oid, p.pronamespace, p.proname, p.proowner from pg_proc p
      union all select 'pg_type'::regclass, t.oid, t.typnamespace, t.typname, t.typowner
      from pg_type t where t.typrelid = 0 and not (t.typelem <> 0 and t.typlen = -1)
      union all select 'pg_operator'::regclass, o.oid, o.oprnamespace, o.oprname, o.oprowner from pg_operator o
      union all select 'pg_opclass'::regclass, o.oid, o.opcnamespace, o.opcname, o.opcowner from pg_opclass o
      union all select 'pg_opfamily'::regclass, o.oid, o.opfnamespace, o.opfname, o.opfowner from pg_opfamily o
      union all select 'pg_collation'::regclass, c.oid, c.collnamespace, c.collname, c.collowner from pg_collation c
      union all select 'pg_conversion'::regclass, c.oid, c.connamespace, c.conname, c.conowner from pg_conversion c
      union all select 'pg_ts_dict'::regclass, d.oid, d.dictnamespace, d.dictname, d.dictowner from pg_ts_dict d
      union all select 'pg_ts_config'::regclass, c.oid, c.cfgnamespace, c.cfgname, c.cfgowner from pg_ts_config c
      union all select 'pg_statistic_ext'::regclass, s.oid, s.stxnamespace, s.stxname, s.stxowner from pg_statistic_ext s) o
      on o.namespace = n.oid
    where (n.is_whole
           or o.classid = 'pg_class'::regclass and (o.name in ('id_counter', 'id_offset', 'shardids_version') or starts_with(o.name, 'shardids_counter') or starts_with(o.name, 'shardids_lookup_'))
           or o.classid = 'pg_proc'::regclass and (o.name in ('next_id', 'next_ids', 'next_number', 'next_lane_number') or o.name ~ '^(late_id|set_aside)_[0-9]+$'
                                                   or starts_with(o.name, 'shardids_number_') or starts_with(o.name, 'shardids_lookup_')))
      -- The owner of an extension can make any object of its own a member.
      and not exists (
        select from pg_depend d
        join pg_extension e on e.oid = d.refobjid
        join pg_roles r on r.oid = e.extowner and (r.rolsuper or r.oid = (select oid from ours))
        where d.classid = o.classid and d.objid = o.oid and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')),
  code (relation, classid, oid) as (
    select adrelid, 'pg_attrdef'::regclass::oid, oid from pg_attrdef
    union all select conrelid, 'pg_constraint'::regclass, oid from pg_constraint
    union all select tgrelid, 'pg_trigger'::regclass, oid from pg_trigger
    union all select ev_class, 'pg_rewrite'::regclass, oid from pg_rewrite
    union all select polrelid, 'pg_policy'::regclass, oid from pg_policy),
  stranger (namespace, kind, object, role) as (
    select n.nspname, 'schema', format('schema %I', n.nspname), n.nspowner
    from wanted n where n.nspowner is distinct from (select oid from ours)
    union all
    select distinct n.nspname, 'create', format('schema %I', n.nspname), a.grantee
    from wanted n cross join lateral aclexplode(n.nspacl) a
    where n.is_whole and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
      and a.grantee is distinct from (select oid from ours)
    union all
    select o.nspname, 'object', pg_describe_object(o.classid, o.oid, 0), o.owner
    from object o where o.owner is distinct from (select oid from ours)
    union all
    select distinct o.nspname, 'code', format('%s of %s', pg_describe_object(d.refclassid, d.refobjid, 0), pg_describe_object(o.classid, o.oid, 0)), p.proowner
    from object o
    join code c on c.relation = o.oid
    join pg_depend d on d.classid = c.classid and d.objid = c.oid and d.refclassid = 'pg_proc'::regclass
    join pg_proc p on p.oid = d.refobjid
    join pg_roles r on r.oid = p.proowner and not r.rolsuper
    where o.classid = 'pg_class'::regclass and p.proowner is distinct from (select oid from ours)
    union all
    -- The owner of a server chooses the database that it leads to.
    select n.nspname, 'server', format('foreign server %I', s.srvname), s.srvowner
    from wanted n join pg_foreign_server s on starts_with(s.srvname, 'shardids_')
    where n.nspname = 'shardids_foreign' and s.srvowner is distinct from (select oid from ours))
  select s.namespace, s.kind, s.object, r.name,
         case s.kind
           when 'schema' then format('%s exists and belongs to role "%s", not to "%s"', s.object, r.name, $2)
           when 'create' then format('role "%s" may create objects in %s', r.name, s.object)
           when 'code' then format('%s would run, which belongs to role "%s", not to "%s"', s.object, r.name, $2)
           else format('%s belongs to role "%s", not to "%s"', s.object, r.name, $2)
         end,
         case s.kind
           when 'schema' then format('If nothing needs it: DROP SCHEMA %I. If all that is in it can be trusted: ALTER SCHEMA %1$I OWNER TO %I',
                                     s.namespace, $2)
           when 'create' then format('REVOKE CREATE ON %s FROM %s, and drop what it made there', s.object,
                                     case s.role when 0 then 'PUBLIC' else quote_ident(r.name) end)
           else 'Drop it, if nothing of yours needs it, and run the command again.'
         end
  from stranger s
  cross join lateral (select case s.role when 0 then 'public' else pg_get_userbyid(s.role)::text end) r (name)
  order by s.kind <> 'schema', s.kind <> 'create', 1, 3
$_$;


--
-- Name: FUNCTION strangers_objects(schemas name[], owner name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.strangers_objects(schemas name[], owner name) IS 'Schemas of shardids, and objects in them, that belong to another role than the owner, or that others may create';


--
-- Name: subscribe(integer, name, text, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.subscribe(shard integer, name name, conninfo text, source_version integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION subscribe(shard integer, name name, conninfo text, source_version integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.subscribe(shard integer, name name, conninfo text, source_version integer) IS 'Subscribes to what publish made on another node, its present rows first';


--
-- Name: take_leases(integer[], uuid, text, text, uuid[]); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[]) RETURNS TABLE(shard integer, other_epoch uuid, other_purpose text, other_holder text, other_began_at timestamp with time zone, pid integer)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  wanted integer;
  held shardids.lease;
begin
  foreach wanted in array array(select distinct s from unnest(shards) s order by s) loop
    loop
      insert into shardids.lease (shard, epoch, purpose, holder)
      values (wanted, take_leases.epoch, take_leases.purpose, take_leases.holder) on conflict do nothing;
      exit when found;
      select l.* into held from shardids.lease l where l.shard = wanted for update;
      -- Otherwise it was returned meanwhile.
      exit when found;
    end loop;
    continue when held.shard is distinct from wanted or held.epoch = take_leases.epoch;
    if held.epoch = any (ended) and pg_try_advisory_xact_lock(1936220533, wanted) then
      update shardids.lease l
      set epoch = take_leases.epoch, purpose = take_leases.purpose, holder = take_leases.holder, began_at = clock_timestamp()
      where l.shard = wanted;
      continue;
    end if;
    shard := wanted;
    other_epoch := held.epoch;
    other_purpose := held.purpose;
    other_holder := held.holder;
    other_began_at := held.began_at;
    pid := (select min(l.pid) from pg_locks l
            where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid = 1936220533 and l.objid = wanted::oid
              and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    return next;
  end loop;
end
$$;


--
-- Name: FUNCTION take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[]); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[]) IS 'Takes the leases of shards that nobody holds, or one of the ended epochs; returns those of others, with a session that works under one';


--
-- Name: take_rows(integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.take_rows(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  update shardids.shard s set arrived = 'rows' where s.id = take_rows.shard and s.arrived = 'tables';
  if not found then
    raise exception using errcode = 'SI007', message = format('shard %s does not wait for rows here', shard);
  end if;
  perform shardids.drop_barriers(shard);
end
$$;


--
-- Name: FUNCTION take_rows(shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.take_rows(shard integer) IS 'Opens the transaction that brings the rows of a shard that is moved here';


--
-- Name: takes_reference_writes(name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.takes_reference_writes(name name) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  select g.tgtype & 4 = 0 and coalesce(strpos(pg_get_triggerdef(r.oid), quote_literal(shardids.server_timeline())) > 0, false)
  from pg_trigger g
  left join pg_trigger r on r.tgrelid = g.tgrelid and r.tgname = 'shardids_reference_right' and r.tgenabled in ('O', 'A')
  where g.tgrelid = to_regclass(format('shardids_ref.%I', name)) and g.tgname = 'shardids_reference' and g.tgenabled in ('O', 'A')
$$;


--
-- Name: FUNCTION takes_reference_writes(name name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.takes_reference_writes(name name) IS 'Whether this server may be written to as the writer of a reference table, by its triggers';


--
-- Name: tick_of(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.tick_of(id bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((((id >> (shardids.shard_bits() + shardids.sequence_bits())) & (((1)::bigint << shardids.time_bits()) - 1)) << shardids.sequence_bits()) + (id & (((1)::bigint << shardids.sequence_bits()) - 1)));


--
-- Name: FUNCTION tick_of(id bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.tick_of(id bigint) IS 'The tick of an ID';


--
-- Name: tick_before(bigint, integer); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.tick_before(id bigint, shard integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (shardids.id_of(shardids.tick_of(id), shardids.shard_of(id)) = id) THEN CASE WHEN (shard < shardids.shard_of(id)) THEN (shardids.tick_of(id) | (((1 << shardids.sequence_bits()) - 1))::bigint) WHEN (shard > shardids.shard_of(id)) THEN ((shardids.tick_of(id) - shardids.sequence_of(id)) - 1) ELSE shardids.tick_of(id) END ELSE NULL::bigint END;


--
-- Name: FUNCTION tick_before(id bigint, shard integer); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.tick_before(id bigint, shard integer) IS 'The highest tick of a shard whose ID does not sort after an ID';


--
-- Name: time_of(bigint); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.time_of(id bigint) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN to_timestamp((((((id >> (shardids.shard_bits() + shardids.sequence_bits())) & (((1)::bigint << shardids.time_bits()) - 1)) + shardids.epoch_ms()))::double precision / (1000)::double precision));


--
-- Name: FUNCTION time_of(id bigint); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.time_of(id bigint) IS 'The time at which an ID was born, to the millisecond';


--
-- Name: try_subscribing(text); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.try_subscribing(conninfo text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform shardids.create_subscription('shardids_trial', conninfo, 'enabled = false, slot_name = none');
end
$$;


--
-- Name: FUNCTION try_subscribing(conninfo text); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.try_subscribing(conninfo text) IS 'Tests whether this server can subscribe to another; to be rolled back';


--
-- Name: unguard_key(bigint, regclass, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.unguard_key(move bigint, name regclass, refuses boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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


--
-- Name: FUNCTION unguard_key(move bigint, name regclass, refuses boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.unguard_key(move bigint, name regclass, refuses boolean) IS 'Drops the triggers of a key on a table; with refuses, all but its refusal';


--
-- Name: unguard_part(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.unguard_part(part regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from pg_trigger t where t.tgrelid = part and t.tgname = 'shardids_back_full') then
    execute format('alter table %s replica identity default', part);
  end if;
  execute format('drop trigger if exists shardids_back on %s', part);
  execute format('drop trigger if exists shardids_back_full on %s', part);
end
$$;


--
-- Name: FUNCTION unguard_part(part regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.unguard_part(part regclass) IS 'Undoes guard_part';


--
-- Name: unresolved(regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.unresolved(part regclass) RETURNS TABLE(what text, problem text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;


--
-- Name: FUNCTION unresolved(part regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.unresolved(part regclass) IS 'The indexes, constraints and generated columns of a table whose functions find what they use only by a search_path';


--
-- Name: unstage_shard(regclass, regclass); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.unstage_shard(parent regclass, part regclass) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from pg_inherits i where i.inhparent = parent and i.inhrelid = part) then
    execute format('alter table %s detach partition %s', parent, part);
  end if;
end
$$;


--
-- Name: FUNCTION unstage_shard(parent regclass, part regclass); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.unstage_shard(parent regclass, part regclass) IS 'Leaves a table of a shard with its rows, and on its own';


--
-- Name: unsubscribe(name); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.unsubscribe(name name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from pg_subscription s where s.subname = name and s.subdbid = shardids.database()) then
    execute format('alter subscription %I disable', name);
    execute format('alter subscription %I set (slot_name = none)', name);
    execute format('drop subscription %I', name);
  end if;
end
$$;


--
-- Name: FUNCTION unsubscribe(name name); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.unsubscribe(name name) IS 'Drops a subscription of subscribe';


--
-- Name: wait_for_installer(interval); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.wait_for_installer(patience interval DEFAULT (current_setting('lock_timeout'::text))::interval) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10s'
    AS $$
begin
  if patience > '0' and patience < '10s' then
    perform set_config('lock_timeout', (extract(epoch from patience) * 1000)::integer::text, true);
  end if;
  perform pg_advisory_xact_lock(1936220518);
exception when lock_not_available then
  raise lock_not_available using
    message = format('the installers'' advisory lock 1936220518 is held by %s [node "%s"]',
      coalesce((select string_agg(format('process %s of role "%s"', a.pid, a.usename), ', ')
                from pg_locks l join pg_stat_activity a using (pid)
                where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.classid = 0 and l.objid = 1936220518
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())), 'a session that has just ended'),
      (select n.name from shardids.node n)),
    hint = 'Try again. A session that holds it for long can be ended with pg_terminate_backend(pid).';
end
$$;


--
-- Name: FUNCTION wait_for_installer(patience interval); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.wait_for_installer(patience interval) IS 'Takes the lock of who installs or grants, or names its holder after 10 s';


--
-- Name: wait_for_lock(integer, integer, interval, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.wait_for_lock(class integer, shard integer, patience interval DEFAULT (current_setting('lock_timeout'::text))::interval, shared boolean DEFAULT false) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10s'
    AS $$
begin
  if patience > '0' and patience < '10s' then
    perform set_config('lock_timeout', (extract(epoch from patience) * 1000)::integer::text, true);
  end if;
  if shared then
    perform pg_advisory_xact_lock_shared(class, shard);
  else
    perform pg_advisory_xact_lock(class, shard);
  end if;
exception when lock_not_available then
  raise lock_not_available using
    message = format('shard %s: its advisory lock (%s, %s) is held by %s [node "%s"]', shard, class, shard,
      coalesce((select string_agg(format('process %s of role "%s"', a.pid, a.usename), ', ')
                from pg_locks l join pg_stat_activity a using (pid)
                where l.locktype = 'advisory' and l.granted and l.objsubid = 2
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
                  and l.classid = class::oid and l.objid = shard::oid), 'a session that has just ended'),
      (select n.name from shardids.node n)),
    hint = 'Try again. A session that holds it for long can be ended with pg_terminate_backend(pid).';
end
$$;


--
-- Name: FUNCTION wait_for_lock(class integer, shard integer, patience interval, shared boolean); Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON FUNCTION shardids.wait_for_lock(class integer, shard integer, patience interval, shared boolean) IS 'Takes an advisory lock of shardids, or names its holder after 10 s';


--
-- Name: wait_ms(bigint, bigint, bigint, boolean); Type: FUNCTION; Schema: shardids; Owner: -
--

CREATE FUNCTION shardids.wait_ms(begin_ms bigint, clock_ms bigint, margin_ms bigint, is_promoted boolean) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN ((begin_ms - clock_ms) <= (margin_ms * 6)) THEN GREATEST((0)::bigint, ((begin_ms - clock_ms) - (margin_ms * CASE WHEN is_promoted THEN 4 ELSE 3 END))) ELSE (0)::bigint END;


--
-- Name: changed(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.changed() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster set version = version + 1 returning version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;


--
-- Name: FUNCTION changed(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.changed() IS 'Counts the version up and notifies channel shardids_placement';


--
-- Name: grant_usage(name); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.grant_usage(role name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform shardids_catalog.wait_for_grants();
  execute format('grant usage on schema shardids_catalog to %I', role);
  execute format(
    'grant select on shardids_catalog.cluster, shardids_catalog.node, shardids_catalog.region, shardids_catalog.placement,'
    ' shardids_catalog.query_node, shardids_catalog.old_id_rule, shardids_catalog.old_id_directory, shardids_catalog.old_id_list,'
    ' shardids_catalog.lookup, shardids_catalog.reference_writer, shardids_catalog.route, shardids_catalog.key_home,'
    ' shardids_catalog.key_home_gone, shardids_catalog.moved_key, shardids_catalog.moved_id_list to %I', role);
  execute format('grant select (source, target, is_unsettled, ended_at) on shardids_catalog.key_move to %I', role);
  execute format('grant execute on function shardids_catalog.shard_for_key(text, text), shardids_catalog.percent_decoded(text) to %I', role);
end
$$;


--
-- Name: FUNCTION grant_usage(role name); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.grant_usage(role name) IS 'Lets a role read the catalog';


--
-- Name: homes_changed(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.homes_changed() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster c
  set version = c.version + 1, homes_version = c.version + 1,
      homes_reset = case tg_op when 'TRUNCATE' then c.version + 1 else c.homes_reset end
  returning c.version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;


--
-- Name: FUNCTION homes_changed(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.homes_changed() IS 'Counts the versions up and notifies channel shardids_placement';


--
-- Name: keep_gone_home(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.keep_gone_home() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  insert into shardids_catalog.key_home_gone (kind, key, digest, version)
  select old.kind, old.key, old.digest, c.version + 1 from shardids_catalog.cluster c
  on conflict on constraint key_home_gone_pkey do update set version = excluded.version;
  return null;
end
$$;


--
-- Name: FUNCTION keep_gone_home(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.keep_gone_home() IS 'Remembers a key that is taken out of the directory';


--
-- Name: plain_digest(text, text); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.plain_digest(kind text, key text) RETURNS bytea
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN CASE kind WHEN 'text'::text THEN sha256(convert_to(('s:'::text || key), 'UTF8'::name)) WHEN 'bigint'::text THEN sha256(convert_to(('i:'::text || key), 'UTF8'::name)) WHEN 'uuid'::text THEN sha256(('\x753a'::bytea || uuid_send((key)::uuid))) WHEN 'bytea'::text THEN sha256(('\x623a'::bytea || decode(key, 'hex'::text))) ELSE NULL::bytea END;


--
-- Name: FUNCTION plain_digest(kind text, key text); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.plain_digest(kind text, key text) IS 'The hash of a key and its type, as shardids.shard_for_key has it';


--
-- Name: key_digest(text, text); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.key_digest(kind text, key text) RETURNS bytea
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN substr(CASE WHEN (strpos(kind, '@'::text) = 0) THEN shardids_catalog.plain_digest(kind, key) ELSE sha256((convert_to((substr(kind, strpos(kind, '@'::text)) || ':'::text), 'UTF8'::name) || shardids_catalog.plain_digest(split_part(kind, '@'::text, 1), key))) END, 1, 16);


--
-- Name: FUNCTION key_digest(kind text, key text); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.key_digest(kind text, key text) IS 'The hash by which clients find a key in the directory';


--
-- Name: lock_homes(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.lock_homes() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform from shardids_catalog.cluster for update;
  return null;
end
$$;


--
-- Name: FUNCTION lock_homes(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.lock_homes() IS 'Makes those who change the directory of keys take turns';


--
-- Name: percent_decoded(text); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.percent_decoded(encoded text) RETURNS text
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN (SELECT convert_from(COALESCE(string_agg(CASE WHEN (part.m[1] ~ '^%[0-9A-Fa-f]{2}$'::text) THEN decode(substr(part.m[1], 2), 'hex'::text) ELSE convert_to(part.m[1], 'UTF8'::name) END, '\x'::bytea ORDER BY part.n), '\x'::bytea), 'UTF8'::name) AS convert_from FROM regexp_matches(percent_decoded.encoded, '%[0-9A-Fa-f]{2}|%|[^%]+'::text, 'g'::text) WITH ORDINALITY part(m, n));


--
-- Name: FUNCTION percent_decoded(encoded text); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.percent_decoded(encoded text) IS 'A part of a URL as it is meant';


--
-- Name: refuse_beside_citus(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.refuse_beside_citus() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if (select c.engine from shardids_catalog.cluster c) = 'citus'
     and (tg_table_name <> 'node' or exists (select from shardids_catalog.node)) then
    raise feature_not_supported using
      message = format('%s can''t be done in a cluster on Citus (table shardids_catalog.%I)', tg_argv[0], tg_table_name),
      hint = tg_argv[1];
  end if;
  return null;
end
$$;


--
-- Name: FUNCTION refuse_beside_citus(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.refuse_beside_citus() IS 'Refuses rows of tables that a cluster on Citus does not use';


--
-- Name: refuse_while_references_change(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.refuse_while_references_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  this shardids_catalog.reference_deletion;
  next_writer constant text := (select w.successor from shardids_catalog.reference_writer w);
begin
  if next_writer is not null then
    raise exception using
      errcode = 'SI013',
      message = format('the writer of reference tables is being moved to node "%s"', next_writer),
      hint = 'Wait until it is done. If it was interrupted: repeat shardids reference move, or undo it with shardids reference repair.';
  end if;
  select d.* into this from shardids_catalog.reference_deletion d order by d.started_at limit 1;
  if found then
    raise exception using
      errcode = 'SI013',
      message = format('row %s of reference table %I is being deleted on all nodes', this.key, this.table_name),
      hint = 'Wait until it is done. If it was interrupted: repeat shardids reference delete, or undo it with shardids reference repair.';
  end if;
  return null;
end
$$;


--
-- Name: FUNCTION refuse_while_references_change(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.refuse_while_references_change() IS 'Refuses moves, acceptances of losses and adoptions while a row of a reference table is being deleted, or their writer moved';


--
-- Name: cluster; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.cluster (
    only_row boolean DEFAULT true NOT NULL,
    id uuid NOT NULL,
    layout_name text NOT NULL,
    epoch_ms bigint NOT NULL,
    time_bits integer NOT NULL,
    shard_bits integer NOT NULL,
    sequence_bits integer NOT NULL,
    schema_prefix text NOT NULL,
    shard_count integer NOT NULL,
    engine text DEFAULT 'postgresql'::text NOT NULL,
    old_ids_below bigint,
    version bigint DEFAULT 1 NOT NULL,
    homes_version bigint DEFAULT 0 NOT NULL,
    homes_reset bigint DEFAULT 0 NOT NULL,
    unsettled_version bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT cluster_check CHECK (((shard_count >= 1) AND (shard_count <= (1 << shard_bits)))),
    CONSTRAINT cluster_engine_check CHECK ((engine = ANY (ARRAY['postgresql'::text, 'citus'::text]))),
    CONSTRAINT cluster_old_ids_below_check CHECK ((old_ids_below > 0)),
    CONSTRAINT cluster_only_row_check CHECK (only_row)
);


--
-- Name: TABLE cluster; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.cluster IS 'The cluster; everything but the versions is fixed for good, old_ids_below once it is written';


--
-- Name: COLUMN cluster.engine; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.engine IS 'citus: this database is a Citus coordinator and the only node; Citus places the shards on its workers';


--
-- Name: COLUMN cluster.old_ids_below; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.old_ids_below IS 'IDs below it were issued before their tables were adopted, and say nothing of shards; null: no table was adopted';


--
-- Name: COLUMN cluster.version; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.version IS 'Grows with every change of nodes, regions, placement or the directory of keys';


--
-- Name: COLUMN cluster.homes_version; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.homes_version IS 'The version of the last change of the directory of keys; 0: none';


--
-- Name: COLUMN cluster.homes_reset; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.homes_reset IS 'The version at which the directory was last emptied by TRUNCATE: who has an older one reads it anew';


--
-- Name: COLUMN cluster.unsettled_version; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.cluster.unsettled_version IS 'The version at which rows of a key last began to be in two shards, or ended to; 0: they never did';


--
-- Name: key_home; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.key_home (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    shard integer NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    digest bytea GENERATED ALWAYS AS (shardids_catalog.key_digest(kind, key)) STORED NOT NULL,
    version bigint DEFAULT 0 NOT NULL,
    CONSTRAINT key_home_key CHECK (
CASE split_part(kind, '@'::text, 1)
    WHEN 'text'::text THEN true
    WHEN 'bigint'::text THEN (key ~ '^(0|-?[1-9][0-9]{0,18})$'::text)
    WHEN 'uuid'::text THEN (key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'::text)
    WHEN 'bytea'::text THEN (key ~ '^([0-9a-f]{2})*$'::text)
    ELSE NULL::boolean
END),
    CONSTRAINT key_home_kind CHECK ((kind ~ '^(text|bigint|uuid|bytea)(@[A-Za-z][A-Za-z0-9_.-]{0,39})?$'::text)),
    CONSTRAINT key_home_length CHECK ((octet_length(key) <= 1024))
);


--
-- Name: TABLE key_home; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.key_home IS 'The directory of keys: those whose rows live in another shard than that of their hash';


--
-- Name: COLUMN key_home.kind; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_home.kind IS 'The type of the key: text, bigint, uuid or bytea; after an @ the region whose key it is';


--
-- Name: COLUMN key_home.key; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_home.key IS 'The key as text: a number in decimal, a UUID in lower case with hyphens, bytes in hex';


--
-- Name: COLUMN key_home.version; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_home.version IS 'That of shardids_catalog.cluster when the entry was last written';


--
-- Name: region; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.region (
    name text NOT NULL,
    first_shard integer NOT NULL,
    last_shard integer NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT region_shards CHECK (((first_shard >= 0) AND (first_shard <= last_shard)))
);


--
-- Name: TABLE region; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.region IS 'Names for ranges of shards, which are to live on the nodes of their region alone';


--
-- Name: COLUMN region.last_shard; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.region.last_shard IS 'The last that belongs to it';


--
-- Name: shard_for_key(text, text); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.shard_for_key(key text, region text DEFAULT NULL::text) RETURNS integer
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (SELECT COALESCE((SELECT d.shard FROM shardids_catalog.key_home d WHERE ((d.kind = ('text'::text || COALESCE(('@'::text || shard_for_key.region), ''::text))) AND (d.key = shard_for_key.key))), (s.first_shard + (mod(((h.hash)::numeric + CASE WHEN (h.hash < 0) THEN '18446744073709551616'::numeric ELSE (0)::numeric END), (s.shard_count)::numeric))::integer)) AS "coalesce" FROM ((SELECT ((('x'::text || encode(substr(sha256(convert_to(('s:'::text || shard_for_key.key), 'UTF8'::name)), 1, 8), 'hex'::text)))::bit(64))::bigint AS hash) h CROSS JOIN (SELECT 0 AS first_shard, c.shard_count FROM shardids_catalog.cluster c WHERE (shard_for_key.region IS NULL) UNION ALL SELECT r.first_shard, ((r.last_shard - r.first_shard) + 1) FROM shardids_catalog.region r WHERE (r.name = shard_for_key.region)) s));


--
-- Name: FUNCTION shard_for_key(key text, region text); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.shard_for_key(key text, region text) IS 'The shard where the rows of a text key live, of all shards or of a region''s; null if there is no such region';


--
-- Name: stamp_home(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.stamp_home() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  select c.version + 1 into new.version from shardids_catalog.cluster c;
  return new;
end
$$;


--
-- Name: FUNCTION stamp_home(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.stamp_home() IS 'Gives an entry of the directory its version';


--
-- Name: unsettled_changed(); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.unsettled_changed() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  new_version bigint;
begin
  update shardids_catalog.cluster c set version = c.version + 1, unsettled_version = c.version + 1
  returning c.version into new_version;
  perform pg_notify('shardids_placement', new_version::text);
  return null;
end
$$;


--
-- Name: FUNCTION unsettled_changed(); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.unsettled_changed() IS 'Counts the versions up and notifies channel shardids_placement';


--
-- Name: wait_for_grants(interval); Type: FUNCTION; Schema: shardids_catalog; Owner: -
--

CREATE FUNCTION shardids_catalog.wait_for_grants(patience interval DEFAULT (current_setting('lock_timeout'::text))::interval) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10s'
    AS $$
begin
  if patience > '0' and patience < '10s' then
    perform set_config('lock_timeout', (extract(epoch from patience) * 1000)::integer::text, true);
  end if;
  perform pg_advisory_xact_lock(1936220519);
exception when lock_not_available then
  raise lock_not_available using
    message = format('advisory lock 1936220519, for grants in the catalog, is held by %s',
      coalesce((select string_agg(format('process %s of role "%s"', a.pid, a.usename), ', ')
                from pg_locks l join pg_stat_activity a using (pid)
                where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.classid = 0 and l.objid = 1936220519
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())), 'a session that has just ended')),
    hint = 'Try again. A session that holds it for long can be ended with pg_terminate_backend(pid).';
end
$$;


--
-- Name: FUNCTION wait_for_grants(patience interval); Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON FUNCTION shardids_catalog.wait_for_grants(patience interval) IS 'Takes the lock of who changes the catalog''s grants, or names its holder after 10 s';


--
-- Name: kept; Type: TABLE; Schema: shard_0000; Owner: -
--

CREATE TABLE shard_0000.kept (
    id bigint DEFAULT shard_0000.next_id() NOT NULL
);


--
-- Name: shardids_version; Type: TABLE; Schema: shard_0000; Owner: -
--

CREATE TABLE shard_0000.shardids_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: shardids_version; Type: TABLE; Schema: shard_0001; Owner: -
--

CREATE TABLE shard_0001.shardids_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: before_1; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.before_1
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: SEQUENCE before_1; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON SEQUENCE shardids.before_1 IS 'The latest time below step_1 that a shard of the node had reached before its clock went to step_1 or past it';


--
-- Name: before_2; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.before_2
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: before_3; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.before_3
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: before_4; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.before_4
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: index_aside; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.index_aside (
    part regclass NOT NULL,
    name name NOT NULL,
    definition text NOT NULL,
    comment text
);


--
-- Name: TABLE index_aside; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.index_aside IS 'Indexes that set_indexes_aside has dropped, until make_index makes them again';


--
-- Name: key_arrival; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.key_arrival (
    move bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    is_home boolean DEFAULT false NOT NULL
);


--
-- Name: TABLE key_arrival; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.key_arrival IS 'Moves of keys whose rows have arrived, written in the transaction of the rows: without it a standby took over that lacks them';


--
-- Name: COLUMN key_arrival.move; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.key_arrival.move IS 'The number of the move in shardids_catalog.key_move; gone when the move has ended';


--
-- Name: COLUMN key_arrival.is_home; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.key_arrival.is_home IS 'The key lives here: set after the switch, so that a catalog which has lost the switch does not let the move begin again';


--
-- Name: key_change; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.key_change (
    id bigint NOT NULL,
    move bigint NOT NULL,
    part integer NOT NULL,
    key jsonb NOT NULL,
    xact xid8 DEFAULT pg_current_xact_id() NOT NULL
);


--
-- Name: TABLE key_change; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.key_change IS 'Primary keys of rows that changed in tables of a key that is being moved to another shard';


--
-- Name: COLUMN key_change.id; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.key_change.id IS 'For publications of all tables, which need a key';


--
-- Name: COLUMN key_change.move; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.key_change.move IS 'The number of the move in shardids_catalog.key_move';


--
-- Name: COLUMN key_change.part; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.key_change.part IS 'The position of the table among those of the move';


--
-- Name: key_change_id_seq; Type: SEQUENCE; Schema: shardids; Owner: -
--

ALTER TABLE shardids.key_change ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shardids.key_change_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: key_return; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.key_return (
    move bigint NOT NULL
);


--
-- Name: TABLE key_return; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.key_return IS 'Moves of keys that have come back: their refusal is over';


--
-- Name: node; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.node (
    only_row boolean DEFAULT true NOT NULL,
    name text NOT NULL,
    cluster uuid NOT NULL,
    engine text DEFAULT 'postgresql'::text NOT NULL,
    on_copy text DEFAULT 'refuse'::text NOT NULL,
    max_ahead interval DEFAULT '01:00:00'::interval NOT NULL,
    safety_margin interval DEFAULT '00:00:10'::interval NOT NULL,
    max_past interval DEFAULT '00:01:00'::interval NOT NULL,
    max_step interval DEFAULT '360 days'::interval NOT NULL,
    clock_confirmed_at timestamp with time zone,
    homes_version bigint DEFAULT 0 NOT NULL,
    max_reserve integer DEFAULT 4194304 NOT NULL,
    sees_all boolean DEFAULT pg_has_role(CURRENT_USER, 'pg_read_all_stats'::name, 'usage'::text) NOT NULL,
    CONSTRAINT node_engine_check CHECK ((engine = ANY (ARRAY['postgresql'::text, 'citus'::text]))),
    CONSTRAINT node_margin_within_max_ahead CHECK (((safety_margin * (6)::double precision) <= max_ahead)),
    CONSTRAINT node_max_ahead_check CHECK (((max_ahead >= '00:01:00'::interval) AND (max_ahead <= '10 years'::interval))),
    CONSTRAINT node_max_past_within_max_ahead CHECK ((max_past <= max_ahead)),
    CONSTRAINT node_max_reserve_check CHECK (((max_reserve >= 1) AND (max_reserve <= 16777216))),
    CONSTRAINT node_max_step_check CHECK (((max_step >= '1 day'::interval) AND (max_step <= '100 years'::interval))),
    CONSTRAINT node_on_copy_check CHECK ((on_copy = ANY (ARRAY['refuse'::text, 'warn'::text]))),
    CONSTRAINT node_only_row_check CHECK (only_row),
    CONSTRAINT node_safety_margin_check CHECK ((safety_margin >= '00:00:01'::interval))
);


--
-- Name: TABLE node; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.node IS 'This database as a node of a shardids cluster, and its settings';


--
-- Name: COLUMN node.engine; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.engine IS 'citus: this database is a Citus coordinator, and its shards'' schemas are distributed';


--
-- Name: COLUMN node.on_copy; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.on_copy IS 'What a copied shard does until it is activated: refuse to draw, or warn and draw';


--
-- Name: COLUMN node.max_ahead; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.max_ahead IS 'How far a shard''s IDs may run ahead of this server''s clock';


--
-- Name: COLUMN node.safety_margin; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.safety_margin IS 'How far IDs jump ahead of the clock after a restart; up to three times as far after several, and four times after a promotion';


--
-- Name: COLUMN node.max_past; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.max_past IS 'How far ahead of this server''s clock an ID may be that shardids.advance_past() goes past; six times safety_margin at least';


--
-- Name: COLUMN node.max_step; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.max_step IS 'How far the clock may go ahead at once, since any shard drew, before it has to be confirmed';


--
-- Name: COLUMN node.clock_confirmed_at; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.clock_confirmed_at IS 'This server''s clock when shardids node confirm-clock compared it with others';


--
-- Name: COLUMN node.homes_version; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.homes_version IS 'The version of the catalog''s directory of keys that shardids.key_home was last brought to';


--
-- Name: COLUMN node.max_reserve; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.max_reserve IS 'How many IDs one call may reserve';


--
-- Name: COLUMN node.sees_all; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.node.sees_all IS 'Whether the owner could read all statistics at installation: see shardids.incarnation';


--
-- Name: shard; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.shard (
    id integer NOT NULL,
    schema name NOT NULL,
    state text DEFAULT 'fenced'::text NOT NULL,
    moved_to text,
    high_water_tick bigint DEFAULT '-1'::integer NOT NULL,
    unfences bigint,
    id_counter regclass NOT NULL,
    id_offset regclass NOT NULL,
    server text,
    timeline integer,
    incarnation bigint,
    changed_in xid8 DEFAULT pg_current_xact_id() NOT NULL,
    activated_at timestamp with time zone,
    arrived text,
    issuer text,
    CONSTRAINT shard_arrived_check CHECK ((arrived = ANY (ARRAY['tables'::text, 'rows'::text, 'all'::text]))),
    CONSTRAINT shard_check CHECK (((moved_to IS NULL) = (state <> 'moved'::text))),
    CONSTRAINT shard_id_check CHECK (((id >= 0) AND (id <= ((1 << shardids.shard_bits()) - 1)))),
    CONSTRAINT shard_state_check CHECK ((state = ANY (ARRAY['active'::text, 'fenced'::text, 'moved'::text])))
);


--
-- Name: TABLE shard; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.shard IS 'The shards of this database; change it with shardids.fence and shardids.activate only';


--
-- Name: COLUMN shard.high_water_tick; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.high_water_tick IS 'No tick up to this one is issued again';


--
-- Name: COLUMN shard.unfences; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.unfences IS 'The fenced value of id_offset that the last activation releases';


--
-- Name: COLUMN shard.server; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.server IS 'shardids.server() when the shard was activated';


--
-- Name: COLUMN shard.timeline; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.timeline IS 'WAL timeline when the shard was activated';


--
-- Name: COLUMN shard.incarnation; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.incarnation IS 'shardids.incarnation() when the shard was last fenced or activated';


--
-- Name: COLUMN shard.changed_in; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.changed_in IS 'The transaction that last fenced or activated the shard';


--
-- Name: COLUMN shard.arrived; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.arrived IS 'While the shard is moved here: tables and keys are there, also rows by pg_dump, or also indexes and constraints';


--
-- Name: COLUMN shard.issuer; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON COLUMN shardids.shard.issuer IS 'The function that issues the shard''s IDs since shardids key function --back: its body has a mark';


--
-- Name: shardids_version; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.shardids_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: skipped; Type: TABLE; Schema: shardids; Owner: -
--

CREATE TABLE shardids.skipped (
    shard integer NOT NULL,
    first_tick bigint NOT NULL,
    last_tick bigint NOT NULL,
    CONSTRAINT skipped_check CHECK ((last_tick >= first_tick)),
    CONSTRAINT skipped_shard_check CHECK (((shard >= 0) AND (shard <= ((1 << shardids.shard_bits()) - 1))))
);


--
-- Name: TABLE skipped; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON TABLE shardids.skipped IS 'Ticks that shards of the cluster issued by a wrong clock, and pass over when their time comes; the same on every node';


--
-- Name: step_1; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_1
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: step_2; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_2
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: step_3; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_3
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: step_4; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_4
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: step_dropped; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_dropped
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: SEQUENCE step_dropped; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON SEQUENCE shardids.step_dropped IS 'The latest such time that is in none of step_1 to step_4';


--
-- Name: step_latest; Type: SEQUENCE; Schema: shardids; Owner: -
--

CREATE SEQUENCE shardids.step_latest
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: SEQUENCE step_latest; Type: COMMENT; Schema: shardids; Owner: -
--

COMMENT ON SEQUENCE shardids.step_latest IS 'The latest time to which the clock went ahead by more than an hour at once, in ms since the epoch';


--
-- Name: adoption; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.adoption (
    id bigint NOT NULL,
    source text NOT NULL,
    plan text NOT NULL,
    shapes jsonb NOT NULL,
    step text NOT NULL,
    is_paused boolean DEFAULT false NOT NULL,
    keeps_back boolean DEFAULT false NOT NULL,
    compared jsonb DEFAULT '{}'::jsonb NOT NULL,
    compared_at timestamp with time zone,
    switched_at timestamp with time zone,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    ended_at timestamp with time zone,
    outcome text,
    CONSTRAINT adoption_check CHECK (((ended_at IS NULL) = (outcome IS NULL))),
    CONSTRAINT adoption_outcome_check CHECK ((outcome = ANY (ARRAY['adopted'::text, 'aborted'::text, 'returned'::text])))
);


--
-- Name: TABLE adoption; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.adoption IS 'Databases that were, or are being, taken into the cluster';


--
-- Name: COLUMN adoption.source; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.source IS 'The URL of the database, without its password';


--
-- Name: COLUMN adoption.plan; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.plan IS 'The plan, as shardids adopt plan writes it';


--
-- Name: COLUMN adoption.shapes; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.shapes IS 'The tables of the source, as they have to stay until the switch';


--
-- Name: COLUMN adoption.step; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.step IS 'The last step that was begun';


--
-- Name: COLUMN adoption.keeps_back; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.keeps_back IS 'Whether changes of the shards are sent back to the source after the switch';


--
-- Name: COLUMN adoption.compared; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.compared IS 'Tables that were last found to be the same, each with the version of its storage at the source and the timelines of the servers';


--
-- Name: COLUMN adoption.compared_at; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.compared_at IS 'When all rows were last found to be the same';


--
-- Name: COLUMN adoption.switched_at; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.adoption.switched_at IS 'When the shards took over; from then on there is no abort';


--
-- Name: adoption_id_seq; Type: SEQUENCE; Schema: shardids_catalog; Owner: -
--

ALTER TABLE shardids_catalog.adoption ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shardids_catalog.adoption_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: key_home_gone; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.key_home_gone (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    digest bytea NOT NULL,
    version bigint NOT NULL
);


--
-- Name: TABLE key_home_gone; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.key_home_gone IS 'Keys that were in the directory, for those who read only its changes';


--
-- Name: key_move; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.key_move (
    id bigint NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    source integer NOT NULL,
    target integer NOT NULL,
    choices jsonb NOT NULL,
    step text NOT NULL,
    is_unsettled boolean DEFAULT false NOT NULL,
    epoch uuid NOT NULL,
    rows bigint,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    switched_at timestamp with time zone,
    ended_at timestamp with time zone,
    outcome text,
    CONSTRAINT key_move_check CHECK (((ended_at IS NULL) = (outcome IS NULL))),
    CONSTRAINT key_move_check1 CHECK ((target <> source)),
    CONSTRAINT key_move_outcome_check CHECK ((outcome = ANY (ARRAY['moved'::text, 'aborted'::text])))
);


--
-- Name: TABLE key_move; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.key_move IS 'Moves of keys, with their rows, between shards';


--
-- Name: COLUMN key_move.choices; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.choices IS 'What the caller said: the root with its column, further columns that hold its key, tables that stay';


--
-- Name: COLUMN key_move.step; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.step IS 'The last step that was begun';


--
-- Name: COLUMN key_move.is_unsettled; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.is_unsettled IS 'Whether rows of the key may be in both shards, or only some of them in one';


--
-- Name: COLUMN key_move.epoch; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.epoch IS 'Of the leases of the command that works at the move, or last did';


--
-- Name: COLUMN key_move.rows; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.rows IS 'How many rows the key had when its home was switched';


--
-- Name: COLUMN key_move.switched_at; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_move.switched_at IS 'When the directory of keys got the new home';


--
-- Name: key_move_id_seq; Type: SEQUENCE; Schema: shardids_catalog; Owner: -
--

ALTER TABLE shardids_catalog.key_move ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shardids_catalog.key_move_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: key_pin; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.key_pin (
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    since timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: TABLE key_pin; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.key_pin IS 'Keys whose shard, as the directory or the hash names it, no move takes away from its node';


--
-- Name: COLUMN key_pin.kind; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.key_pin.kind IS 'As in shardids_catalog.key_home';


--
-- Name: lookup; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.lookup (
    table_name text NOT NULL,
    column_name text NOT NULL,
    claims text NOT NULL,
    is_ready boolean DEFAULT false NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: TABLE lookup; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.lookup IS 'Columns whose values are unique over all shards, and find the shard of their row';


--
-- Name: COLUMN lookup.table_name; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.lookup.table_name IS 'The table, as it is named in every shard';


--
-- Name: COLUMN lookup.claims; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.lookup.claims IS 'The table with the claims, as it is named in every shard';


--
-- Name: COLUMN lookup.is_ready; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.lookup.is_ready IS 'Every row has a claim, so a value without a claim has no row';


--
-- Name: move; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.move (
    id bigint NOT NULL,
    shard integer NOT NULL,
    source text NOT NULL,
    target text NOT NULL,
    offline boolean NOT NULL,
    automatic boolean DEFAULT false NOT NULL,
    size_bytes bigint,
    step text NOT NULL,
    epoch uuid DEFAULT gen_random_uuid() NOT NULL,
    schema text,
    high_water_tick bigint,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    ended_at timestamp with time zone,
    outcome text,
    CONSTRAINT move_check CHECK (((ended_at IS NULL) = (outcome IS NULL))),
    CONSTRAINT move_check1 CHECK ((target <> source)),
    CONSTRAINT move_outcome_check CHECK ((outcome = ANY (ARRAY['moved'::text, 'aborted'::text])))
);


--
-- Name: TABLE move; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.move IS 'Moves of shards between nodes';


--
-- Name: COLUMN move.automatic; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.automatic IS 'Whether rebalance --watch began it';


--
-- Name: COLUMN move.size_bytes; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.size_bytes IS 'The size of the shard''s tables and indexes when the move began; null: not known';


--
-- Name: COLUMN move.step; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.step IS 'The last step that was begun';


--
-- Name: COLUMN move.epoch; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.epoch IS 'Of the leases of the command that works at the move, or last did';


--
-- Name: COLUMN move.schema; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.schema IS 'What pg_dump gave for the shard when the target''s tables were made; null when the move is over';


--
-- Name: COLUMN move.high_water_tick; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.move.high_water_tick IS 'The tick above which the target issues IDs, once it is the owner';


--
-- Name: move_id_seq; Type: SEQUENCE; Schema: shardids_catalog; Owner: -
--

ALTER TABLE shardids_catalog.move ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shardids_catalog.move_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: loss; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.loss (
    id bigint DEFAULT nextval('shardids_catalog.move_id_seq'::regclass) NOT NULL,
    shard integer NOT NULL,
    node text NOT NULL,
    home text NOT NULL,
    high_water_tick bigint NOT NULL,
    epoch uuid NOT NULL,
    accepted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    completed_at timestamp with time zone
);


--
-- Name: TABLE loss; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.loss IS 'Shards that were lost with a node and whose loss was accepted, with the homes that they were given';


--
-- Name: COLUMN loss.node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.loss.node IS 'The node that the shard was lost with';


--
-- Name: COLUMN loss.home; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.loss.home IS 'The node that has it since: its newest copy was there, or it was created there again, empty';


--
-- Name: COLUMN loss.high_water_tick; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.loss.high_water_tick IS 'The tick above which the home issues IDs';


--
-- Name: COLUMN loss.epoch; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.loss.epoch IS 'Of the leases of the command that accepted the loss';


--
-- Name: COLUMN loss.completed_at; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.loss.completed_at IS 'When the home was activated and old replication removed; null: not yet';


--
-- Name: moved_id_list; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.moved_id_list (
    origin integer NOT NULL,
    first bigint NOT NULL,
    ids bytea NOT NULL,
    slots bytea NOT NULL,
    CONSTRAINT moved_id_list_check CHECK (((length(slots) * 4) = length(ids))),
    CONSTRAINT moved_id_list_ids_check CHECK (((length(ids) >= 8) AND (length(ids) <= 8192) AND ((length(ids) % 8) = 0)))
);


--
-- Name: TABLE moved_id_list; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.moved_id_list IS 'The keys of moved rows by their IDs, up to 1,024 a row';


--
-- Name: COLUMN moved_id_list.ids; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.moved_id_list.ids IS 'In order, eight bytes an ID, the highest first, two''s complement';


--
-- Name: COLUMN moved_id_list.slots; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.moved_id_list.slots IS 'Two bytes an ID, the higher first: the slot of its key in moved_key';


--
-- Name: moved_key; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.moved_key (
    origin integer NOT NULL,
    slot integer NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    shard integer NOT NULL,
    lowest bigint,
    highest bigint,
    version bigint DEFAULT 0 NOT NULL,
    CONSTRAINT moved_key_slot_check CHECK (((slot >= 0) AND (slot <= 65534)))
);


--
-- Name: TABLE moved_key; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.moved_key IS 'Keys with rows whose IDs are of another shard, by that shard';


--
-- Name: COLUMN moved_key.slot; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.moved_key.slot IS 'The number that stands for the key in shardids_catalog.moved_id_list';


--
-- Name: COLUMN moved_key.shard; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.moved_key.shard IS 'Where the rows live; that of origin while a move is prepared, and after a move back';


--
-- Name: COLUMN moved_key.lowest; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.moved_key.lowest IS 'The lowest ID in the list; others of the origin are not looked for';


--
-- Name: node; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.node (
    name text NOT NULL,
    url text NOT NULL,
    added_at timestamp with time zone DEFAULT now() NOT NULL,
    region text
);


--
-- Name: TABLE node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.node IS 'The PostgreSQL databases that hold shards';


--
-- Name: COLUMN node.region; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.node.region IS 'The region whose shards it takes; null: it takes the shards of no region';


--
-- Name: old_id_directory; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.old_id_directory (
    table_name text NOT NULL,
    chunk bigint NOT NULL,
    shards bytea NOT NULL,
    CONSTRAINT old_id_directory_shards_check CHECK (((length(shards) <= 8192) AND ((length(shards) % 2) = 0)))
);


--
-- Name: TABLE old_id_directory; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.old_id_directory IS 'The shards of old IDs, 4,096 consecutive IDs a row';


--
-- Name: COLUMN old_id_directory.chunk; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_directory.chunk IS 'The IDs, shifted right by 12 bits';


--
-- Name: COLUMN old_id_directory.shards; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_directory.shards IS 'Two bytes an ID, the higher first: its shard, or 65535 if no row had it; none for those past the end';


--
-- Name: old_id_filling; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.old_id_filling (
    table_name text NOT NULL,
    node text NOT NULL,
    last bigint NOT NULL
);


--
-- Name: TABLE old_id_filling; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.old_id_filling IS 'Directories that are being filled: the last ID of each node that is in it';


--
-- Name: old_id_list; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.old_id_list (
    table_name text NOT NULL,
    first bigint NOT NULL,
    ids bytea NOT NULL,
    shards bytea NOT NULL,
    CONSTRAINT old_id_list_check CHECK (((length(shards) * 4) = length(ids))),
    CONSTRAINT old_id_list_ids_check CHECK (((length(ids) >= 8) AND (length(ids) <= 8192) AND ((length(ids) % 8) = 0)))
);


--
-- Name: TABLE old_id_list; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.old_id_list IS 'The shards of old IDs that lie far apart, up to 1,024 a row';


--
-- Name: COLUMN old_id_list.first; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_list.first IS 'The lowest ID of the row';


--
-- Name: COLUMN old_id_list.ids; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_list.ids IS 'In order, eight bytes an ID, the highest first, two''s complement';


--
-- Name: COLUMN old_id_list.shards; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_list.shards IS 'Two bytes an ID, the higher first: its shard';


--
-- Name: old_id_rule; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.old_id_rule (
    table_name text NOT NULL,
    id_column text NOT NULL,
    rule text NOT NULL,
    CONSTRAINT old_id_rule_rule_check CHECK ((rule = ANY (ARRAY['key'::text, 'directory'::text, 'fan-out'::text])))
);


--
-- Name: TABLE old_id_rule; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.old_id_rule IS 'The adopted tables, and how an ID that was issued before finds its shard';


--
-- Name: COLUMN old_id_rule.table_name; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_rule.table_name IS 'The table, as it is named in every shard';


--
-- Name: COLUMN old_id_rule.rule; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.old_id_rule.rule IS 'key: by the hash of the ID; directory: by shardids_catalog.old_id_directory; fan-out: by asking every shard';


--
-- Name: placement; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.placement (
    shard integer NOT NULL,
    node text NOT NULL,
    state text DEFAULT 'creating'::text NOT NULL,
    CONSTRAINT placement_state_check CHECK ((state = ANY (ARRAY['creating'::text, 'active'::text, 'lost'::text])))
);


--
-- Name: TABLE placement; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.placement IS 'Which node holds which shard';


--
-- Name: COLUMN placement.state; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.placement.state IS 'creating: the node may not have it yet; lost: the node was replaced by a server that lacks it, and no client is sent there';


--
-- Name: query_node; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.query_node (
    only_row boolean DEFAULT true NOT NULL,
    node text,
    url text,
    sharded text[] NOT NULL,
    reference text[] NOT NULL,
    made_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT query_node_check CHECK (((node IS NULL) <> (url IS NULL))),
    CONSTRAINT query_node_only_row_check CHECK (only_row)
);


--
-- Name: TABLE query_node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.query_node IS 'The query node: the database with a view of every table over all shards, in schema shardids_query';


--
-- Name: COLUMN query_node.node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.query_node.node IS 'The node that is the query node, if it is one';


--
-- Name: COLUMN query_node.url; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.query_node.url IS 'The database that is the query node, if that is not a node; without a password';


--
-- Name: COLUMN query_node.sharded; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.query_node.sharded IS 'Tables whose rows are each in one shard, though no ID in them says so';


--
-- Name: COLUMN query_node.reference; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.query_node.reference IS 'Tables that have the same rows in every shard';


--
-- Name: recorded_node; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.recorded_node (
    node text NOT NULL,
    contract jsonb NOT NULL,
    recorded_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    recorded_by text NOT NULL
);


--
-- Name: TABLE recorded_node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.recorded_node IS 'The settings and objects outside of shards that a node has to have';


--
-- Name: COLUMN recorded_node.contract; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.recorded_node.contract IS 'Kind, name and definition of each, as catalog/contract.v1.sql writes them';


--
-- Name: recorded_schema; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.recorded_schema (
    revision text NOT NULL,
    server_version integer NOT NULL,
    objects jsonb NOT NULL,
    recorded_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    recorded_by text NOT NULL
);


--
-- Name: TABLE recorded_schema; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.recorded_schema IS 'The objects, with their states, that a shard at a revision has to have';


--
-- Name: COLUMN recorded_schema.revision; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.recorded_schema.revision IS 'What alembic_version says, base if it is empty; empty where a shard has no such table';


--
-- Name: COLUMN recorded_schema.server_version; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.recorded_schema.server_version IS 'The major version of the server that wrote the definitions';


--
-- Name: COLUMN recorded_schema.objects; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.recorded_schema.objects IS 'Kind, name and definition of each object, as catalog/objects.v1.sql writes them; beside it the definition without the shard''s number';


--
-- Name: COLUMN recorded_schema.recorded_by; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.recorded_schema.recorded_by IS 'The command that recorded it';


--
-- Name: reference_deletion; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.reference_deletion (
    table_name name NOT NULL,
    key jsonb NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: TABLE reference_deletion; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.reference_deletion IS 'Rows that are being deleted: each node may or may not have them';


--
-- Name: reference_table; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.reference_table (
    name name NOT NULL,
    state text DEFAULT 'creating'::text NOT NULL,
    CONSTRAINT reference_table_state_check CHECK ((state = ANY (ARRAY['creating'::text, 'active'::text, 'dropping'::text])))
);


--
-- Name: TABLE reference_table; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.reference_table IS 'The tables of schema shardids_ref of every node';


--
-- Name: COLUMN reference_table.state; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.reference_table.state IS 'creating, dropping: under way or interrupted; the command completes it when it is repeated';


--
-- Name: reference_writer; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.reference_writer (
    only_row boolean DEFAULT true NOT NULL,
    node text NOT NULL,
    successor text,
    CONSTRAINT reference_writer_only_row_check CHECK (only_row)
);


--
-- Name: TABLE reference_writer; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.reference_writer IS 'The node on which reference tables are written to';


--
-- Name: COLUMN reference_writer.successor; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.reference_writer.successor IS 'The node that is becoming it; until it is open nobody may be able to write';


--
-- Name: route; Type: VIEW; Schema: shardids_catalog; Owner: -
--

CREATE VIEW shardids_catalog.route AS
 SELECT p.shard,
    (c.schema_prefix || lpad((p.shard)::text, GREATEST(4, length((p.shard)::text)), '0'::text)) AS schema,
    p.node,
    p.state,
    r.name AS region,
    n.url,
    COALESCE(q.host, NULLIF(btrim(shardids_catalog.percent_decoded(u.part[2]), '[]'::text), ''::text)) AS host,
    COALESCE(q.port, u.part[3], '5432'::text) AS port,
    COALESCE(q.database, NULLIF(shardids_catalog.percent_decoded(u.part[4]), ''::text), shardids_catalog.percent_decoded(u.part[1])) AS database
   FROM (((((shardids_catalog.cluster c
     CROSS JOIN shardids_catalog.placement p)
     JOIN shardids_catalog.node n ON ((n.name = p.node)))
     LEFT JOIN shardids_catalog.region r ON (((p.shard >= r.first_shard) AND (p.shard <= r.last_shard))))
     CROSS JOIN LATERAL regexp_match(n.url, '^[a-z]+://(?:([^@/?:]*)(?::[^@/?]*)?@)?(\[[^]]*\]|[^:/?]*)(?::([0-9]+))?(?:/([^?]*))?(?:\?(.*))?$'::text) u(part))
     LEFT JOIN LATERAL ( SELECT COALESCE(string_agg(COALESCE("substring"(h.host, '^([A-Za-z0-9.-]+):[0-9]*$'::text), h.host), ','::text ORDER BY o.n, h.n) FILTER (WHERE (o.name = 'host'::text)), string_agg(h.host, ','::text ORDER BY o.n, h.n) FILTER (WHERE (o.name = 'hostaddr'::text))) AS host,
            COALESCE(NULLIF(max(o.value) FILTER (WHERE (o.name = 'port'::text)), ''::text), string_agg(COALESCE("substring"(h.host, '^[A-Za-z0-9.-]+:([0-9]+)$'::text), '5432'::text), ','::text ORDER BY o.n, h.n) FILTER (WHERE (o.name = 'host'::text))) AS port,
            max(o.value) FILTER (WHERE (o.name = 'dbname'::text)) AS database
           FROM (( SELECT split_part(s.option, '='::text, 1) AS name,
                    s.n,
                    shardids_catalog.percent_decoded(replace(substr(s.option, (strpos(s.option, '='::text) + 1)), '+'::text, ' '::text)) AS value
                   FROM regexp_split_to_table(u.part[5], '&'::text) WITH ORDINALITY s(option, n)) o
             CROSS JOIN LATERAL regexp_split_to_table(o.value, ','::text) WITH ORDINALITY h(host, n))) q ON (true));


--
-- Name: VIEW route; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON VIEW shardids_catalog.route IS 'The schema and the node of each shard, and the address of the node';


--
-- Name: shard_pin; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.shard_pin (
    shard integer NOT NULL,
    node text,
    since timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: TABLE shard_pin; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.shard_pin IS 'Shards that no move takes away from their node';


--
-- Name: COLUMN shard_pin.node; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.shard_pin.node IS 'The only node that the shard may be moved to; null, also once that node was removed: it stays where it is';


--
-- Name: shardids_version; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.shardids_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: skipped; Type: TABLE; Schema: shardids_catalog; Owner: -
--

CREATE TABLE shardids_catalog.skipped (
    shard integer NOT NULL,
    first_tick bigint NOT NULL,
    last_tick bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT skipped_check CHECK ((last_tick >= first_tick))
);


--
-- Name: TABLE skipped; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON TABLE shardids_catalog.skipped IS 'Ticks that shards issued by a wrong clock, and pass over when their time comes: every node has the same in shardids.skipped';


--
-- Name: COLUMN skipped.at; Type: COMMENT; Schema: shardids_catalog; Owner: -
--

COMMENT ON COLUMN shardids_catalog.skipped.at IS 'When shardids shard reset-clock wrote it';


--
-- Data for Name: kept; Type: TABLE DATA; Schema: shard_0000; Owner: -
--

INSERT INTO shard_0000.kept VALUES (385295155931906050);
INSERT INTO shard_0000.kept VALUES (385295155931906051);
INSERT INTO shard_0000.kept VALUES (385295155931906052);


--
-- Data for Name: shardids_version; Type: TABLE DATA; Schema: shard_0000; Owner: -
--

INSERT INTO shard_0000.shardids_version VALUES ('shard_0001');


--
-- Data for Name: shardids_version; Type: TABLE DATA; Schema: shard_0001; Owner: -
--

INSERT INTO shard_0001.shardids_version VALUES ('shard_0001');


--
-- Data for Name: index_aside; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: key_arrival; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: key_change; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: key_home; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: key_return; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: lease; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: node; Type: TABLE DATA; Schema: shardids; Owner: -
--

INSERT INTO shardids.node VALUES (true, 'a', '00000000-0000-4000-8000-000000000001', 'postgresql', 'refuse', '01:00:00', '00:00:10', '00:01:00', '360 days', NULL, 0, 4194304, true);


--
-- Data for Name: shard; Type: TABLE DATA; Schema: shardids; Owner: -
--

INSERT INTO shardids.shard VALUES (0, 'shard_0000', 'active', NULL, -1, -1, 'shard_0000.id_counter', 'shard_0000.id_offset', '7713455131748318069/5/16969', 1, 3190149425108353024, '757', '2026-11-29 05:05:23.584174+00', NULL, NULL);
INSERT INTO shardids.shard VALUES (1, 'shard_0001', 'active', NULL, -1, -1, 'shard_0001.id_counter', 'shard_0001.id_offset', '7713455131748318069/5/16969', 1, 3190149425108353024, '758', '2026-11-29 05:05:23.594305+00', NULL, NULL);


--
-- Data for Name: shardids_version; Type: TABLE DATA; Schema: shardids; Owner: -
--

INSERT INTO shardids.shardids_version VALUES ('node_0001');


--
-- Data for Name: skipped; Type: TABLE DATA; Schema: shardids; Owner: -
--



--
-- Data for Name: adoption; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: cluster; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--

INSERT INTO shardids_catalog.cluster VALUES (true, '00000000-0000-4000-8000-000000000001', 'default', 1704067200000, 41, 12, 10, 'shard_', 2, 'postgresql', NULL, 3, 0, 0, 0, '2026-11-29 05:05:23.428949+00');


--
-- Data for Name: key_home; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: key_home_gone; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: key_move; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: key_pin; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: lookup; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: loss; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: move; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: moved_id_list; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: moved_key; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: node; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--

INSERT INTO shardids_catalog.node VALUES ('a', 'postgresql://somewhere', '2026-11-29 05:05:23.599653+00', NULL);


--
-- Data for Name: old_id_directory; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: old_id_filling; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: old_id_list; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: old_id_rule; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: placement; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--

INSERT INTO shardids_catalog.placement VALUES (0, 'a', 'active');
INSERT INTO shardids_catalog.placement VALUES (1, 'a', 'active');


--
-- Data for Name: query_node; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: recorded_node; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: recorded_schema; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: reference_deletion; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: reference_table; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: reference_writer; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: region; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: shard_pin; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Data for Name: shardids_version; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--

INSERT INTO shardids_catalog.shardids_version VALUES ('catalog_0001');


--
-- Data for Name: skipped; Type: TABLE DATA; Schema: shardids_catalog; Owner: -
--



--
-- Name: id_counter; Type: SEQUENCE SET; Schema: shard_0000; Owner: -
--

SELECT pg_catalog.setval('shard_0000.id_counter', 4, true);


--
-- Name: id_offset; Type: SEQUENCE SET; Schema: shard_0000; Owner: -
--

SELECT pg_catalog.setval('shard_0000.id_offset', 3190149516969876636, true);


--
-- Name: id_counter; Type: SEQUENCE SET; Schema: shard_0001; Owner: -
--

SELECT pg_catalog.setval('shard_0001.id_counter', 1, false);


--
-- Name: id_offset; Type: SEQUENCE SET; Schema: shard_0001; Owner: -
--

SELECT pg_catalog.setval('shard_0001.id_offset', 3190149516969876615, true);


--
-- Name: before_1; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.before_1', 1, true);


--
-- Name: before_2; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.before_2', 1, false);


--
-- Name: before_3; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.before_3', 1, false);


--
-- Name: before_4; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.before_4', 1, false);


--
-- Name: key_change_id_seq; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.key_change_id_seq', 1, false);


--
-- Name: step_1; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_1', 91861523580, true);


--
-- Name: step_2; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_2', 1, false);


--
-- Name: step_3; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_3', 1, false);


--
-- Name: step_4; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_4', 1, false);


--
-- Name: step_dropped; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_dropped', 1, false);


--
-- Name: step_latest; Type: SEQUENCE SET; Schema: shardids; Owner: -
--

SELECT pg_catalog.setval('shardids.step_latest', 91861523591, true);


--
-- Name: adoption_id_seq; Type: SEQUENCE SET; Schema: shardids_catalog; Owner: -
--

SELECT pg_catalog.setval('shardids_catalog.adoption_id_seq', 1, false);


--
-- Name: key_move_id_seq; Type: SEQUENCE SET; Schema: shardids_catalog; Owner: -
--

SELECT pg_catalog.setval('shardids_catalog.key_move_id_seq', 1, false);


--
-- Name: move_id_seq; Type: SEQUENCE SET; Schema: shardids_catalog; Owner: -
--

SELECT pg_catalog.setval('shardids_catalog.move_id_seq', 1, false);


--
-- Name: kept kept_pkey; Type: CONSTRAINT; Schema: shard_0000; Owner: -
--

ALTER TABLE ONLY shard_0000.kept
    ADD CONSTRAINT kept_pkey PRIMARY KEY (id);


--
-- Name: shardids_version shardids_version_pkc; Type: CONSTRAINT; Schema: shard_0000; Owner: -
--

ALTER TABLE ONLY shard_0000.shardids_version
    ADD CONSTRAINT shardids_version_pkc PRIMARY KEY (version_num);


--
-- Name: shardids_version shardids_version_pkc; Type: CONSTRAINT; Schema: shard_0001; Owner: -
--

ALTER TABLE ONLY shard_0001.shardids_version
    ADD CONSTRAINT shardids_version_pkc PRIMARY KEY (version_num);


--
-- Name: index_aside index_aside_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.index_aside
    ADD CONSTRAINT index_aside_pkey PRIMARY KEY (part, name);


--
-- Name: key_arrival key_arrival_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.key_arrival
    ADD CONSTRAINT key_arrival_pkey PRIMARY KEY (move);


--
-- Name: key_change key_change_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.key_change
    ADD CONSTRAINT key_change_pkey PRIMARY KEY (id);


--
-- Name: key_home key_home_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.key_home
    ADD CONSTRAINT key_home_pkey PRIMARY KEY (kind, key);


--
-- Name: key_return key_return_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.key_return
    ADD CONSTRAINT key_return_pkey PRIMARY KEY (move);


--
-- Name: lease lease_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.lease
    ADD CONSTRAINT lease_pkey PRIMARY KEY (shard);


--
-- Name: node node_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.node
    ADD CONSTRAINT node_pkey PRIMARY KEY (only_row);


--
-- Name: shard shard_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.shard
    ADD CONSTRAINT shard_pkey PRIMARY KEY (id);


--
-- Name: shard shard_schema_key; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.shard
    ADD CONSTRAINT shard_schema_key UNIQUE (schema);


--
-- Name: shardids_version shardids_version_pkc; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.shardids_version
    ADD CONSTRAINT shardids_version_pkc PRIMARY KEY (version_num);


--
-- Name: skipped skipped_pkey; Type: CONSTRAINT; Schema: shardids; Owner: -
--

ALTER TABLE ONLY shardids.skipped
    ADD CONSTRAINT skipped_pkey PRIMARY KEY (shard, first_tick);


--
-- Name: adoption adoption_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.adoption
    ADD CONSTRAINT adoption_pkey PRIMARY KEY (id);


--
-- Name: cluster cluster_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.cluster
    ADD CONSTRAINT cluster_pkey PRIMARY KEY (only_row);


--
-- Name: key_home_gone key_home_gone_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.key_home_gone
    ADD CONSTRAINT key_home_gone_pkey PRIMARY KEY (kind, key);


--
-- Name: key_home key_home_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.key_home
    ADD CONSTRAINT key_home_pkey PRIMARY KEY (kind, key);


--
-- Name: key_move key_move_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.key_move
    ADD CONSTRAINT key_move_pkey PRIMARY KEY (id);


--
-- Name: key_pin key_pin_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.key_pin
    ADD CONSTRAINT key_pin_pkey PRIMARY KEY (kind, key);


--
-- Name: lookup lookup_claims; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.lookup
    ADD CONSTRAINT lookup_claims UNIQUE (claims);


--
-- Name: lookup lookup_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.lookup
    ADD CONSTRAINT lookup_pkey PRIMARY KEY (table_name, column_name);


--
-- Name: loss loss_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.loss
    ADD CONSTRAINT loss_pkey PRIMARY KEY (id);


--
-- Name: move move_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.move
    ADD CONSTRAINT move_pkey PRIMARY KEY (id);


--
-- Name: moved_id_list moved_id_list_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.moved_id_list
    ADD CONSTRAINT moved_id_list_pkey PRIMARY KEY (origin, first);


--
-- Name: moved_key moved_key_once; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.moved_key
    ADD CONSTRAINT moved_key_once UNIQUE (kind, key, origin);


--
-- Name: moved_key moved_key_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.moved_key
    ADD CONSTRAINT moved_key_pkey PRIMARY KEY (origin, slot);


--
-- Name: node node_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.node
    ADD CONSTRAINT node_pkey PRIMARY KEY (name);


--
-- Name: old_id_directory old_id_directory_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_directory
    ADD CONSTRAINT old_id_directory_pkey PRIMARY KEY (table_name, chunk);


--
-- Name: old_id_filling old_id_filling_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_filling
    ADD CONSTRAINT old_id_filling_pkey PRIMARY KEY (table_name, node);


--
-- Name: old_id_list old_id_list_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_list
    ADD CONSTRAINT old_id_list_pkey PRIMARY KEY (table_name, first);


--
-- Name: old_id_rule old_id_rule_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_rule
    ADD CONSTRAINT old_id_rule_pkey PRIMARY KEY (table_name);


--
-- Name: placement placement_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.placement
    ADD CONSTRAINT placement_pkey PRIMARY KEY (shard);


--
-- Name: query_node query_node_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.query_node
    ADD CONSTRAINT query_node_pkey PRIMARY KEY (only_row);


--
-- Name: recorded_node recorded_node_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.recorded_node
    ADD CONSTRAINT recorded_node_pkey PRIMARY KEY (node);


--
-- Name: recorded_schema recorded_schema_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.recorded_schema
    ADD CONSTRAINT recorded_schema_pkey PRIMARY KEY (revision, server_version);


--
-- Name: reference_deletion reference_deletion_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_deletion
    ADD CONSTRAINT reference_deletion_pkey PRIMARY KEY (table_name, key);


--
-- Name: reference_table reference_table_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_table
    ADD CONSTRAINT reference_table_pkey PRIMARY KEY (name);


--
-- Name: reference_writer reference_writer_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_writer
    ADD CONSTRAINT reference_writer_pkey PRIMARY KEY (only_row);


--
-- Name: region region_overlap; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.region
    ADD CONSTRAINT region_overlap EXCLUDE USING gist (int4range(first_shard, last_shard, '[]'::text) WITH &&);


--
-- Name: region region_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.region
    ADD CONSTRAINT region_pkey PRIMARY KEY (name);


--
-- Name: shard_pin shard_pin_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.shard_pin
    ADD CONSTRAINT shard_pin_pkey PRIMARY KEY (shard);


--
-- Name: shardids_version shardids_version_pkc; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.shardids_version
    ADD CONSTRAINT shardids_version_pkc PRIMARY KEY (version_num);


--
-- Name: skipped skipped_pkey; Type: CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.skipped
    ADD CONSTRAINT skipped_pkey PRIMARY KEY (shard, first_tick);


--
-- Name: key_change_xact; Type: INDEX; Schema: shardids; Owner: -
--

CREATE INDEX key_change_xact ON shardids.key_change USING btree (move, xact);


--
-- Name: adoption_under_way; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE UNIQUE INDEX adoption_under_way ON shardids_catalog.adoption USING btree ((true)) WHERE (ended_at IS NULL);


--
-- Name: key_home_gone_version_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX key_home_gone_version_idx ON shardids_catalog.key_home_gone USING btree (version);


--
-- Name: key_home_shard_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX key_home_shard_idx ON shardids_catalog.key_home USING btree (shard);


--
-- Name: key_home_version_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX key_home_version_idx ON shardids_catalog.key_home USING btree (version);


--
-- Name: key_move_kind_key_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE UNIQUE INDEX key_move_kind_key_idx ON shardids_catalog.key_move USING btree (kind, key) WHERE (ended_at IS NULL);


--
-- Name: key_move_source_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX key_move_source_idx ON shardids_catalog.key_move USING btree (source) WHERE (ended_at IS NULL);


--
-- Name: key_move_target_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX key_move_target_idx ON shardids_catalog.key_move USING btree (target) WHERE (ended_at IS NULL);


--
-- Name: loss_shard_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE UNIQUE INDEX loss_shard_idx ON shardids_catalog.loss USING btree (shard) WHERE (completed_at IS NULL);


--
-- Name: move_shard_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE UNIQUE INDEX move_shard_idx ON shardids_catalog.move USING btree (shard) WHERE (ended_at IS NULL);


--
-- Name: placement_node_idx; Type: INDEX; Schema: shardids_catalog; Owner: -
--

CREATE INDEX placement_node_idx ON shardids_catalog.placement USING btree (node);


--
-- Name: key_home changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE OR TRUNCATE ON shardids_catalog.key_home FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.homes_changed();


--
-- Name: key_move changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER UPDATE OF is_unsettled ON shardids_catalog.key_move FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.unsettled_changed();


--
-- Name: lookup changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE ON shardids_catalog.lookup FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: moved_key changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE OF shard ON shardids_catalog.moved_key FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.homes_changed();


--
-- Name: node changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE ON shardids_catalog.node FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: old_id_rule changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE ON shardids_catalog.old_id_rule FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: placement changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE ON shardids_catalog.placement FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: reference_writer changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER UPDATE ON shardids_catalog.reference_writer FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: region changed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE ON shardids_catalog.region FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.changed();


--
-- Name: key_home gone; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER gone AFTER DELETE ON shardids_catalog.key_home FOR EACH ROW EXECUTE FUNCTION shardids_catalog.keep_gone_home();


--
-- Name: key_home locked; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER locked BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON shardids_catalog.key_home FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.lock_homes();


--
-- Name: moved_key locked; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER locked BEFORE INSERT OR DELETE OR UPDATE OF shard ON shardids_catalog.moved_key FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.lock_homes();


--
-- Name: adoption refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.adoption FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('an adoption', 'Load the rows by COPY, through the coordinator.');


--
-- Name: lookup refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.lookup FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('a look-up', 'It takes triggers on shards'' tables, which Citus does not have.');


--
-- Name: loss refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.loss FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('a home for a lost shard', 'Promote a standby of the worker, and call citus_update_node.');


--
-- Name: move refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.move FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('moving by copies', 'shardids shard move SHARD --to HOST:PORT moves it by Citus.');


--
-- Name: node refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.node FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('adding a node', 'Add a worker to Citus: select citus_add_node(host, port)');


--
-- Name: query_node refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.query_node FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('a query node', 'Send statements over several shards to the coordinator.');


--
-- Name: reference_writer refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.reference_writer FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('a reference table of shardids', 'Make one of Citus: select create_reference_table(TABLE)');


--
-- Name: region refuse_beside_citus; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_beside_citus BEFORE INSERT ON shardids_catalog.region FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_beside_citus('a region', 'Citus chooses among all of its workers.');


--
-- Name: adoption refuse_while_references_change; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_while_references_change BEFORE INSERT ON shardids_catalog.adoption FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_while_references_change();


--
-- Name: loss refuse_while_references_change; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_while_references_change BEFORE INSERT ON shardids_catalog.loss FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_while_references_change();


--
-- Name: move refuse_while_references_change; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER refuse_while_references_change BEFORE INSERT ON shardids_catalog.move FOR EACH STATEMENT EXECUTE FUNCTION shardids_catalog.refuse_while_references_change();


--
-- Name: key_home renamed; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER renamed AFTER UPDATE OF kind, key ON shardids_catalog.key_home FOR EACH ROW WHEN (((old.kind <> new.kind) OR (old.key <> new.key))) EXECUTE FUNCTION shardids_catalog.keep_gone_home();


--
-- Name: key_home stamped; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER stamped BEFORE INSERT OR UPDATE ON shardids_catalog.key_home FOR EACH ROW EXECUTE FUNCTION shardids_catalog.stamp_home();


--
-- Name: moved_key stamped; Type: TRIGGER; Schema: shardids_catalog; Owner: -
--

CREATE TRIGGER stamped BEFORE INSERT OR UPDATE OF shard ON shardids_catalog.moved_key FOR EACH ROW EXECUTE FUNCTION shardids_catalog.stamp_home();


--
-- Name: reference_deletion deletion_of; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_deletion
    ADD CONSTRAINT deletion_of FOREIGN KEY (table_name) REFERENCES shardids_catalog.reference_table(name);


--
-- Name: key_home key_home_shard; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.key_home
    ADD CONSTRAINT key_home_shard FOREIGN KEY (shard) REFERENCES shardids_catalog.placement(shard);


--
-- Name: moved_key moved_key_shard; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.moved_key
    ADD CONSTRAINT moved_key_shard FOREIGN KEY (shard) REFERENCES shardids_catalog.placement(shard);


--
-- Name: old_id_directory old_id_directory_table_name_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_directory
    ADD CONSTRAINT old_id_directory_table_name_fkey FOREIGN KEY (table_name) REFERENCES shardids_catalog.old_id_rule(table_name) ON UPDATE CASCADE ON DELETE CASCADE;


--
-- Name: old_id_filling old_id_filling_table_name_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_filling
    ADD CONSTRAINT old_id_filling_table_name_fkey FOREIGN KEY (table_name) REFERENCES shardids_catalog.old_id_rule(table_name) ON UPDATE CASCADE ON DELETE CASCADE;


--
-- Name: old_id_list old_id_list_table_name_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.old_id_list
    ADD CONSTRAINT old_id_list_table_name_fkey FOREIGN KEY (table_name) REFERENCES shardids_catalog.old_id_rule(table_name) ON UPDATE CASCADE ON DELETE CASCADE;


--
-- Name: placement placement_node_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.placement
    ADD CONSTRAINT placement_node_fkey FOREIGN KEY (node) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE;


--
-- Name: query_node query_node_node_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.query_node
    ADD CONSTRAINT query_node_node_fkey FOREIGN KEY (node) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE;


--
-- Name: recorded_node recorded_node_node_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.recorded_node
    ADD CONSTRAINT recorded_node_node_fkey FOREIGN KEY (node) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE ON DELETE CASCADE;


--
-- Name: reference_writer reference_writer_node_fkey; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_writer
    ADD CONSTRAINT reference_writer_node_fkey FOREIGN KEY (node) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE;


--
-- Name: node region_of_node; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.node
    ADD CONSTRAINT region_of_node FOREIGN KEY (region) REFERENCES shardids_catalog.region(name);


--
-- Name: shard_pin shard_pin_node; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.shard_pin
    ADD CONSTRAINT shard_pin_node FOREIGN KEY (node) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE ON DELETE SET NULL;


--
-- Name: shard_pin shard_pin_shard; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.shard_pin
    ADD CONSTRAINT shard_pin_shard FOREIGN KEY (shard) REFERENCES shardids_catalog.placement(shard);


--
-- Name: reference_writer successor_of; Type: FK CONSTRAINT; Schema: shardids_catalog; Owner: -
--

ALTER TABLE ONLY shardids_catalog.reference_writer
    ADD CONSTRAINT successor_of FOREIGN KEY (successor) REFERENCES shardids_catalog.node(name) ON UPDATE CASCADE;


--
-- Name: FUNCTION late_id_0(id_offset regclass); Type: ACL; Schema: shard_0000; Owner: -
--

REVOKE ALL ON FUNCTION shard_0000.late_id_0(id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION next_id(); Type: ACL; Schema: shard_0000; Owner: -
--

REVOKE ALL ON FUNCTION shard_0000.next_id() FROM PUBLIC;


--
-- Name: FUNCTION set_aside_0(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: ACL; Schema: shard_0000; Owner: -
--

REVOKE ALL ON FUNCTION shard_0000.set_aside_0(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION next_ids(n integer); Type: ACL; Schema: shard_0000; Owner: -
--

REVOKE ALL ON FUNCTION shard_0000.next_ids(n integer) FROM PUBLIC;


--
-- Name: FUNCTION late_id_1(id_offset regclass); Type: ACL; Schema: shard_0001; Owner: -
--

REVOKE ALL ON FUNCTION shard_0001.late_id_1(id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION next_id(); Type: ACL; Schema: shard_0001; Owner: -
--

REVOKE ALL ON FUNCTION shard_0001.next_id() FROM PUBLIC;


--
-- Name: FUNCTION set_aside_1(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: ACL; Schema: shard_0001; Owner: -
--

REVOKE ALL ON FUNCTION shard_0001.set_aside_1(id_offset regclass, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION next_ids(n integer); Type: ACL; Schema: shard_0001; Owner: -
--

REVOKE ALL ON FUNCTION shard_0001.next_ids(n integer) FROM PUBLIC;


--
-- Name: FUNCTION activate(shard integer, above_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.activate(shard integer, above_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION add_barrier(shard integer, name regclass, replicated boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.add_barrier(shard integer, name regclass, replicated boolean) FROM PUBLIC;


--
-- Name: FUNCTION tables_of(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.tables_of(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION without_barrier(shard integer, replicated boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.without_barrier(shard integer, replicated boolean) FROM PUBLIC;


--
-- Name: FUNCTION add_barriers(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.add_barriers(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION add_route(part regclass, route name, shard integer, adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.add_route(part regclass, route name, shard integer, adoption text) FROM PUBLIC;


--
-- Name: FUNCTION advance(shard integer, id_offset regclass, ticks bigint, past_tick bigint, OUT seen bigint, OUT first_tick bigint, OUT last_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.advance(shard integer, id_offset regclass, ticks bigint, past_tick bigint, OUT seen bigint, OUT first_tick bigint, OUT last_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION "analyze"(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids."analyze"(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION database(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.database() FROM PUBLIC;


--
-- Name: FUNCTION barrier_holders(shard integer, waiting boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.barrier_holders(shard integer, waiting boolean) FROM PUBLIC;


--
-- Name: FUNCTION begin_ms(stored_ms bigint, clock_ms bigint, margin_ms bigint, base bigint, is_promoted boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.begin_ms(stored_ms bigint, clock_ms bigint, margin_ms bigint, base bigint, is_promoted boolean) FROM PUBLIC;


--
-- Name: FUNCTION bind(shard integer, id_counter regclass, id_offset regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.bind(shard integer, id_counter regclass, id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION bound_to(counter regclass, shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.bound_to(counter regclass, shard integer) FROM PUBLIC;


--
-- Name: FUNCTION catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer) FROM PUBLIC;


--
-- Name: FUNCTION check_sequences(shard integer, counter regclass, id_offset regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.check_sequences(shard integer, counter regclass, id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION clock_offset(counter regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.clock_offset(counter regclass) FROM PUBLIC;


--
-- Name: FUNCTION close_back(name regclass, message text, hint text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.close_back(name regclass, message text, hint text) FROM PUBLIC;


--
-- Name: FUNCTION close_table(name regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.close_table(name regclass) FROM PUBLIC;


--
-- Name: FUNCTION counter_changes(shard integer, tenant text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.counter_changes(shard integer, tenant text) FROM PUBLIC;


--
-- Name: FUNCTION counters(shard integer, tenant text, kind text, whole boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.counters(shard integer, tenant text, kind text, whole boolean) FROM PUBLIC;


--
-- Name: FUNCTION create_counters(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.create_counters(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION create_generator(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.create_generator(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION create_subscription(name name, conninfo text, options text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.create_subscription(name name, conninfo text, options text) FROM PUBLIC;


--
-- Name: FUNCTION define_counter(shard integer, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.define_counter(shard integer, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer) FROM PUBLIC;


--
-- Name: FUNCTION define_next_id(shard integer, schema name, called name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.define_next_id(shard integer, schema name, called name) FROM PUBLIC;


--
-- Name: FUNCTION objects_of(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.objects_of(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION dependents_of(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.dependents_of(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION drop_barriers(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.drop_barriers(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION drop_copy(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.drop_copy(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION drop_route(part regclass, route name, adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.drop_route(part regclass, route name, adoption text) FROM PUBLIC;


--
-- Name: FUNCTION drop_staging(adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.drop_staging(adoption text) FROM PUBLIC;


--
-- Name: FUNCTION drop_unknown(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.drop_unknown(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION enter_lease(shard integer, epoch uuid); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.enter_lease(shard integer, epoch uuid) FROM PUBLIC;


--
-- Name: FUNCTION enter_moved(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.enter_moved(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION fence(shard integer, moved_to text, OUT high_water_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.fence(shard integer, moved_to text, OUT high_water_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION follow(name name, conninfo text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.follow(name name, conninfo text) FROM PUBLIC;


--
-- Name: FUNCTION follow_writer(name name, conninfo text, publication name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.follow_writer(name name, conninfo text, publication name) FROM PUBLIC;


--
-- Name: FUNCTION forget_key(move bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.forget_key(move bigint) FROM PUBLIC;


--
-- Name: FUNCTION gate_of(move bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.gate_of(move bigint) FROM PUBLIC;


--
-- Name: FUNCTION grant_usage(shards integer[], role name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.grant_usage(shards integer[], role name) FROM PUBLIC;


--
-- Name: FUNCTION granted_functions(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.granted_functions(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION guard_key(move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean, links name[], is_whole text, takes text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guard_key(move bigint, part integer, name regclass, target integer, key text, is_old text, is_new text, direct boolean, keys name[], is_fixed boolean, links name[], is_whole text, takes text) FROM PUBLIC;


--
-- Name: FUNCTION guard_key_reference(move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guard_key_reference(move bigint, number integer, name regclass, key text, is_own text, refers text, columns name[], direct boolean, late boolean) FROM PUBLIC;


--
-- Name: FUNCTION guard_part(part regclass, logs_all boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guard_part(part regclass, logs_all boolean) FROM PUBLIC;


--
-- Name: FUNCTION guard_reference(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guard_reference() FROM PUBLIC;


--
-- Name: FUNCTION guard_reference_table(name regclass, writer text, is_writer boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guard_reference_table(name regclass, writer text, is_writer boolean) FROM PUBLIC;


--
-- Name: FUNCTION guarded(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.guarded() FROM PUBLIC;


--
-- Name: FUNCTION incarnation(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.incarnation() FROM PUBLIC;


--
-- Name: FUNCTION is_believed(clock_ms bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_believed(clock_ms bigint) FROM PUBLIC;


--
-- Name: FUNCTION is_bound(counter regclass, id_offset regclass, shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_bound(counter regclass, id_offset regclass, shard integer) FROM PUBLIC;


--
-- Name: FUNCTION is_followed(counter regclass, id_offset regclass, shard integer, seen bigint, target bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_followed(counter regclass, id_offset regclass, shard integer, seen bigint, target bigint) FROM PUBLIC;


--
-- Name: FUNCTION is_free(shard integer, tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_free(shard integer, tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION is_late(seen bigint, target bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_late(seen bigint, target bigint) FROM PUBLIC;


--
-- Name: FUNCTION is_near(seen bigint, target bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_near(seen bigint, target bigint) FROM PUBLIC;


--
-- Name: FUNCTION is_of_another_timeline(seen bigint, base bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.is_of_another_timeline(seen bigint, base bigint) FROM PUBLIC;


--
-- Name: FUNCTION keep_reference_key(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.keep_reference_key() FROM PUBLIC;


--
-- Name: FUNCTION keep_whole(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.keep_whole() FROM PUBLIC;


--
-- Name: FUNCTION late_id(id_offset regclass, shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.late_id(id_offset regclass, shard integer) FROM PUBLIC;


--
-- Name: FUNCTION lock_tables(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.lock_tables(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION log_offset(id_offset regclass, base bigint, offset_ms bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.log_offset(id_offset regclass, base bigint, offset_ms bigint) FROM PUBLIC;


--
-- Name: FUNCTION make_gate(move bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.make_gate(move bigint) FROM PUBLIC;


--
-- Name: FUNCTION make_index(part regclass, name name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.make_index(part regclass, name name) FROM PUBLIC;


--
-- Name: FUNCTION make_late_trigger(trigger text, operation text, name regclass, condition text, note text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.make_late_trigger(trigger text, operation text, name regclass, condition text, note text) FROM PUBLIC;


--
-- Name: FUNCTION make_note(name text, body text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.make_note(name text, body text) FROM PUBLIC;


--
-- Name: FUNCTION note_step(clock_ms bigint, reached_ms bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.note_step(clock_ms bigint, reached_ms bigint) FROM PUBLIC;


--
-- Name: FUNCTION noted_steps(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.noted_steps() FROM PUBLIC;


--
-- Name: FUNCTION number_rows(numbered regclass, number name, tenant name, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.number_rows(numbered regclass, number name, tenant name, kind text, per text, zone text, prefix text, padding integer, lanes integer, keep_days integer) FROM PUBLIC;


--
-- Name: FUNCTION open_table(name regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.open_table(name regclass) FROM PUBLIC;


--
-- Name: FUNCTION pass_barrier(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.pass_barrier() FROM PUBLIC;


--
-- Name: FUNCTION pass_barrier(shard integer, name regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.pass_barrier(shard integer, name regclass) FROM PUBLIC;


--
-- Name: FUNCTION pass_key(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.pass_key() FROM PUBLIC;


--
-- Name: FUNCTION pass_key(move bigint, target integer, key text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.pass_key(move bigint, target integer, key text) FROM PUBLIC;


--
-- Name: FUNCTION past_skipped(shard integer, at_ms bigint, ticks bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.past_skipped(shard integer, at_ms bigint, ticks bigint) FROM PUBLIC;


--
-- Name: FUNCTION period_of(per text, moment timestamp without time zone); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.period_of(per text, moment timestamp without time zone) FROM PUBLIC;


--
-- Name: FUNCTION plan_reset(shard integer, from_ms bigint, OUT lead_ms bigint, OUT starts_ms bigint, OUT first_ms bigint, OUT last_ms bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.plan_reset(shard integer, from_ms bigint, OUT lead_ms bigint, OUT starts_ms bigint, OUT first_ms bigint, OUT last_ms bigint) FROM PUBLIC;


--
-- Name: FUNCTION publish(shard integer, name name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.publish(shard integer, name name) FROM PUBLIC;


--
-- Name: FUNCTION raised(seen bigint, target bigint, id_offset regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.raised(seen bigint, target bigint, id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION reached_ms(counter regclass, id_offset regclass, high_water_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.reached_ms(counter regclass, id_offset regclass, high_water_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION reference_columns(names name[]); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.reference_columns(names name[]) FROM PUBLIC;


--
-- Name: FUNCTION refuse_lease(shard integer, epoch uuid); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.refuse_lease(shard integer, epoch uuid) FROM PUBLIC;


--
-- Name: FUNCTION refuse_number(schema name, reason text, what text, next text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.refuse_number(schema name, reason text, what text, next text) FROM PUBLIC;


--
-- Name: FUNCTION refuse_unclaimed(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.refuse_unclaimed() FROM PUBLIC;


--
-- Name: FUNCTION refuse_with(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.refuse_with() FROM PUBLIC;


--
-- Name: FUNCTION refuse_writes(); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.refuse_writes() FROM PUBLIC;


--
-- Name: FUNCTION release(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.release(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.require_claimable(claims text, rights jsonb, shard_count integer, shards integer[]) FROM PUBLIC;


--
-- Name: FUNCTION require_lease(shard integer, epoch uuid); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.require_lease(shard integer, epoch uuid) FROM PUBLIC;


--
-- Name: FUNCTION require_zone(schema name, zone text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.require_zone(schema name, zone text) FROM PUBLIC;


--
-- Name: FUNCTION reset_clock(shard integer, from_ms bigint, OUT starts_ms bigint, OUT first_tick bigint, OUT last_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.reset_clock(shard integer, from_ms bigint, OUT starts_ms bigint, OUT first_tick bigint, OUT last_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION return_leases(shards integer[], epoch uuid); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.return_leases(shards integer[], epoch uuid) FROM PUBLIC;


--
-- Name: FUNCTION revoke_usage(shards integer[], role name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.revoke_usage(shards integer[], role name) FROM PUBLIC;


--
-- Name: FUNCTION routed(route name, adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.routed(route name, adoption text) FROM PUBLIC;


--
-- Name: FUNCTION safe_tick(shard integer, id_counter regclass, id_offset regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.safe_tick(shard integer, id_counter regclass, id_offset regclass) FROM PUBLIC;


--
-- Name: FUNCTION schema_version(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.schema_version(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION sequences_of(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.sequences_of(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION set_aside(id_offset regclass, shard integer, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.set_aside(id_offset regclass, shard integer, n integer, past_tick bigint, OUT first_tick bigint, OUT last_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION set_copy_aside(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.set_copy_aside(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION set_counter_zone(shard integer, tenant text, zone text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.set_counter_zone(shard integer, tenant text, zone text) FROM PUBLIC;


--
-- Name: FUNCTION set_indexes_aside(part regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.set_indexes_aside(part regclass) FROM PUBLIC;


--
-- Name: FUNCTION set_number(shard integer, tenant text, kind text, next bigint, reason text, again boolean, period date, skip boolean, OUT highest_before bigint, OUT next_number bigint, OUT set_period date); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.set_number(shard integer, tenant text, kind text, next bigint, reason text, again boolean, period date, skip boolean, OUT highest_before bigint, OUT next_number bigint, OUT set_period date) FROM PUBLIC;


--
-- Name: FUNCTION skips_from(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.skips_from(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION stage(schema name, name name, template regclass, home text, adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.stage(schema name, name name, template regclass, home text, adoption text) FROM PUBLIC;


--
-- Name: FUNCTION stage_shard(parent regclass, shard integer, part regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.stage_shard(parent regclass, shard integer, part regclass) FROM PUBLIC;


--
-- Name: FUNCTION staged(adoption text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.staged(adoption text) FROM PUBLIC;


--
-- Name: FUNCTION stop(shard integer, id_counter regclass, id_offset regclass, OUT high_water_tick bigint); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.stop(shard integer, id_counter regclass, id_offset regclass, OUT high_water_tick bigint) FROM PUBLIC;


--
-- Name: FUNCTION strangers_objects(schemas name[], owner name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.strangers_objects(schemas name[], owner name) FROM PUBLIC;


--
-- Name: FUNCTION subscribe(shard integer, name name, conninfo text, source_version integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.subscribe(shard integer, name name, conninfo text, source_version integer) FROM PUBLIC;


--
-- Name: FUNCTION take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[]); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.take_leases(shards integer[], epoch uuid, purpose text, holder text, ended uuid[]) FROM PUBLIC;


--
-- Name: FUNCTION take_rows(shard integer); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.take_rows(shard integer) FROM PUBLIC;


--
-- Name: FUNCTION takes_reference_writes(name name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.takes_reference_writes(name name) FROM PUBLIC;


--
-- Name: FUNCTION try_subscribing(conninfo text); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.try_subscribing(conninfo text) FROM PUBLIC;


--
-- Name: FUNCTION unguard_key(move bigint, name regclass, refuses boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.unguard_key(move bigint, name regclass, refuses boolean) FROM PUBLIC;


--
-- Name: FUNCTION unguard_part(part regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.unguard_part(part regclass) FROM PUBLIC;


--
-- Name: FUNCTION unresolved(part regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.unresolved(part regclass) FROM PUBLIC;


--
-- Name: FUNCTION unstage_shard(parent regclass, part regclass); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.unstage_shard(parent regclass, part regclass) FROM PUBLIC;


--
-- Name: FUNCTION unsubscribe(name name); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.unsubscribe(name name) FROM PUBLIC;


--
-- Name: FUNCTION wait_for_installer(patience interval); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.wait_for_installer(patience interval) FROM PUBLIC;


--
-- Name: FUNCTION wait_for_lock(class integer, shard integer, patience interval, shared boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.wait_for_lock(class integer, shard integer, patience interval, shared boolean) FROM PUBLIC;


--
-- Name: FUNCTION wait_ms(begin_ms bigint, clock_ms bigint, margin_ms bigint, is_promoted boolean); Type: ACL; Schema: shardids; Owner: -
--

REVOKE ALL ON FUNCTION shardids.wait_ms(begin_ms bigint, clock_ms bigint, margin_ms bigint, is_promoted boolean) FROM PUBLIC;


--
-- Name: FUNCTION grant_usage(role name); Type: ACL; Schema: shardids_catalog; Owner: -
--

REVOKE ALL ON FUNCTION shardids_catalog.grant_usage(role name) FROM PUBLIC;


--
-- Name: FUNCTION wait_for_grants(patience interval); Type: ACL; Schema: shardids_catalog; Owner: -
--

REVOKE ALL ON FUNCTION shardids_catalog.wait_for_grants(patience interval) FROM PUBLIC;


--
-- PostgreSQL database dump complete
--


