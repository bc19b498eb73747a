"""A node's connection, as seen from one of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Executable


class ShardConnection:
    """A node's connection as the flush of one shard's objects sees it.

    What it executes has the shard's ``schema_translate_map``; all else is the node's connection's own.
    SQLAlchemy puts rows whose connections are equal into one INSERT, so two of these are equal only if their
    shards are.
    """

    __slots__ = ("_connection", "_options")

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._connection = connection
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardConnection)
            and self._connection is other._connection
            and self._options == other._options
        )

    def __hash__(self) -> int:
        return hash(self._connection)

    def execute(
        self,
        statement: Executable,
        parameters: Any = None,
        *,
        execution_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """As :meth:`sqlalchemy.Connection.execute`, in the shard."""
        options = {**(execution_options or {}), **self._options}
        return self._connection.execute(statement, parameters, execution_options=options)

    def scalar(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalar`, in the shard."""
        return self.execute(statement, parameters, **options).scalar()

    def scalars(self, statement: Executable, parameters: Any = None, **options: Any) -> Any:
        """As :meth:`sqlalchemy.Connection.scalars`, in the shard."""
        return self.execute(statement, parameters, **options).scalars()
