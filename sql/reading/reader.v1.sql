-- Purpose:    the reader: a role that may read all data and do nothing else, and a function that runs queries as it. What
--             tables, types and functions of other roles run when they are read, they run as that role.
-- Locks:      those of CREATE ROLE, GRANT, CREATE SCHEMA and CREATE FUNCTION until commit.
-- Privileges: superuser; or CREATEROLE, CREATE on the database, and from version 16 on ADMIN on pg_read_all_data.
--
-- It is no login: that would need a password, which shardids would have to keep. Inside a SECURITY DEFINER function
-- neither SET ROLE nor SET SESSION AUTHORIZATION lead back to the session's user; a deferred trigger or a cursor WITH HOLD
-- would run after it, at COMMIT, as that user. So the function only runs where nothing can be written, and each query is
-- rolled back, with all settings and cursors that it made. The caller ends the transaction with ROLLBACK.

set local search_path = pg_catalog, pg_temp;

do $do$
declare
  engine constant name := (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'shardids');
  is_superuser constant boolean := (select r.rolsuper from pg_roles r where r.rolname = current_user);
  stranger record;
begin
  if to_regrole('shardids_reader') is null then
    begin
      create role shardids_reader nologin;
    exception when duplicate_object or unique_violation then
      -- Of another database on this server, at the same time.
      null;
    end;
  end if;
  if not pg_has_role('shardids_reader', 'pg_read_all_data', 'member') then
    grant pg_read_all_data to shardids_reader;
  end if;
  -- Row security would hide rows, or run policies; without this, tables that have it are not read.
  if not (select r.rolbypassrls from pg_roles r where r.rolname = 'shardids_reader') then
    begin
      alter role shardids_reader bypassrls;
    exception when insufficient_privilege then
      null;
    end;
  end if;
  if not is_superuser then
    grant shardids_reader to current_user;
  end if;
  create schema if not exists shardids_reader authorization shardids_reader;
  for stranger in select * from shardids.strangers_objects(array['shardids_reader']::name[], 'shardids_reader') loop
    raise insufficient_privilege using message = stranger.message, hint = stranger.fix;
  end loop;
  drop function if exists shardids_reader.read(text[]);

  -- Each query returns one jsonb. Of one that fails: the error.
  create function shardids_reader.read(queries text[], out number integer, out answer jsonb, out code text, out message text)
  returns setof record
  language plpgsql volatile parallel unsafe security definer
  set search_path = pg_catalog, pg_temp set row_security = off
  -- The text of a value, and so the hash of a row, depends on these.
  set datestyle = 'ISO, YMD' set intervalstyle = 'postgres' set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = 'hex' set xmlbinary = 'base64' set lc_monetary = 'C' as $$
  begin
    if not current_setting('transaction_read_only')::boolean then
      raise exception using errcode = '25000', message = 'shardids_reader.read runs in read-only transactions only';
    end if;
    for n in 1 .. coalesce(cardinality(queries), 0) loop
      number := n;
      answer := null;
      code := null;
      message := null;
      begin
        execute queries[n] into answer;
        -- Takes back what the query set and locked: no lock on more tables than one query reads.
        raise exception using errcode = 'SI099';
      exception
        when sqlstate 'SI099' then
          null;
        when others then
          code := sqlstate;
          message := sqlerrm;
      end;
      return next;
    end loop;
  end
  $$;

  comment on function shardids_reader.read(text[]) is
    'Runs queries as a role that may read all data and do nothing else, in a read-only transaction; the jsonb or the error of each';
  comment on schema shardids_reader is 'Reads for the owner of schema shardids what belongs to other roles';
  alter function shardids_reader.read(text[]) owner to shardids_reader;
  revoke all on schema shardids_reader from public;
  revoke all on function shardids_reader.read(text[]) from public;
  execute format('grant usage on schema shardids_reader to %I', engine);
  execute format('grant execute on function shardids_reader.read(text[]) to %I', engine);
  -- Needed where functions are not everybody's by default.
  if not has_function_privilege('shardids_reader', to_regprocedure('shardids.shard_of(bigint)'), 'execute') then
    grant execute on function shardids.shard_of(bigint) to shardids_reader;
  end if;
  if not is_superuser then
    revoke shardids_reader from current_user;
  end if;
end
$do$;
