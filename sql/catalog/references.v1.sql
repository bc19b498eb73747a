-- Purpose:    reference tables: which there are, the node that they are written to on, and rows that are being deleted.
-- Locks:      none beyond those of CREATE.
-- Privileges: CREATE on schema shardids_catalog.
--
-- Who changes any of this holds the advisory lock (1936220527, 0) for as long as its process lives.

create table shardids_catalog.reference_writer (
  only_row boolean primary key default true check (only_row),
  node     text    not null references shardids_catalog.node (name) on update cascade,
  successor text   constraint successor_of references shardids_catalog.node (name) on update cascade
);

comment on table shardids_catalog.reference_writer is 'The node on which reference tables are written to';
comment on column shardids_catalog.reference_writer.successor is 'The node that is becoming it; until it is open nobody may be able to write';

-- Applications ask again which node it is.
create trigger changed after update on shardids_catalog.reference_writer
for each statement execute function shardids_catalog.changed();

create table shardids_catalog.reference_table (
  name  name primary key,
  state text not null default 'creating' check (state in ('creating', 'active', 'dropping'))
);

comment on table shardids_catalog.reference_table is 'The tables of schema shardids_ref of every node';
comment on column shardids_catalog.reference_table.state is 'creating, dropping: under way or interrupted; the command completes it when it is repeated';

create table shardids_catalog.reference_deletion (
  table_name name        not null constraint deletion_of references shardids_catalog.reference_table (name),
  key        jsonb       not null,
  started_at timestamptz not null default now(),
  primary key (table_name, key)
);

comment on table shardids_catalog.reference_deletion is 'Rows that are being deleted: each node may or may not have them';

-- Rows that a move or an adoption brings to a node are not checked against foreign keys when they arrive. A deletion
-- begins under a lock on both tables, when nothing is under way; so does a move of the writer, which moves of shards ask.
create function shardids_catalog.refuse_while_references_change() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
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

comment on function shardids_catalog.refuse_while_references_change() is 'Refuses moves, acceptances of losses and adoptions while a row of a reference table is being deleted, or their writer moved';

create trigger refuse_while_references_change before insert on shardids_catalog.move
for each statement execute function shardids_catalog.refuse_while_references_change();

create trigger refuse_while_references_change before insert on shardids_catalog.loss
for each statement execute function shardids_catalog.refuse_while_references_change();

create trigger refuse_while_references_change before insert on shardids_catalog.adoption
for each statement execute function shardids_catalog.refuse_while_references_change();
