"""The connection of a shard's alias, on a pool that all aliases of the node share."""

from __future__ import annotations

from typing import Any

import psycopg
from django.db import connections
from django.db.backends.postgresql import base
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool

from shardids.catalog.topology import Node
from shardids.django.aliases import configuration, get_cluster, refuse_tests
from shardids.django.backend import pools
from shardids.django.backend.operations import (
    DatabaseClient,
    DatabaseCreation,
    DatabaseIntrospection,
    DatabaseOperations,
    DatabaseSchemaEditor,
)
from shardids.errors import BadArgument, ShardidsError


class DatabaseWrapper(base.DatabaseWrapper):
    """A shard, as one thread sees it.

    Between transactions a thread has one connection per node, whatever shards it uses; an open transaction
    keeps the connection that it began on.
    """

    client_class = DatabaseClient
    ops_class = DatabaseOperations
    creation_class = DatabaseCreation
    introspection_class = DatabaseIntrospection
    SchemaEditorClass = DatabaseSchemaEditor
    ops: DatabaseOperations

    def __init__(self, settings_dict: dict[str, Any], alias: str) -> None:
        super().__init__(settings_dict, alias)
        self.shard: int = settings_dict["SHARD"]
        self.schema = get_cluster().schema_of(self.shard)
        self.isolation_level: Any
        self._node: Node | None = None

    def prepare_database(self) -> None:
        """Refuse ``manage.py migrate``, which begins with it. Raises BadArgument."""
        raise BadArgument(
            f"shard {self.shard} is migrated like all others, and not by migrate",
            hint=f"manage.py migrate_shards --shards {self.shard}",
        )

    def configure(self, connection: Any) -> None:
        """Prepare a new connection of the pool, which is in autocommit mode."""
        inherited: Any = super()
        inherited._configure_connection(connection)

    def node(self) -> Node:
        """Return the node that holds the shard now. Raises UnknownShard or ShardLost if none does."""
        return get_cluster().node_of(self.shard)

    @property
    def pool(self) -> ConnectionPool[Any]:
        """The node's pool."""
        return pools.of(self.node(), self)

    def close_pool(self) -> None:
        """Close the node's pool; the next connection opens another."""
        pools.close(self.node())

    def get_connection_params(self) -> dict[str, Any]:
        """Return psycopg's arguments: Django's own, and the node's address as the catalog has it."""
        params = super().get_connection_params()
        del params["dbname"]
        return {**params, **pools.address(self.node())}

    def ensure_connection(self) -> None:
        """Connect if need be; between transactions also if the shard lives on another node by now.

        Raises:
            BadArgument: a test run, and the shard is of the application's cluster.
            UnknownShard, ShardLost: no node holds the shard any more; the connection was given back.
        """
        refuse_tests()
        if self.connection is not None and pools.is_of_others(self.connection):
            if self.in_atomic_block:
                raise BadArgument(
                    f"alias {self.alias} is in a transaction that began before, or outlives, a test that is"
                    " rolled back",
                    hint="Begin the test's rollback first, and end it last.",
                )
            self.close()
        if self.connection is not None and (_is_free(self) or self._is_lost()):
            if self.errors_occurred and not configuration().get("LISTEN", True):
                get_cluster().refresh()
            if self._node != self._node_or_closed():
                self.close()
        super().ensure_connection()

    def close_if_health_check_failed(self) -> None:
        """Look before each statement whether a node holds the shard; the pool checks connections."""
        self._node_or_closed()

    def close_if_unusable_or_obsolete(self) -> None:
        """Close the connection, at the ends of a request, if it is of no use: its shard may be lost."""
        try:
            super().close_if_unusable_or_obsolete()
        except ShardidsError:
            self.close()

    def _node_or_closed(self) -> Node:
        try:
            return self.node()
        except ShardidsError:
            # Or every request of this thread would fail, whichever shard it is about.
            self.close()
            raise

    def rollback(self) -> None:
        """Roll back. What failed is not forgotten by that: the shard may have moved."""
        failed = self.errors_occurred
        super().rollback()
        self.errors_occurred = failed

    def _is_lost(self) -> bool:
        connection: psycopg.Connection[Any] = self.connection
        return connection.closed and not self.in_atomic_block

    def _close(self) -> None:
        """Give the connection back to the pool that it came from, wherever the shard is now."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with self.wrap_database_errors:
                connection._pool.putconn(connection)

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """Return the thread's connection to the node if it is free, else one of the node's pool."""
        self._node = self.node()
        for other in connections.all(initialized_only=True):
            if isinstance(other, DatabaseWrapper) and other._node == self._node and _is_free(other):
                connection, other.connection = other.connection, None
                self.isolation_level = other.isolation_level
                return connection
        pools.admit(self._node, conn_params)
        return super().get_new_connection(conn_params)


def _is_free(wrapper: DatabaseWrapper) -> bool:
    connection: psycopg.Connection[Any] | None = wrapper.connection
    return (
        connection is not None
        and not wrapper.in_atomic_block
        and wrapper.autocommit
        and connection.info.transaction_status == TransactionStatus.IDLE
    )
