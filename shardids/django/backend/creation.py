"""A shard as one of the databases of a test run: :mod:`shardids.django.testing` makes all of them at once."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import creation

from shardids.django.aliases import require_for_tests


class DatabaseCreation(creation.DatabaseCreation):
    """Makes and drops nothing: the shards of the tests' cluster are there, with their tables."""

    def create_test_db(self, *_: Any, **_options: Any) -> str:
        """Returns the shard's name. Raises BadArgument if it is not of a cluster for tests."""
        require_for_tests()
        return str(self.connection.alias)

    def destroy_test_db(self, *_: Any, **_options: Any) -> None:
        """Leaves the shard to the cluster's end."""

    def serialize_db_to_string(self) -> str:
        """Returns no rows: migrations write none into shards but by RunSQL."""
        return "[]"

    def test_db_signature(self) -> tuple[Any, ...]:
        """Returns what no other alias has."""
        return (self.connection.alias,)
