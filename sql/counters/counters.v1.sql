-- Purpose:    numbers for people: counters of a tenant that begin again each day, month or year. They are rows of tables
--             in the tenant's shard, and so are as durable as the rows that bear the numbers, and move with them.
-- Locks:      next_number: the counter's row until commit; of a kind with lanes one of them, and while lanes are begun
--             advisory lock (1936220540, a hash), which nobody waits for. set_number: all of a counter's rows until
--             commit. create_counters, define_counter: advisory lock (1936220517, shard) until commit. number_rows:
--             those of CREATE TRIGGER.
-- Privileges: CREATE on schema shardids. To call them, membership in its owner; next_number for roles that may draw.
--
-- A counter is a tenant, a kind and a period. It has as many rows as its kind has lanes: lane l of n issues l, l + n,
-- l + 2n, .... A draw takes the lowest number of the lanes that nobody holds, and holds its lane until COMMIT. With one
-- lane draws wait for each other, and no number is missing. Either way ROLLBACK gives the number back, and what was
-- committed is in the log before anybody is told: nothing here is kept outside of transactions.

-- What a period is called by: its first day.
create function shardids.period_of(per text, moment timestamp) returns date
language sql immutable parallel safe
return case when per = 'never' then date '0001-01-01' else date_trunc(per, moment)::date end;

comment on function shardids.period_of(text, timestamp) is 'The first day of the day, month or year in which a time lies';

create function shardids.refuse_number(schema name, reason text, what text, next text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = reason, hint = next,
    message = format('%s [%snode "%s"]', what, 'shard ' || (select s.id from shardids.shard s where s.schema = refuse_number.schema) || ', ',
                     (select n.name from shardids.node n));
end
$$;

comment on function shardids.refuse_number(name, text, text, text) is 'Raises an error of the functions for numbers';

-- Four tables and a function in the shard's schema; nothing if they are there.
create function shardids.create_counters(shard integer) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $do$
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
$do$;

comment on function shardids.create_counters(integer) is 'Makes the tables of a shard''s counters, and its next_number()';

-- A zone that is not in the list may still be taken by AT TIME ZONE: as an abbreviation, which knows no summer time, or
-- as POSIX' notation, in which nearly every word is one.
create function shardids.require_zone(schema name, zone text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from pg_timezone_names z where z.name = zone) then
    perform shardids.refuse_number(schema, 'SI007', format('there is no time zone %L', zone),
      'The names are in pg_timezone_names, such as Europe/Berlin.');
  end if;
end
$$;

-- Idempotent. How often a kind begins again, and how many lanes it has, can't be changed: a draw that has read the old
-- kind and is not committed is seen by nobody, and its number would come again.
create function shardids.define_counter(
  shard integer, kind text, per text, zone text default 'UTC', prefix text default null, padding integer default 4,
  lanes integer default 1, keep_days integer default 400)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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
$$;

comment on function shardids.define_counter(integer, text, text, text, text, integer, integer, integer) is
  'Defines a kind of numbers in a shard: when it begins again, how it is written, and whether numbers may be missing';

-- The trigger is the table's own, so that it draws for every way to insert: by hand, in bulk, by COPY.
create function shardids.number_rows(
  numbered regclass, number name, tenant name, kind text, per text, zone text default 'UTC', prefix text default null,
  padding integer default 4, lanes integer default 1, keep_days integer default 400)
returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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
$$;

comment on function shardids.number_rows(regclass, name, name, text, text, text, text, integer, integer, integer) is
  'Defines a kind of numbers, and lets a column of a table draw them where an INSERT gives none';

create function shardids.set_counter_zone(shard integer, tenant text, zone text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform shardids.require_zone(shardids.schema_of(shard), zone);
  perform shardids.create_counters(shard);
  execute format(
    'insert into %I.shardids_counter_zone (tenant, zone) values ($1, $2) on conflict (tenant) do update set zone = excluded.zone',
    shardids.schema_of(shard)) using tenant, zone;
end
$$;

comment on function shardids.set_counter_zone(integer, text, text) is 'Gives a tenant a time zone of its own';

-- highest is the highest number that was drawn, or skipped by hand. Without whole, each tenant's newest periods alone.
create function shardids.counters(shard integer, tenant text default null, kind text default null, whole boolean default true)
returns table (of_tenant text, of_kind text, per text, period date, highest bigint)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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
$$;

comment on function shardids.counters(integer, text, text, boolean) is 'The counters of a shard, and the highest number of each';

-- By whom and why counters were set by hand.
create function shardids.counter_changes(shard integer, tenant text default null)
returns table (of_tenant text, of_kind text, period date, changed_at timestamptz, changed_by text, highest_before bigint, next_number bigint, reason text)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass(format('%I.shardids_counter_change', shardids.schema_of(shard))) is not null then
    return query execute format(
      'select c.tenant, c.kind, c.period, c.changed_at, c.changed_by, c.highest_before, c.next_number, c.reason '
      'from %I.shardids_counter_change c where $1 is null or c.tenant = $1 order by c.changed_at', shardids.schema_of(shard))
    using tenant;
  end if;
end
$$;

comment on function shardids.counter_changes(integer, text) is 'How counters of a shard were set by hand, when, by whom and why';

-- The next draw gets that number or, of a kind with lanes, one of the next few. It waits for those that are drawing.
create function shardids.set_number(
  shard integer, tenant text, kind text, next bigint, reason text, again boolean default false, period date default null,
  skip boolean default false, out highest_before bigint, out next_number bigint, out set_period date)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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
$$;

comment on function shardids.set_number(integer, text, text, bigint, text, boolean, date, boolean) is
  'Sets the next number of a counter, or skips so many, and records who did and why';

revoke execute on function
  shardids.period_of(text, timestamp), shardids.refuse_number(name, text, text, text), shardids.create_counters(integer), shardids.require_zone(name, text),
  shardids.define_counter(integer, text, text, text, text, integer, integer, integer),
  shardids.number_rows(regclass, name, name, text, text, text, text, integer, integer, integer),
  shardids.set_counter_zone(integer, text, text), shardids.counters(integer, text, text, boolean), shardids.counter_changes(integer, text),
  shardids.set_number(integer, text, text, bigint, text, boolean, date, boolean)
  from public;
