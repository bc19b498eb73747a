-- Purpose:    the generator. One engine serves all shards of the database.
-- Locks:      next_id: none on the usual path. advance, catch_up: advisory lock (1936220516, shard), for microseconds.
-- Privileges: CREATE on schema shardids; the owner must own the shards' sequences.
--
-- A shard keeps its clock in two sequences: a tick is (offset in ms << sequence_bits) + counter, where every
-- draw takes one nextval of id_counter and id_offset changes only under the lock and only upwards. A draw
-- that reads the same offset before and after its nextval had that offset at the time of the nextval, and
-- nextval strictly increases, so ticks strictly increase in the order of the draws, over all sessions.
--
-- The functions that every draw runs have bodies that are parsed when they are created: no search_path of a
-- caller reaches them.

-- The tick of a draw lies between a minute ahead of the clock and 2 ms behind it (-60000 < lag < 2). Whose offset it is, and that
-- the layout has the tick, is seen after that by drawn_id(), for every value of the clock.
create function shardids.is_current(seen bigint, drawn bigint) returns boolean
language sql volatile parallel safe
return abs(date_part('epoch', clock_timestamp()) * 1000
           - (seen + (drawn >> shardids.sequence_bits())
              + (shardids.epoch_ms() - shardids.offset_base() - 29999))) < 30001::double precision;

-- The same, up to 100 ms behind the clock.
create function shardids.is_nearly_current(seen bigint, drawn bigint) returns boolean
language sql volatile parallel safe
return abs(date_part('epoch', clock_timestamp()) * 1000
           - (seen + (drawn >> shardids.sequence_bits())
              + (shardids.epoch_ms() - shardids.offset_base() - 29950))) < 30050::double precision;

-- The tick is one of this incarnation, a time of the layout, and ahead of the clock by no more than the limit. Without the
-- first IS TRUE, pg_dump writes another expression, which makes the same function look changed after a restore.
create function shardids.is_ahead(seen bigint, drawn bigint, max_ahead interval) returns boolean
language sql volatile parallel safe
return ((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits()) between 0 and (1::bigint << shardids.time_bits()) - 1) is true
       and ((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits()) + shardids.epoch_ms()
            - date_part('epoch', clock_timestamp()) * 1000 between 0 and date_part('epoch', max_ahead) * 1000) is true;

create function shardids.is_unchanged(seen bigint, id_offset regclass) returns boolean
language sql volatile parallel safe
return pg_sequence_last_value(id_offset) = seen;

