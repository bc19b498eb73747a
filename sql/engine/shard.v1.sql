-- Purpose:    the generator of one shard, in the shard's schema: two sequences and two functions.
-- Settings:   shardids.shard, set by shardids.enter_shard(shard)
-- Locks:      none beyond those of CREATE.
-- Privileges: membership in the owner of schema shardids.

do $do$
declare
  shard constant integer := current_setting('shardids.shard');
  schema constant text := shardids.schema_of(shard);
  owner constant name := (select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'shardids');
begin
  execute format('create sequence %I.id_counter as bigint no cycle', schema);
  -- One nextval of id_offset is a step of 16 ms.
  execute format('create sequence %I.id_offset as bigint increment 16 minvalue -9223372036854775808 start %s no cycle', schema,
                 case when shardids.skips_from(shard) is null
                      then shardids.bound_to(format('%I.id_counter', schema)::regclass, shard) else 0 end);
  -- Whoever may execute these two raises the shard's offset, as the owner of the engine. In PL/pgSQL, which keeps plans;
  -- so they name no sequence: that name would be another's after the schema was renamed.
  execute format(
    'create function %1$I.late_id(id_offset regclass) returns bigint '
    'language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as '
    '$$begin return shardids.late_id(id_offset, %2$s); end$$', schema, shard);
  execute format(
    'create function %1$I.set_aside(id_offset regclass, n integer, past_tick bigint default null, out first_tick bigint, out last_tick bigint) '
    'language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as '
    '$$begin select r.first_tick, r.last_tick into first_tick, last_tick '
    'from shardids.set_aside(id_offset, %2$s, n, past_tick) r; end$$', schema, shard);
  perform shardids.define_next_id(shard, schema);
  execute format(
    'create function %1$I.next_ids(n integer) returns setof bigint language sql volatile parallel unsafe rows 1000 '
    'begin atomic '
    -- A reservation moves the shard by at least a millisecond; a few IDs are cheaper drawn.
    'select %1$I.next_id() from generate_series(1, n) where n between 1 and 63 '
    'union all '
    'select shardids.id_of(generate_series(r.first_tick, r.last_tick), %2$s) '
    'from %1$I.set_aside(''%1$I.id_offset''::regclass, n) r where (n between 1 and 63) is not true; end', schema, shard);
  execute format(
    'revoke execute on function %1$I.next_id(), %1$I.next_ids(integer), %1$I.late_id(regclass), %1$I.set_aside(regclass, integer, bigint) from public', schema);
  execute format('comment on function %1$I.next_id() is ''The next ID of shard %2$s''', schema, shard);
  execute format('comment on function %1$I.next_ids(integer) is ''The next n IDs of shard %2$s, in order''', schema, shard);
  execute format('comment on function %1$I.late_id(regclass) is ''What next_id() calls where the clock has gone ahead''', schema);
  execute format('comment on function %1$I.set_aside(regclass, integer, bigint) is ''What next_ids(n), shardids.reserve() and shardids.advance_past() call''', schema);
  if owner <> current_user then
    execute format('alter sequence %I.id_counter owner to %I', schema, owner);
    execute format('alter sequence %I.id_offset owner to %I', schema, owner);
    execute format('alter function %I.next_id() owner to %I', schema, owner);
    execute format('alter function %I.next_ids(integer) owner to %I', schema, owner);
    execute format('alter function %I.late_id(regclass) owner to %I', schema, owner);
    execute format('alter function %I.set_aside(regclass, integer, bigint) owner to %I', schema, owner);
    execute format('alter table if exists %I.shardids_version owner to %I', schema, owner);
  end if;
  -- Issues IDs from now on: if this is rolled back, the sequences go with it.
  if shardids.ms_of(clock_timestamp()) >= 1::bigint << shardids.time_bits() then
    perform shardids.refuse('SI006', shard);
  elsif shardids.is_believed(shardids.ms_of(clock_timestamp())) is false then
    perform shardids.refuse('SI012', shard);
  end if;
  perform shardids.note_step(shardids.ms_of(clock_timestamp()), 0);
  perform setval(format('%I.id_offset', schema)::regclass,
                 shardids.incarnation() + greatest(0, shardids.ms_of(clock_timestamp())));
  insert into shardids.shard
    (id, schema, state, unfences, id_counter, id_offset, server, timeline, incarnation, activated_at)
  values (shard, schema, 'active', -1, format('%I.id_counter', schema)::regclass, format('%I.id_offset', schema)::regclass,
          shardids.server(), shardids.timeline(), shardids.incarnation(), clock_timestamp());
end
$do$;
