"""How a shard's alias differs from Django's own for PostgreSQL: names, tables, test runs, refusals.

Tables of sharded models have the shard's schema before their names; no ``search_path`` names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.backends.postgresql import client, compiler, creation, introspection, operations, schema

from shardids.django.aliases import require_for_tests
from shardids.django.backend import pools
from shardids.django.sharded import tables
from shardids.errors import BadArgument

if TYPE_CHECKING:
    from shardids.django.backend.base import DatabaseWrapper


class DatabaseOperations(operations.DatabaseOperations):
    """Django's own for PostgreSQL, except for the names of sharded models' tables."""

    connection: DatabaseWrapper
    compiler_module = "shardids.django.backend.operations"

    def quote_name(self, name: str) -> str:
        """Return a quoted name. That of a sharded model's table has the schema before it.

        Columns are named by table and column, so theirs also has it. Django asks in the same way for
        tables, columns and aliases: a check refuses a table that is called as a column is.
        """
        quoted: str = super().quote_name(name)
        return self._in_schema + quoted if name in tables().sharded else quoted

    def for_update_sql(
        self, nowait: bool = False, skip_locked: bool = False, of: Any = (), no_key: bool = False
    ) -> str:
        """Return the clause that locks rows: PostgreSQL takes bare names of tables in it."""
        bare = tuple(name.removeprefix(self._in_schema) for name in of)
        clause: str = super().for_update_sql(nowait=nowait, skip_locked=skip_locked, of=bare, no_key=no_key)
        return clause

    def sequence_reset_sql(self, style: Any, model_list: Any) -> list[str]:
        """Return no statements: a shard's IDs come from its clock."""
        return []

    @property
    def _in_schema(self) -> str:
        return f'"{self.connection.schema}".'


class DatabaseSchemaEditor(schema.DatabaseSchemaEditor):
    """Django's own for PostgreSQL; the indexes that it drops are the shard's."""

    def __init__(self, connection: DatabaseWrapper, *arguments: Any, **options: Any) -> None:
        super().__init__(connection, *arguments, **options)
        here = f"{connection.ops._in_schema.replace('%', '%%')}%(name)s"
        self.sql_delete_index = f"DROP INDEX IF EXISTS {here}"
        self.sql_delete_index_concurrently = f"DROP INDEX CONCURRENTLY IF EXISTS {here}"


_TABLES = """
    select c.relname, case when c.relispartition then 'p' when c.relkind in ('m', 'v') then 'v' else 't' end,
           obj_description(c.oid, 'pg_class')
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %s and c.relkind in ('f', 'm', 'p', 'r', 'v')"""


class DatabaseIntrospection(introspection.DatabaseIntrospection):
    """Django's own for PostgreSQL, with the shard's schema as the only one."""

    connection: DatabaseWrapper

    def get_table_list(self, cursor: Any) -> list[Any]:
        """Return the tables and views of the shard."""
        cursor.execute(_TABLES, [self.connection.schema])
        return [introspection.TableInfo(*row) for row in cursor.fetchall()]

    def get_field_type(self, data_type: Any, description: Any) -> Any:
        """Return the name of a column's field."""
        if "next_id()" in (description.default or ""):
            return "shardids.django.ShardIdField"
        return super().get_field_type(data_type, description)

    def get_table_description(self, cursor: Any, table_name: str) -> Any:
        """Return the columns of a table."""
        with self._in_path(cursor):
            return super().get_table_description(cursor, table_name)

    def get_sequences(self, cursor: Any, table_name: str, table_fields: Any = ()) -> Any:
        """Return the sequences of a table."""
        with self._in_path(cursor):
            return super().get_sequences(cursor, table_name, table_fields)

    def get_relations(self, cursor: Any, table_name: str) -> Any:
        """Return the foreign keys of a table."""
        with self._in_path(cursor):
            return super().get_relations(cursor, table_name)

    def get_constraints(self, cursor: Any, table_name: str) -> Any:
        """Return the constraints and indexes of a table."""
        with self._in_path(cursor):
            return super().get_constraints(cursor, table_name)

    @contextmanager
    def _in_path(self, cursor: Any) -> Iterator[None]:
        """Have Django's queries find the shard's tables, and leave the session as it was."""
        with transaction.atomic(using=self.connection.alias):
            cursor.execute("select current_setting('search_path')")
            (before,) = cursor.fetchone()
            cursor.execute(
                "select set_config('search_path', format('%%I', %s), true)", [self.connection.schema]
            )
            yield
            cursor.execute("select set_config('search_path', %s, true)", [before])