-- Null past the layout's end, and for another incarnation's offset: of those the exclusive or with this one's mark is higher than
-- any time of a layout. A fence never comes here: marks of 64 and more put it before all times that a clock can show. The value
-- drawn is given twice, for its time and its number: only where an argument is used once does PostgreSQL inline a function over a
-- volatile one such as currval().
create function shardids.drawn_id(seen bigint, drawn bigint, again bigint, shard integer) returns bigint
language sql immutable parallel safe
return (((nullif(least((seen # shardids.offset_base()) + (drawn >> shardids.sequence_bits()), 1::bigint << shardids.time_bits()),
                 1::bigint << shardids.time_bits()) << shardids.shard_bits()) + shard)
        << shardids.sequence_bits()) + (again & ((1::bigint << shardids.sequence_bits()) - 1));

-- The functions that follow the clock. id_offset's START names its counter and its shard: ALTER SEQUENCE is its owner's, so
-- for a sequence that shardids made nobody can pass another counter, or take another shard's lock. In a copy by pg_dump the
-- counter has another OID; activate() binds anew, and until then draws go to late_id(), which looks at the shard's row.
create function shardids.bound_to(counter regclass, shard integer) returns bigint
language sql immutable parallel safe
return (counter::oid::bigint << 32) + shard;

create function shardids.is_bound(counter regclass, id_offset regclass, shard integer) returns boolean
language sql stable parallel safe
return (pg_sequence_parameters(id_offset)).start_value = (counter::oid::bigint << 32) + shard;

-- What id_offset is where the counter's next tick is the clock's, or the last of the layout that a step can't pass.
create function shardids.clock_offset(counter regclass) returns bigint
language sql volatile parallel safe
return floor(least(date_part('epoch', clock_timestamp()) * 1000,
                   (shardids.epoch_ms() + (1::bigint << shardids.time_bits()) - 17)::double precision))::bigint
       - (shardids.epoch_ms() - shardids.offset_base()) - (pg_sequence_last_value(counter) >> shardids.sequence_bits());

-- Neither a fence, nor another incarnation's offset, nor one that follows the clock, nor one that is over an hour behind it.
create function shardids.is_late(seen bigint, target bigint) returns boolean
language sql volatile parallel safe
return seen between greatest(shardids.offset_base(), target - 3600000) and target - 2;

create function shardids.is_near(seen bigint, target bigint) returns boolean
language sql immutable parallel safe
return target - seen <= 256;

-- Whether a shard follows the clock without advance(): its sequences, of a shard that is active, and not in an hour before ticks
-- that it has to pass over. A sequence that a restore set back does not lag by as little as is_near().
create function shardids.is_followed(
  counter regclass, id_offset regclass, shard integer, seen bigint, target bigint) returns boolean
language plpgsql volatile parallel safe set search_path = pg_catalog, pg_temp as $$
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

-- A step is id_offset's INCREMENT, 16 ms. nextval logs 32 of them at once and takes no transaction ID; setval logs each time.
create function shardids.raised(seen bigint, target bigint, id_offset regclass) returns bigint
language sql volatile parallel unsafe
return case when shardids.is_near(seen, target) then nextval(id_offset) else setval(id_offset, target) end;

-- Raises id_offset to the clock, by less than a step more, under the lock of advance(); or leaves it to late_id(). The lock
-- is the session's, taken and given back here: on every way out, also of a cancel. Nobody waits for it here. False: the shard
-- may be drawn from a little behind the clock. Null: these sequences are not known to be the shard's.
--
-- It runs as its owner, who may step the sequence. Everybody may execute it: it does what the next draw would. It has no
-- search_path of its own, which would cost more than all else in it: names are qualified, and operators are in bodies that
-- were parsed when they were created.
create function shardids.catch_up(seen bigint, counter regclass, id_offset regclass, shard integer) returns boolean
language plpgsql stable parallel unsafe security definer as $$
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

-- The same without a subtransaction, which Citus makes a SAVEPOINT on every worker: not possible in the middle of a COPY. The lock is
-- taken, used and given back in one expression of built-in and inlined functions, which no cancel interrupts: only an error of the
-- sequence's file, or of a lock on the sequence that somebody else holds, could leave it with the session. What was read before
-- the lock is compared under it.
create function shardids.catch_up_on_citus(seen bigint, counter regclass, id_offset regclass, shard integer) returns boolean
language plpgsql stable parallel unsafe as $$
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

comment on function shardids.catch_up_on_citus(bigint, regclass, regclass, integer) is
  'What catch_up() does on a server with Citus, without a subtransaction; for catch_up() only';

comment on function shardids.catch_up(bigint, regclass, regclass, integer) is
  'Brings a shard that lags to the clock, if it belongs to this incarnation of the server';

-- What a draw costs in a transaction of its own is the number of expressions that it executes, for PL/pgSQL prepares each again,
-- and of the functions and operators in them. So the usual draw is one expression, and what is not usual is lagging_id().
--
-- seen is id_offset as read by the caller: arguments are evaluated before the body, so before nextval. CASE: it is read again
-- after the nextval. currval is what this session drew last, in the same expression.
--
-- Declared stable although it draws: PL/pgSQL then takes no new snapshot for each expression, a tenth of the
-- cost. Sequences are read without snapshots. The caller's expression stays volatile, and so is evaluated
-- once a row, because pg_sequence_last_value in its first argument is.
create function shardids.current_id(seen bigint, counter regclass, id_offset regclass, shard integer) returns bigint
language plpgsql stable parallel unsafe as $$
begin
  return case when shardids.is_current(seen, pg_catalog.nextval(counter))
              then case when shardids.is_unchanged(seen, id_offset)
                   then shardids.drawn_id(seen, pg_catalog.currval(counter), pg_catalog.currval(counter), shard) end end;
end
$$;

comment on function shardids.current_id(bigint, regclass, regclass, integer) is
  'Draws an ID, or null if the shard is not at the clock; call it as the shard''s own next_id()';

-- Draws from a shard that is not at the clock: one that lags, or is far ahead.
create function shardids.lagging_id(counter regclass, id_offset regclass, shard integer) returns bigint
language plpgsql stable parallel unsafe as $$
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

comment on function shardids.lagging_id(regclass, regclass, integer) is
  'Brings a shard that lags to the clock and draws an ID, or null if late_id() has to; what a shard''s next_id() calls';

-- For the owner of the engine only, and for each shard's own late_id_N(), which is run as that owner by whoever may draw:
-- whose privileges to look at, a function that PUBLIC may execute could not tell. The caller names id_offset, as only the
-- shard's next_id() knows it by OID, whatever the schema is called now; the counter that belongs to it is looked up.
create function shardids.late_id(id_offset regclass, shard integer) returns bigint
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.late_id(regclass, integer) is
  'Raises the offset and draws an ID: what next_id() calls where its offset is not current';

-- Any role that can connect can hold an advisory lock, and pg_locks shows everybody their numbers: so nobody waits for
-- one for ever, and who does not get it is told whose it is. A shorter lock_timeout of the caller's, which the default
-- of patience reads before the function sets its own, holds.
create function shardids.wait_for_lock(
  class integer, shard integer, patience interval default current_setting('lock_timeout')::interval, shared boolean default false)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '10s' as $$
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

comment on function shardids.wait_for_lock(integer, integer, interval, boolean) is 'Takes an advisory lock of shardids, or names its holder after 10 s';

create function shardids.wait_for_installer(patience interval default current_setting('lock_timeout')::interval) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '10s' as $$
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

comment on function shardids.wait_for_installer(interval) is 'Takes the lock of who installs or grants, or names its holder after 10 s';

revoke execute on function
  shardids.wait_for_lock(integer, integer, interval, boolean), shardids.wait_for_installer(interval) from public;

-- A tick that the layout has and that the shard does not pass over.
create function shardids.is_free(shard integer, tick bigint) returns boolean
language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $$
begin
  return tick >> shardids.sequence_bits() < 1::bigint << shardids.time_bits()
    and not exists (
      select from shardids.skipped k where k.shard = is_free.shard and tick between k.first_tick and k.last_tick);
end
$$;

-- Where a new incarnation begins, in ms. stored_ms: what is known to have been issued. What was issued last may be lost.
--
-- A restart: all of it was within a margin of the clock, or of what is stored. Two incarnations may begin with the same stored
-- time, if an older copy of the files takes the server's place: the clock tells them apart; ahead of it the mark does, 19 bits.
-- So a restart leads by up to three margins (see wait_ms), and a promotion, whose primary may have restarted and then led by
-- one more, begins four margins past the clock.
create function shardids.begin_ms(stored_ms bigint, clock_ms bigint, margin_ms bigint, base bigint, is_promoted boolean) returns bigint
language sql immutable parallel safe
return greatest(clock_ms + margin_ms * case when is_promoted then 4 else 1 end,
                stored_ms + margin_ms
                  + case when stored_ms > clock_ms then (margin_ms * ((base >> 42) & 524287)) >> 19 else 0 end);

-- How long a new incarnation waits for the clock, so that the jumps of restarts don't add up: the lead of one stays within three
-- margins, or four after a promotion. A lead above six is no restart's, and is not waited for.
create function shardids.wait_ms(begin_ms bigint, clock_ms bigint, margin_ms bigint, is_promoted boolean) returns bigint
language sql immutable parallel safe
return case when begin_ms - clock_ms <= margin_ms * 6
            then greatest(0, begin_ms - clock_ms - margin_ms * case when is_promoted then 4 else 3 end) else 0 end;

-- Whether the node has reason to believe a clock that has gone ahead by more than max_step since the shard was last drawn from:
-- another shard of it is not as far behind, or the clock was confirmed.
create function shardids.is_believed(clock_ms bigint) returns boolean
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.is_believed(bigint) is 'Whether a clock is at most max_step past the latest time that this node has reason to believe; null where it has none';

create function shardids.offset_ms(seen bigint) returns bigint
language sql immutable parallel safe
return case when seen < 0 then -1 - seen else seen & 4398046511103 end;

comment on function shardids.offset_ms(bigint) is 'The offset in ms that a value of id_offset holds, active or fenced';

-- The time, in ms, that a shard has reached, by what is stored of it; sequences that were dropped say nothing.
create function shardids.reached_ms(counter regclass, id_offset regclass, high_water_tick bigint) returns bigint
language plpgsql volatile parallel safe set search_path = pg_catalog, pg_temp as $$
begin
  return greatest(
    (select shardids.offset_ms(pg_sequence_last_value(c.oid)) from pg_class c where c.oid = id_offset)
      + (coalesce((select pg_sequence_last_value(c.oid) from pg_class c where c.oid = counter), 0) >> shardids.sequence_bits()),
    nullif(high_water_tick, -1) >> shardids.sequence_bits());
end
$$;

create function shardids.noted_steps() returns table (slot integer, step_ms bigint, before_ms bigint)
language plpgsql volatile parallel safe rows 4 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    select n, coalesce(pg_sequence_last_value(format('shardids.step_%s', n)::regclass), 0),
           coalesce(pg_sequence_last_value(format('shardids.before_%s', n)::regclass), 0)
    from generate_series(1, 4) n;
end
$$;

comment on function shardids.noted_steps() is
  'The times to which the node''s clock went ahead by more than an hour at once, and those that its shards had reached before; 0: none';

-- The times to which the clock has gone ahead by more than an hour at once, of the whole node: where the IDs of a wrong clock
-- begin; and the time that the shards had reached by then, which is where those of the right one end. Rows would go with the
-- transaction that drew; a sequence stays. The four latest are kept, as a wrong clock's are later than those of the true time.
-- reached_ms is the time of the shard that goes ahead: a clock may have been wrong by less since an earlier note.
-- The lock goes with the subtransaction that raises SI099.
create function shardids.note_step(clock_ms bigint, reached_ms bigint) returns void
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.note_step(bigint, bigint) is 'Notes that the clock has gone ahead by more than an hour at once';

-- Raises an offset where catch_up() does not. Brings the shard to the clock of this server, releases it after
-- activate(), jumps past what a crash or a lost primary may have issued, and sets ticks aside. Every limit on raising stands
-- here: catch_up() follows the clock by an hour at most, within the layout, and away from ticks to pass over.
--
-- first_tick and last_tick bound the ticks set aside. With the lock held the offset goes from old to new:
-- draws that saw the old one have counters up to c2, read after the change, and draws that see the new one
-- have counters above c1, read before it; the ticks (old + c2, new + c1] are nobody else's.
--
-- past_tick is one that the shard is not to issue any more, nor one below it, such as that of an ID of another shard. Ticks that
-- are set aside in the same call may be below it: that is two calls.
--
-- setval is not transactional: what it stored stays if the caller rolls back. So a fence or another incarnation's
-- offset is never left behind on the word of a row that the caller's own transaction wrote.
--
-- The lock goes with the subtransaction that raises SI099, also on cancel. Nobody waits for the clock under it.
create function shardids.advance(
  shard integer, id_offset regclass, ticks bigint default 0, past_tick bigint default -1,
  out seen bigint, out first_tick bigint, out last_tick bigint)
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.advance(integer, regclass, bigint, bigint) is
  'Raises a shard''s offset to the clock and past a tick, and by as many ticks as are to be set aside';

-- The first time, in ms, from the given one on, at which a shard can issue and set so many ticks aside without one that it passes
-- over; a second before those it goes past them.
create function shardids.past_skipped(shard integer, at_ms bigint, ticks bigint default 0) returns bigint
language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $$
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

-- Where increment, cache or cycle were altered the proof does not hold: a session may keep values, and draw them later.
create function shardids.check_sequences(shard integer, counter regclass, id_offset regclass) returns void
language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $$
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

-- A mark's two highest bits are those of the timeline.
create function shardids.is_of_another_timeline(seen bigint, base bigint) returns boolean
language sql immutable parallel safe
return seen is null or (seen >> 61) & 3 <> (base >> 61) & 3;

-- A base with its lowest bit inverted marks an offset of the same incarnation that nobody may draw with yet.
create function shardids.is_marked(seen bigint, base bigint) returns boolean
language sql immutable parallel safe
return seen >= 0 and seen >> 42 in (base >> 42, (base >> 42) # 1);

comment on function shardids.is_marked(bigint, bigint) is 'Whether a value of id_offset was written in the incarnation with this base';

-- Puts an offset on disk before anybody can draw with it. Lost in the midst, by a cancel or a crash, it is an offset
-- that the next advance() begins with. Before PostgreSQL 17 nothing in SQL flushes the log but a COMMIT.
create function shardids.log_offset(id_offset regclass, base bigint, offset_ms bigint) returns void
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('server_version_num')::integer >= 170000 then
    perform setval(id_offset, (base # (1::bigint << 42)) + offset_ms);
    perform pg_logical_emit_message(false, 'shardids', '', true);
  end if;
end
$$;

comment on function shardids.log_offset(regclass, bigint, bigint) is 'Flushes the log with a shard''s next offset, on PostgreSQL 17 and later';

revoke execute on function shardids.log_offset(regclass, bigint, bigint) from public;

-- Raises the SQLSTATE reason. amount: milliseconds ahead of the clock (SI005), until the clock is near enough after a restart
-- (restarted), by which the clock went ahead (SI012), or IDs asked for (SI007).
create function shardids.refuse(reason text, shard integer, amount bigint default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
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

-- How far ahead of the clock an ID may be that a shard goes past: never less than what restarts and promotions lead by.
create function shardids.max_past_ms() returns bigint
language sql stable parallel safe set search_path = pg_catalog, pg_temp as $$
  select (extract(epoch from greatest(n.max_past, n.safety_margin * 6)) * 1000)::bigint from shardids.node n;
$$;

comment on function shardids.max_past_ms() is 'How many ms ahead of the clock an ID may be that a shard goes past';

-- Run as the owner of the engine by each shard's own set_aside_N(n). With a past_tick n is 0: see advance().
create function shardids.set_aside(
  id_offset regclass, shard integer, n integer, past_tick bigint, out first_tick bigint, out last_tick bigint)
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.set_aside(regclass, integer, integer, bigint) is
  'Sets n consecutive ticks of a shard aside, or raises it past a tick';

revoke execute on function
  shardids.catch_up_on_citus(bigint, regclass, regclass, integer), shardids.bound_to(regclass, integer), shardids.is_bound(regclass, regclass, integer), shardids.clock_offset(regclass),
  shardids.is_late(bigint, bigint), shardids.is_near(bigint, bigint), shardids.is_followed(regclass, regclass, integer, bigint, bigint),
  shardids.is_free(integer, bigint), shardids.begin_ms(bigint, bigint, bigint, bigint, boolean), shardids.wait_ms(bigint, bigint, bigint, boolean),
  shardids.is_believed(bigint), shardids.reached_ms(regclass, regclass, bigint), shardids.noted_steps(), shardids.note_step(bigint, bigint), shardids.past_skipped(integer, bigint, bigint),
  shardids.check_sequences(integer, regclass, regclass), shardids.is_of_another_timeline(bigint, bigint),
  shardids.raised(bigint, bigint, regclass), shardids.incarnation(), shardids.late_id(regclass, integer), shardids.advance(integer, regclass, bigint, bigint),
  shardids.set_aside(regclass, integer, integer, bigint)
  from public;

-- Calls the shard's own function, which the caller has to be allowed to execute.
create function shardids.reserve(shard integer, n integer, out first_tick bigint, out last_tick bigint)
language plpgsql volatile parallel unsafe as $$
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
$$;

comment on function shardids.reserve(integer, integer) is
  'Sets n consecutive ticks of a shard aside for the caller; shardids.id_of(tick, shard) makes them IDs';

-- The highest tick of a shard whose ID does not sort after this one; null if no shard of the layout has such an ID.
create function shardids.tick_before(id bigint, shard integer) returns bigint
language sql immutable parallel safe
return case when shardids.id_of(shardids.tick_of(id), shardids.shard_of(id)) = id
            then case when shard < shardids.shard_of(id) then shardids.tick_of(id) | ((1 << shardids.sequence_bits()) - 1)
                      when shard > shardids.shard_of(id) then (shardids.tick_of(id) - shardids.sequence_of(id)) - 1
                      else shardids.tick_of(id) end end;

-- Whether the shard has issued a tick at least as high, or can't issue it any more. It is told by what is stored, not by the
-- clock, which may step back before the draw. Not of an offset that another incarnation wrote, or of a fence.
create function shardids.is_past(seen bigint, drawn bigint, past_tick bigint) returns boolean
language sql stable parallel safe
return seen >= 0 and seen & ~4398046511103 = shardids.offset_base()
       and ((seen & 4398046511103) << shardids.sequence_bits()) + coalesce(drawn, 0) >= past_tick;

-- Like reserve(), it calls the shard's own function, which the caller has to be allowed to execute.
create function shardids.advance_past(shard integer, id bigint) returns boolean
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
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
$$;

comment on function shardids.tick_before(bigint, integer) is 'The highest tick of a shard whose ID does not sort after an ID';
comment on function shardids.is_past(bigint, bigint, bigint) is 'Whether a shard will issue no tick up to this one any more';
comment on function shardids.advance_past(integer, bigint) is
  'Lets a shard issue no ID from now on that sorts before this one; whether it had to be raised';
