-- Purpose:    making the generator of one shard, in the shard's schema: two sequences and four functions.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids; to call it, membership in the owner of schema shardids.

-- A function, and not a DO in shard.v1.sql, which would be compiled and planned again for each of thousands of shards.
create function shardids.create_generator(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $function$
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
$function$;

comment on function shardids.create_generator(integer) is 'Creates a shard''s sequences and functions, and lets it issue IDs';

revoke execute on function shardids.create_generator(integer) from public;
