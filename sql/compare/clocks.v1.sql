-- Purpose:    two logical clocks as key schemes, for the comparison: Lamport's (1978), and the hybrid one of Kulkarni and
--             others (2014). A key is the clock's time and the node's number; a message is the key of a row that is answered.
-- Settings:   shardids.node, the node's number, 0 to 63; 0 if it is not set
-- Locks:      none beyond those of CREATE. A draw: advisory lock (1936220540, 1 or 2), for microseconds.
-- Privileges: CREATE on the database.

create schema if not exists shardids_clocks;

create sequence if not exists shardids_clocks.lamport_clock as bigint;
create sequence if not exists shardids_clocks.hybrid_clock as bigint;

-- max(own, heard, physical - 1) + 1: with physical 0 it is Lamport's rule. With physical = ms << 10 it is the hybrid one, whose
-- counter starts at 0 in each ms; one that overflows goes on in the next ms.
create or replace function shardids_clocks.tick(clock regclass, lock integer, heard bigint, physical bigint) returns bigint
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  ticked bigint;
  is_locked boolean := false;
begin
  perform pg_advisory_lock(1936220540, lock);
  is_locked := true;
  ticked := setval(clock, greatest(coalesce(pg_sequence_last_value(clock), 0), heard, physical - 1) + 1);
  is_locked := not pg_advisory_unlock(1936220540, lock);
  return ticked;
exception when query_canceled or others then
  if is_locked then
    perform pg_advisory_unlock(1936220540, lock);
  end if;
  raise;
end
$$;

do $do$
declare
  node constant integer := coalesce(nullif(current_setting('shardids.node', true), ''), '0');
begin
  if node not between 0 and 63 then
    raise exception 'there is no node % among 64', node;
  end if;
  execute format($format$
create or replace function shardids_clocks.lamport(heard bigint default 0) returns bigint
language sql volatile parallel unsafe
return shardids_clocks.tick('shardids_clocks.lamport_clock'::regclass, 1, heard >> 6, 0) << 6 | %1$s;

create or replace function shardids_clocks.hybrid(heard bigint default 0) returns bigint
language sql volatile parallel unsafe
return shardids_clocks.tick('shardids_clocks.hybrid_clock'::regclass, 2, heard >> 6,
                            floor(date_part('epoch', clock_timestamp()) * 1000)::bigint << 10) << 6 | %1$s$format$, node);
end
$do$;
