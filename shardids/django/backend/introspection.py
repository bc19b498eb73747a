"""What is in a shard: its schema alone, which no ``search_path`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.backends.postgresql import introspection

if TYPE_CHECKING:
    from shardids.django.backend.base import DatabaseWrapper

_TABLES = """
    select c.relname, case when c.relispartition then 'p' when c.relkind in ('m', 'v') then 'v' else 't' end,
           obj_description(c.oid, 'pg_class')
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %s and c.relkind in ('f', 'm', 'p', 'r', 'v')"""


class DatabaseIntrospection(introspection.DatabaseIntrospection):
    """Django's own for PostgreSQL, but for the list of tables, which ``flush`` empties."""

    connection: DatabaseWrapper

    def get_table_list(self, cursor: Any) -> list[Any]:
        """Returns the tables and views of the shard."""
        cursor.execute(_TABLES, [self.connection.schema])
        return [introspection.TableInfo(*row) for row in cursor.fetchall()]
