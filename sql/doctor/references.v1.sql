-- Purpose:    what shardids doctor asks of the reference tables of a node: columns, and whether others' writes are
--             refused; and the node's subscription to their writer.
-- Settings:   shardids.names: the tables, as an array; shardids.subscription: the name of the subscription
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: ownership of schema shardids.

select d.name::text as name,
       d.definition,
       exists (
         select from pg_trigger t
         where t.tgrelid = to_regclass(format('shardids_ref.%I', d.name)) and t.tgname = 'shardids_reference' and t.tgenabled in ('O', 'A')
           -- A reader's takes INSERT in; on the writer a second one keeps the keys, and a third knows the server.
           and (t.tgtype & 4 <> 0 or 2 = (
             select count(*) from pg_trigger k
             where k.tgrelid = t.tgrelid and k.tgname in ('shardids_reference_key', 'shardids_reference_right') and k.tgenabled in ('O', 'A')))
       ) as is_guarded,
       shardids.takes_reference_writes(d.name) as takes_writes,
       s.subenabled as is_enabled,
       exists (select from pg_stat_subscription w where w.subid = s.oid and w.pid is not null) as is_working
from shardids.reference_columns(current_setting('shardids.names')::name[]) d
left join pg_subscription s on s.subname = current_setting('shardids.subscription') and s.subdbid = shardids.database()
order by d.name;
