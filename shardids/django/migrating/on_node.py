"""Django's own connection to PostgreSQL where tables have bare names, as migrations write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.postgresql import base, schema
from sqlalchemy import Engine

from shardids.django.backend import pools
from shardids.django.fields import ShardIdField


class ShardSchemaEditor(schema.DatabaseSchemaEditor):
    """Django's own, except that a key that becomes the shard's gets its default."""

    def _alter_field(self, model: Any, old_field: Any, new_field: Any, *others: Any, **options: Any) -> None:
        inherited: Any = super()
        inherited._alter_field(model, old_field, new_field, *others, **options)
        if isinstance(new_field, ShardIdField) and not isinstance(old_field, ShardIdField):
            table, column = (self.quote_name(str(name)) for name in (model._meta.db_table, new_field.column))
            self.execute(
                f"ALTER TABLE {table} ALTER COLUMN {column} SET {new_field.db_type_suffix(self.connection)}"
            )


class NodeConnection(base.DatabaseWrapper):
    """A connection to where an engine connects, whose ``search_path`` its user sets."""

    SchemaEditorClass = ShardSchemaEditor
    data_types_suffix = dict.fromkeys(base.DatabaseWrapper.data_types_suffix, "DEFAULT next_id()")
    """A shard issues all keys, also those that were the database's in older migrations."""
    schema: str | None = None
    """None: names are bare, and found by ``search_path``."""

    def __init__(self, engine: Engine, alias: str, shard: int | None = None) -> None:
        settings = connections.configure_settings({DEFAULT_DB_ALIAS: {}, alias: {"NAME": alias}})
        super().__init__(settings[alias], alias)
        self._engine = engine
        self.shard = shard
        self.answers: list[bool] = []
        """The router's, whether the operation that runs is for shards."""

    def get_connection_params(self) -> dict[str, Any]:
        """Return psycopg's arguments."""
        params = super().get_connection_params()
        del params["dbname"]
        return {**params, **pools.arguments_of(self._engine.url)}

    @contextmanager
    def used(self) -> Iterator[Self]:
        """Be what this thread's ``connections`` have under the alias, for a block; disconnect at its end."""
        before: Any = {one.alias: one for one in connections.all(initialized_only=True)}.get(self.alias)
        connections[self.alias] = self
        try:
            yield self
        finally:
            self.close()
            if before is None:
                del connections[self.alias]
            else:
                connections[self.alias] = before
