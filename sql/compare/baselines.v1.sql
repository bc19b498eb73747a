-- Purpose:    what the key schemes that shardids is compared with keep in PostgreSQL: a sequence, a table with
--             an identity column, a counter and the trigger that raises it, the ranges of the range tickets, and
--             the worker numbers of the snowflakes.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the database.

create schema if not exists shardids_baselines;

create sequence if not exists shardids_baselines.one as bigint;

create table if not exists shardids_baselines.identity_row (
  id bigint generated always as identity primary key
);

-- The last key that was given to a row of any table with the trigger. A transaction that has raised it locks its
-- row until COMMIT.
create table if not exists shardids_baselines.counter (
  name text primary key,
  value bigint not null
);
insert into shardids_baselines.counter values ('all', 0) on conflict do nothing;

create or replace function shardids_baselines.count_row() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update shardids_baselines.counter set value = value + 1 where name = 'all' returning value into new.id;
  return new;
end
$$;

create table if not exists shardids_baselines.counted_row (
  id bigint primary key
);
create or replace trigger key before insert on shardids_baselines.counted_row
for each row execute function shardids_baselines.count_row();

-- One row a range: the first key that nobody was given.
create table if not exists shardids_baselines.key_range (
  name text primary key,
  next_key bigint not null check (next_key > 0)
);

-- One row a worker number that was ever leased. token counts the leases of the number: a holder whose token is
-- not in the row any more has lost it. used_until_ms is a Unix time in ms that no ID of the number is past, until
-- a holder raises it: the next holder starts above it.
create table if not exists shardids_baselines.worker (
  number integer primary key check (number >= 0),
  token bigint not null,
  expires_at timestamptz not null,
  used_until_ms bigint not null
);

-- Leases a number below "numbers": one that nobody ever had, else the one that has rested longest, if it has for
-- rests_s. No row: all are held, or rest. Locks: the table, until COMMIT, against other leases and renewals.
create or replace function shardids_baselines.lease_worker(numbers integer, lasts_s float8, rests_s float8)
returns setof shardids_baselines.worker
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  lock table shardids_baselines.worker in share row exclusive mode;
  return query
    insert into shardids_baselines.worker as w (number, token, expires_at, used_until_ms)
    select n, 1, clock_timestamp() + make_interval(secs => lasts_s), 0
    from generate_series(0, numbers - 1) n left join shardids_baselines.worker held on held.number = n
    where held.number is null or held.expires_at + make_interval(secs => rests_s) < clock_timestamp()
    order by held.expires_at nulls first, n
    limit 1
    on conflict (number) do update set token = w.token + 1, expires_at = excluded.expires_at
    returning w.*;
end
$$;
