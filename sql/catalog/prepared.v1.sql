-- Purpose:    the prepared transactions of a node, and whether the caller may end them.
-- Locks:      none beyond those of reading the server's catalogs.
-- Privileges: none.

select x.gid::text as gid,
       x.owner::text as owner,
       x.owner = current_user or r.rolsuper as is_own,
       extract(epoch from clock_timestamp() - x.prepared)::float8 as age_s
from pg_prepared_xacts x
join pg_roles r on r.rolname = current_user
where x.database = current_database()
order by x.prepared, x.gid;
