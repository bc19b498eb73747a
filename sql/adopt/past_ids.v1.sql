-- Purpose:    IDs for the rows of one table in one shard that have none, by the times at which they were made: ticks of a
--             past in which the shard issued nothing. IDs are distinct and in the order of the times; rows of one
--             millisecond, and what does not fit into it, get the ticks that follow.
-- Settings:   shardids.shard, shardids.table_name, shardids.id_column, shardids.time_column, shardids.order_column (tells
--             rows of one time apart), shardids.first_time and shardids.end_time: IDs lie between them
-- Result:     the setting shardids.filled, the number of rows.
-- Locks:      SHARE ROW EXCLUSIVE on the table until the end of the transaction: rows can be read, not written.
-- Privileges: SELECT and UPDATE on the table, USAGE on schema shardids.

do $do$
declare
  shard constant integer := current_setting('shardids.shard');
  id_column constant text := current_setting('shardids.id_column');
  time_column constant text := current_setting('shardids.time_column');
  first_time constant timestamptz := current_setting('shardids.first_time');
  end_time constant timestamptz := current_setting('shardids.end_time');
  relation constant regclass := (
    select format('%I.%I', s.schema, current_setting('shardids.table_name'))::regclass from shardids.shard s where s.id = shard);
  missing bigint;
  there bigint;
  timeless bigint;
  outside bigint;
  example text;
  last_tick bigint;
begin
  if relation is null then
    raise exception 'shard % is not on this node', shard using errcode = 'SI001';
  end if;
  -- Times without a zone are UTC.
  perform set_config('timezone', 'UTC', true);
  execute format('lock table %s in share row exclusive mode', relation);
  execute format(
    'select count(*) filter (where %1$I is null), '
    'count(*) filter (where %1$I >= shardids.min_id($1) and %1$I < shardids.min_id($2)), '
    'count(*) filter (where %1$I is null and %2$I is null), '
    'count(*) filter (where %1$I is null and (%2$I::timestamptz < $1 or %2$I::timestamptz >= $2)), '
    '(min(%2$I::timestamptz) filter (where %1$I is null and (%2$I::timestamptz < $1 or %2$I::timestamptz >= $2)))::text '
    'from %3$s', id_column, time_column, relation)
  into missing, there, timeless, outside, example using first_time, end_time;
  perform set_config('shardids.filled', missing::text, true);
  if missing = 0 then
    return;
  end if;
  if there > 0 then
    raise exception '%: % rows have IDs of the past, and % have none', relation, there, missing
    using errcode = 'SI007', hint = 'IDs of the past are given to all rows at once. Rows that came later get theirs from next_id().';
  end if;
  if timeless > 0 then
    raise exception '%: % rows without an ID have no %', relation, timeless, time_column
    using errcode = 'SI007', hint = 'Give them a time, or an ID: next_id().';
  end if;
  if outside > 0 then
    raise exception '%: of % rows without an ID, % is not from % to before %, for example %', relation, outside, time_column,
      first_time, end_time, example
    using errcode = 'SI007',
      hint = 'The shard may have issued IDs from the later time on: give such rows next_id(). IDs of the earlier time are old, or the layout has none.';
  end if;
  execute format(
    'with timed as ('
    '  select tableoid as part, ctid as place, shardids.ms_of(%2$I::timestamptz) << shardids.sequence_bits() as tick, '
    '         row_number() over (order by %2$I, %4$I) as number '
    '  from %3$s where %1$I is null), '
    -- A tick is at least its row's time, and above the row's before.
    'ticked as (select part, place, number + max(tick - number) over (order by number) as tick from timed), '
    'filled as (update %3$s r set %1$I = shardids.id_of(t.tick, $1) from ticked t where r.tableoid = t.part and r.ctid = t.place returning t.tick) '
    'select max(tick) from filled', id_column, time_column, relation, current_setting('shardids.order_column'))
  into last_tick using shard;
  if last_tick >> shardids.sequence_bits() >= shardids.ms_of(end_time) then
    raise exception '%: the IDs of % rows do not fit before %', relation, missing, end_time
    using errcode = 'SI007', hint = 'Too many rows are of the last milliseconds. Give them next_id().';
  end if;
end
$do$;
