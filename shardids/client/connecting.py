"""Engines and connections of nodes and shards, and what needs no session: blocks of IDs, and COPY."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine

from shardids.catalog.topology import Node
from shardids.client import blocks
from shardids.client.blocks import IdBlock
from shardids.client.copying import ROWS_A_TRANSACTION, Copied, CopyReport, CopySettings, copy_rows, quietly
from shardids.client.engines import NodeEngines
from shardids.client.finding import ShardsOfCluster
from shardids.client.retries import PATIENCE_S
from shardids.client.routing import After


class ConnectsToShards(ShardsOfCluster):
    """The part of :class:`shardids.Cluster` below the ORM."""

    def __init__(self, *facts: Any, engines: NodeEngines) -> None:
        super().__init__(*facts)
        self._engines = engines

    def engine(self, node: Node) -> Engine:
        """Returns the engine, with its pool, of a node."""
        return self._engines.of(node)

    def connection(self, shard: int) -> Connection:
        """Returns a Core connection on one shard, with the same ``schema_translate_map``."""
        return self.shard_engine(shard).connect()

    def shard_engine(self, shard: int) -> Engine:
        """Returns the node's engine as seen from one shard: it shares the node's pool."""
        return self._engines.of_shard(shard, self.node_of(shard))

    def reserve(self, shard: int, count: int, *, after: After | None = None) -> IdBlock:
        """Sets ``count`` IDs of a shard aside in one call; see :class:`shardids.client.blocks.IdBlock`.

        With ``after``, all of them sort after these IDs, as those of :meth:`session` do.

        Raises:
            BadArgument: a count below 1 or above the node's ``max_reserve``, or an ID as in :meth:`session`.
            ShardFenced, ShardMoved, TooFarAhead, TimeExhausted: as they say.
        """
        number, latest = self._checked(shard), self._latest(after)
        with self.engine(self.node_of(number)).begin() as connection:
            return blocks.reserve(connection, number, count, self.layout, after=latest)

    def copy(
        self,
        table: Any,
        rows: Any,
        *,
        columns: Sequence[Any] | None = None,
        key: Any = None,
        region: str | None = None,
        id: Any = None,  # noqa: A002 -- the field's word for it
        shard: int | None = None,
        on_progress: Callable[[Copied], object] = quietly,
        rows_a_transaction: int = ROWS_A_TRANSACTION,
        patience_s: float = PATIENCE_S,
    ) -> CopyReport:
        """Copies rows into their shards by COPY, over all nodes at once; returns how many each shard got.

        ``table`` is a ``Table`` or a mapped class. ``rows`` is an iterable of mappings, of named tuples, or
        of tuples whose ``columns`` are named; a polars ``DataFrame``; or an Arrow table or record batch
        (extra ``arrow``). All rows have the same columns. IDs are reserved for rows without one; a column
        that the rows lack gets its default, in Python or on the server. Values are written as an INSERT would
        write them, but for SQL expressions.

        A row's shard is told by what the model says: sharding key, ID, foreign keys to either. ``key`` names
        the column to shard by where it does not, ``region`` the region of all keys, and ``id`` a column that
        holds IDs; ``shard`` is one for all rows. What tells the shard agrees in each row, and the named
        column is not NULL.

        Up to ``rows_a_transaction`` rows of a shard are a transaction, and at most ten times as many are in
        memory. It is not one transaction: when it fails, each shard has the first of its rows, in the order
        given, or none. Before that, a transaction that meets a move is repeated on the new owner, as
        :meth:`run` does. IDs that were reserved for rows that were not copied are lost.

        ``on_progress`` is called after each COMMIT with the :class:`shardids.client.copying.Copied` rows and
        IDs.

        Raises:
            BadArgument: the table or the columns are unfit. Nothing was copied.
            CopyFailed: it stopped; it says where and why, and how many rows of each shard are committed.
        """
        settings = CopySettings(
            columns=columns,
            key=key,
            region=region,
            id_=id,
            shard=None if shard is None else self._checked(shard),
            on_progress=on_progress,
            rows_a_transaction=rows_a_transaction,
            patience_s=patience_s,
        )
        return copy_rows(self, table, rows, settings, followed=self._followed, engine_of=self.engine)
