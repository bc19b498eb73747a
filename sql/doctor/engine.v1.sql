-- Purpose:    what shardids doctor asks of the engine: which functions of schema shardids are not what shardids
--             installs. To be compared with, it makes the same functions in pg_temp first, from the files of this
--             installation, in a transaction that it rolls back: so the server itself reads both alike.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: USAGE on schema shardids; TEMP on the database.

with functions as (
  select n.nspname = 'shardids' as is_installed,
         format('%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as function,
         -- Older servers print the temporary schema's own name.
         replace(replace(pg_get_functiondef(p.oid), 'pg_temp.', 'shardids.'), n.nspname || '.', 'shardids.') as definition
  from pg_proc p
  join pg_namespace n on n.oid = p.pronamespace
  where n.nspname = 'shardids' or n.oid = pg_my_temp_schema())
select format('shardids.%s', coalesce(installed.function, wanted.function)) as function,
       installed.function is not null as is_installed,
       wanted.function is not null as is_wanted
from (select * from functions where is_installed) installed
full join (select * from functions where not is_installed) wanted using (function)
where installed.definition is distinct from wanted.definition
  -- The layout's functions are made of settings; what they return is asked for elsewhere.
  and coalesce(installed.function, wanted.function) not in
      ('epoch_ms()', 'time_bits()', 'shard_bits()', 'sequence_bits()', 'schema_prefix()')
order by 1;
