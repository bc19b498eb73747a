-- Purpose:    what the key schemes that shardids is compared with keep in PostgreSQL: a sequence, a table with
--             an identity column, the ranges of the range tickets, and the worker numbers of the snowflakes.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on the database.

create schema if not exists shardids_baselines;

create sequence if not exists shardids_baselines.one as bigint;

create table if not exists shardids_baselines.identity_row (
  id bigint generated always as identity primary key
);

-- One row a range: the first key that nobody was given.
create table if not exists shardids_baselines.key_range (
  name text primary key,
  next_key bigint not null check (next_key > 0)
);

-- One row a worker number that was ever leased. token counts the leases of the number: a holder whose token is
-- not in the row any more has lost it. used_until_ms is a Unix time in ms that no ID of the number is past.
create table if not exists shardids_baselines.worker (
  number integer primary key check (number >= 0),
  token bigint not null,
  expires_at timestamptz not null,
  used_until_ms bigint not null
);