class DatabaseClient(client.DatabaseClient):
    """psql, on the shard's node and with its schema in ``search_path``."""

    connection: DatabaseWrapper

    def runshell(self, parameters: Any) -> None:
        """Run psql."""
        there = pools.address(self.connection.node())
        settings = {name.upper(): there.get(name, "") for name in ("host", "port", "user", "password")}
        self.connection.settings_dict = {
            **settings,
            "NAME": there.get("dbname", ""),
            "OPTIONS": there,
            "SCHEMA": self.connection.schema,
        }
        super().runshell(parameters)

    @classmethod
    def settings_to_cmd_args_env(cls, settings_dict: Any, parameters: Any) -> Any:
        """Return the command and its environment."""
        args, env = super().settings_to_cmd_args_env(settings_dict, parameters)
        return args, {**(env or {}), "PGOPTIONS": f"-c search_path={settings_dict['SCHEMA']}"}


class DatabaseCreation(creation.DatabaseCreation):
    """Makes and drops nothing: the shards of the tests' cluster are there, with their tables."""

    def create_test_db(self, *_: Any, **_options: Any) -> str:
        """Return the shard's name. Raises BadArgument if it is not of a cluster for tests."""
        require_for_tests()
        return str(self.connection.alias)

    def destroy_test_db(self, *_: Any, **_options: Any) -> None:
        """Leave the shard to the cluster's end."""

    def serialize_db_to_string(self) -> str:
        """Return no rows: migrations write none into shards but by RunSQL."""
        return "[]"

    def test_db_signature(self) -> tuple[Any, ...]:
        """Return what no other alias has."""
        return (self.connection.alias,)


class _OnOneShard:
    """Looks at a statement once it is written, when all its joins are known, and before it is sent."""

    query: Any
    connection: Any

    def as_sql(self, *args: Any, **options: Any) -> Any:
        """Return the statement and its parameters. Raises BadArgument if it names an unsharded table."""
        written = super().as_sql(*args, **options)  # type: ignore[misc] # of Django's class beside this one
        named: set[Any] = {getattr(one, "table_name", None) for one in self.query.alias_map.values()}
        if self.query.model is not None:
            named.add(self.query.model._meta.db_table)
        # A filter on a reference alone leaves the join that it began with, which is not written.
        texts = [text for text, _ in (written if isinstance(written, list) else [written])]
        strangers = sorted(
            table for table in named & tables().others if any(f'"{table}"' in text for text in texts)
        )
        if strangers:
            raise BadArgument(
                f"shard {self.connection.shard} has no table {', '.join(strangers)}: its model is elsewhere",
                hint="A statement is for one database: query the model by itself, not by a join.",
            )
        return written


class SQLCompiler(_OnOneShard, compiler.SQLCompiler):
    """SELECT."""


class SQLInsertCompiler(_OnOneShard, compiler.SQLInsertCompiler):
    """INSERT."""


class SQLDeleteCompiler(_OnOneShard, compiler.SQLDeleteCompiler):
    """DELETE."""


class SQLUpdateCompiler(_OnOneShard, compiler.SQLUpdateCompiler):
    """UPDATE."""


class SQLAggregateCompiler(_OnOneShard, compiler.SQLAggregateCompiler):
    """Aggregates over a SELECT."""
