-- Purpose:    what the way back of an adoption needs on a node, while changes of the shards' tables are sent to the old
--             database: those tables stay partitions of the tables that took rows in, by whose names the changes are sent.
-- Locks:      guard_part: SHARE ROW EXCLUSIVE on the table, ACCESS EXCLUSIVE if it is to log whole rows. unguard_part,
--             close_back: ACCESS EXCLUSIVE, and SHARE ROW EXCLUSIVE. All until commit: set lock_timeout.
-- Privileges: CREATE on schema shardids; ownership of the tables.

-- Its arguments: the message, in which %s stands for the table, and the hint.
create function shardids.refuse_with() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using
    errcode = 'SI002',
    message = format(tg_argv[0], format('%I.%I', tg_table_schema, tg_table_name)),
    hint = tg_argv[1];
end
$$;

comment on function shardids.refuse_with() is 'Refuses a statement with the message and the hint that its trigger names';

-- TRUNCATE of a partition is not sent by a publication of its root, and that of another table is not published. The trigger's name tells what unguard_part sets back.
create function shardids.guard_part(part regclass, logs_all boolean) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids.guard_part(regclass, boolean) is
  'Refuses TRUNCATE of a table whose changes are sent back, and lets it log whole rows where the other side needs them';

create function shardids.unguard_part(part regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from pg_trigger t where t.tgrelid = part and t.tgname = 'shardids_back_full') then
    execute format('alter table %s replica identity default', part);
  end if;
  execute format('drop trigger if exists shardids_back on %s', part);
  execute format('drop trigger if exists shardids_back_full on %s', part);
end
$$;

comment on function shardids.unguard_part(regclass) is 'Undoes guard_part';

create function shardids.guarded() returns setof regclass
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select t.tgrelid::regclass from pg_trigger t
  where t.tgname in ('shardids_back', 'shardids_back_full') and t.tgfoid = to_regprocedure('shardids.refuse_with()');
end;

comment on function shardids.guarded() is 'The tables that guard_part has changed';

create function shardids.close_back(name regclass, message text, hint text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  execute format('create or replace trigger shardids_adoption before insert or update or delete or truncate on %s '
                 'for each statement execute function shardids.refuse_with(%L, %L)', name, message, hint);
end
$$;

comment on function shardids.close_back(regclass, text, text) is 'Keeps clients from writing to a table; open_table undoes it';

revoke execute on function
  shardids.refuse_with(), shardids.guard_part(regclass, boolean), shardids.unguard_part(regclass), shardids.guarded(),
  shardids.close_back(regclass, text, text)
  from public;
