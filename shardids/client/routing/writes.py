"""Rows that SQLAlchemy writes without asking for each object's connection: associations, and in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection, Insert, insert, inspect
from sqlalchemy.orm import Mapper

from shardids.client.routing.claiming import Claiming
from shardids.client.routing.connection import ShardConnection
from shardids.client.routing.inserts import shard_of_row, with_default_key
from shardids.client.routing.models import ShardFinder, facts_of
from shardids.client.routing.placing import set_default_key, shard_of_object
from shardids.client.routing.readings import Read
from shardids.client.routing.statements import Shards
from shardids.errors import BadArgument


class Writer(Protocol):
    """What is needed of the session over all shards."""

    @property
    def shards(self) -> ShardFinder:
        """Who knows the shards of IDs and keys."""

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""


class Matched:
    """How many rows the shards say that they changed."""

    def __init__(self, results: Iterable[Any]) -> None:
        found = list(results)
        self.rowcount = sum(result.rowcount for result in found)
        self._is_sane = all(result.supports_sane_multi_rowcount() for result in found)

    def supports_sane_multi_rowcount(self) -> bool:
        """Returns whether the count can be relied on."""
        return self._is_sane


class AssociationConnection:
    """What a flush writes the rows of association tables over: each into the shard that its keys name."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def execute(self, statement: Any, rows: Sequence[Mapping[str, Any]]) -> Matched:
        """Executes an INSERT, UPDATE or DELETE of rows of an association table.

        Raises:
            WrongShard: the keys of a row name two shards.
            BadArgument: they name none.
        """
        by_shard: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            by_shard[self._shard_of(statement, row)].append(row)
        return Matched(
            ShardConnection(self._writer.node_connection(shard), self._writer.options_of(shard)).execute(
                statement, of_shard
            )
            for shard, of_shard in by_shard.items()
        )

    def _shard_of(self, statement: Any, row: Mapping[str, Any]) -> int:
        read = Read(statement, row, self._writer.shards)
        if isinstance(statement, Insert):
            return shard_of_row(row, read.reading, self._writer.shards, None)
        named = read.named().shards
        if named is None or len(named) != 1:
            raise BadArgument(
                f"the keys of a row of {statement.table.name} do not name one shard",
                hint="Each row of an association table lives where the objects are that it connects: make"
                " its columns foreign keys to their IDs.",
            )
        return next(iter(named))


class BulkWrites(Claiming):
    """Bulk operations of a session over all shards."""

    shards: Shards
    _writing: int | None = None
    _inserting: int | None = None

    def bulk_save_objects(self, objects: Any, *arguments: Any, **options: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_save_objects`, each object into its shard."""
        for shard, some in objects_by_shard(objects, self.shards).items():
            with self.writing_to(shard):
                super().bulk_save_objects(some, *arguments, **options)
            self.claim_objects(some, shard)

    def bulk_insert_mappings(self, mapper: Any, mappings: Any, *arguments: Any, **options: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_insert_mappings`, each row into its shard."""
        for shard, some in mappings_by_shard(inspect(mapper).mapper, mappings, self.shards).items():
            with self.writing_to(shard):
                super().bulk_insert_mappings(mapper, some, *arguments, **options)
            self.claim_rows(inspect(mapper).mapper, some, shard, are_new=True)

    def bulk_update_mappings(self, mapper: Any, mappings: Any) -> None:
        """As :meth:`sqlalchemy.orm.Session.bulk_update_mappings`, each row in its shard."""
        for shard, some in mappings_by_shard(inspect(mapper).mapper, mappings, self.shards).items():
            with self.writing_to(shard):
                super().bulk_update_mappings(mapper, some)
            self.claim_rows(inspect(mapper).mapper, some, shard, are_new=False)

    @contextmanager
    def writing_to(self, shard: int) -> Iterator[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""
        self._writing = shard
        try:
            yield
        finally:
            self._writing = None

    @contextmanager
    def inserting(self, shard: int) -> Iterator[None]:
        """While rows are inserted into one shard, not objects into any."""
        self._inserting = shard
        try:
            yield
        finally:
            self._inserting = None


def objects_by_shard(objects: Iterable[object], finder: ShardFinder) -> dict[int, list[object]]:
    """Returns the objects of a bulk operation by their shards. Relationships, not written, don't count.

    Raises:
        BadArgument: nothing tells an object's shard, or an ID is of no shard of the cluster.
        WrongShard: two things tell different ones.
        UnsupportedKey: a sharding key that has no hash.
    """
    by_shard: dict[int, list[object]] = defaultdict(list)
    for one in objects:
        state = inspect(one)
        set_default_key(state)
        by_shard[shard_of_object(state, finder)].append(one)
    return by_shard


def mappings_by_shard(
    mapper: Mapper[Any], rows: Iterable[dict[str, Any]], finder: ShardFinder
) -> dict[int, list[dict[str, Any]]]:
    """Returns the rows of a bulk operation by their shards. Raises as :func:`objects_by_shard` does."""
    reading = Read(insert(mapper), None, finder).reading
    by_shard: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        with_default_key(facts_of(mapper), row)
        by_shard[shard_of_row(row, reading, finder, None)].append(row)
    return by_shard
