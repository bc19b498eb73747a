"""A session that writes reference tables, on the node where they are written to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from shardids.catalog.references import AWAIT, MARK, slots_of, writer_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.client.engines import substitute
from shardids.client.placement import FollowedPlacement
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, ReferencesBehind, ShardidsError

_LOOK_S: Final = 0.5
"""How long to wait for followers before asking the catalog whether they follow another node now."""


class ReferenceSession(Session):
    """A plain session on the writer of reference tables; see :meth:`shardids.Cluster.reference_session`.

    ``await_followers`` is called after each commit, once the session's connection is free again; ``None`` if
    COMMIT waits for nobody.
    """

    def __init__(self, bind: Engine, *, await_followers: Callable[[], None] | None, **options: Any) -> None:
        super().__init__(bind, **options)
        self._await_followers = await_followers
        self._has_committed = False

    def note_commit(self) -> None:
        """Note that the transaction, or a savepoint in it, was committed."""
        self._has_committed = True

    def await_followers(self) -> None:
        """Wait for the followers after a commit.

        Raises:
            ReferencesBehind: some have not confirmed it in time.
        """
        had_committed, self._has_committed = self._has_committed, False
        if had_committed and self._await_followers is not None:
            self._await_followers()


def followers_behind(writer: Engine, followers: Mapping[str, str], within_s: float) -> str:
    """Wait until nodes have received the writer's commits; ``followers`` are their names, by their slots.

    Returns the names of those that have not received them in time, for a message.
    """
    with writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return _behind(connection, followers, str(connection.scalar(MARK)), within_s)


def _behind(connection: Connection, followers: Mapping[str, str], wanted: str, patience_s: float) -> str:
    asked = {"slots": list(followers), "wanted": wanted, "patience_s": patience_s}
    behind = sorted(followers[slot] for slot in connection.scalars(AWAIT, asked))
    return ", ".join(f'"{name}"' for name in behind)


class ReferenceWriter:
    """The writer of a cluster's reference tables, and the wait for the nodes that follow it.

    Args:
        catalog: names the writer.
        followed: the placement.
        engine_of: gives the engine of a node.
        cluster: the cluster's identifier, which is in the names of replication slots.
    """

    def __init__(
        self,
        catalog: Catalog,
        followed: FollowedPlacement,
        engine_of: Callable[[Node], Engine],
        cluster: UUID,
    ) -> None:
        self._catalog = catalog
        self._followed = followed
        self._engine_of = engine_of
        self._cluster = cluster
        self._writer: str | None = None
        self._writer_at = -1

    def writer(self) -> Node:
        """Return the node where reference tables are written to.

        Raises:
            BadArgument: a test that is rolled back asks.
            ClusterConflict: the cluster has no reference tables.
            ConnectionFailed: the catalog cannot be reached, and was not asked since nodes or shards changed.
        """
        if substitute() is not None:
            raise BadArgument(
                "reference tables reach the nodes by COMMIT, and this test is rolled back",
                hint="Write them in a fixture of the whole run, before shard_rollback.",
            )
        # Its changes count as those of the placement.
        placement = self._followed.current
        if self._writer is None or self._writer_at != placement.version:
            self._writer = writer_of(self._catalog)
            self._writer_at = placement.version
        if self._writer is None:
            raise ClusterConflict(
                "the cluster has no reference tables",
                hint="To make one: shardids reference create NAME --writer NODE",
            )
        return placement.nodes[self._writer]

    def waiting(self, writer: Node, wait: bool, within_s: float) -> dict[str, Any]:
        """Return the keyword of :class:`ReferenceSession` that says whom COMMIT waits for."""
        return {"await_followers": partial(self._await_followers, writer, within_s) if wait else None}

    def _await_followers(self, writer: Node, within_s: float) -> None:
        """Wait until nodes have received the commits of a node that was the writer at that time.

        Another node becomes the writer once it has received all of them, and the catalog names it once all
        nodes follow it and are as far as it is: then nothing is left to wait for, and no follower of the
        old writer confirms anything.
        """
        deadline = time.monotonic() + within_s
        nodes: Mapping[str, Node] = self._followed.current.nodes
        try:
            with (
                self._engine_of(writer)
                .connect()
                .execution_options(isolation_level="AUTOCOMMIT") as connection
            ):
                wanted = str(connection.scalar(MARK))
                while True:
                    left_s = max(deadline - time.monotonic(), 0)
                    followers = slots_of(self._cluster, nodes, writer.name)
                    if not (behind := _behind(connection, followers, wanted, min(left_s, _LOOK_S))):
                        return
                    now, nodes = self._seen(connection, nodes)
                    if nodes.get(writer.name) != writer:
                        raise _lost(writer, "it was replaced")
                    if now not in (None, writer.name):
                        return
                    if not left_s:
                        raise ReferencesBehind(
                            f"the change is committed, and node {behind} has not confirmed it within"
                            f" {within_s:g} s",
                            hint="The node receives it when it follows the writer again. To see the nodes:"
                            " shardids reference list",
                        )
        except ConnectionFailed as error:
            raise _lost(writer, error.message) from error

    def _seen(
        self, connection: Connection, nodes: Mapping[str, Node]
    ) -> tuple[str | None, Mapping[str, Node]]:
        """Return the writer and the nodes as the catalog has them; no writer while it is down."""

        def ask() -> tuple[str | None, Mapping[str, Node]]:
            # The writer first: whoever is added later has what the one before it had.
            return writer_of(self._catalog), self._catalog.placement().nodes

        with suppress(ShardidsError):
            if connection.dialect.is_async:
                return await_only(asyncio.to_thread(ask))
            return ask()
        return None, nodes


def _lost(writer: Node, why: str) -> ReferencesBehind:
    return ReferencesBehind(
        f'the change was committed on node "{writer.name}", which was lost before all nodes had confirmed it:'
        f" {why}",
        hint="Replace the node, then check whether the change is still there. To see the nodes:"
        " shardids reference list",
    )


@event.listens_for(ReferenceSession, "after_commit")
def _note(session: Any) -> None:
    session.note_commit()


@event.listens_for(ReferenceSession, "after_transaction_end")
def _await(session: Any, transaction: Any) -> None:
    if transaction.parent is None:
        session.await_followers()
