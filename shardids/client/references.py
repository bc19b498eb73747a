"""A session that writes reference tables, on the node where they are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from shardids.catalog.references import AWAIT, MARK, WITHIN_S, slots_of, writer_of
from shardids.catalog.rows import Catalog
from shardids.client.engines import NodeEngines
from shardids.client.finding import ShardsOfCluster
from shardids.client.options import SessionOptions
from shardids.errors import ClusterConflict, ReferencesBehind


class ReferenceSession(Session):
    """A plain session on the writer of reference tables; see :meth:`shardids.Cluster.reference_session`.

    ``followers`` returns the nodes that follow the writer now, by their slots; ``None`` if COMMIT waits for
    nobody.
    """

    def __init__(
        self,
        bind: Engine,
        *,
        followers: Callable[[], Mapping[str, str]] | None,
        within_s: float,
        **options: Any,
    ) -> None:
        super().__init__(bind, **options)
        self._writer = bind
        self._followers = followers
        self._within_s = within_s
        self._has_committed = False

    def note_commit(self) -> None:
        """Notes that the transaction, or a savepoint in it, was committed."""
        self._has_committed = True

    def await_followers(self) -> None:
        """Waits for the followers after a commit, once the session's connection is free again.

        Raises:
            ReferencesBehind: some have not followed in time.
        """
        had_committed, self._has_committed = self._has_committed, False
        if had_committed and self._followers is not None:
            await_followers(self._writer, self._followers(), self._within_s)


def await_followers(writer: Engine, followers: Mapping[str, str], within_s: float) -> None:
    """Waits until nodes have what the writer has committed; ``followers`` are their names, by their slots.

    Raises:
        ReferencesBehind: some have not in time.
    """
    if behind := followers_behind(writer, followers, within_s):
        raise ReferencesBehind(
            f"the change is committed, and has not reached node {behind} within {within_s:g} s",
            hint="It arrives when the node follows again. See: shardids reference status",
        )


def followers_behind(writer: Engine, followers: Mapping[str, str], within_s: float) -> str:
    """Waits as :func:`await_followers` does; returns the names of those that are behind, for a message."""
    with writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wanted = connection.scalar(MARK)
        asked = {"slots": list(followers), "wanted": wanted, "patience_s": within_s}
        behind = sorted(followers[slot] for slot in connection.scalars(AWAIT, asked))
    return ", ".join(f'"{name}"' for name in behind)


class WritesReferences(ShardsOfCluster):
    """The part of :class:`shardids.Cluster` that writes reference tables."""

    def __init__(self, *facts: Any, catalog: Catalog, engines: NodeEngines) -> None:
        super().__init__(*facts)
        self._catalog = catalog
        self._engines = engines
        self._writer: str | None = None
        self._writer_at = -1

    def reference_session(
        self, *, wait: bool = False, within_s: float = WITHIN_S, **options: Unpack[SessionOptions]
    ) -> Session:
        """Returns a plain SQLAlchemy session on the node where reference tables are written to.

        With ``wait=True`` COMMIT returns when all nodes have the change on disk, and so does the end of a
        block that commits. ``options`` go to :class:`sqlalchemy.orm.Session`. Rows are deleted by
        ``shardids reference delete``: the server refuses DELETE, TRUNCATE and changes of keys.

        Raises:
            ClusterConflict: the cluster has no reference tables.
            ConnectionFailed: the catalog cannot be reached, and was not asked since nodes or shards changed.

        The session's COMMIT raises:
            ReferencesBehind: ``wait=True``, and a node has not followed ``within_s`` seconds. The change is
                committed, and arrives when that node follows again.
        """
        return ReferenceSession(self._reference_writer(), **self._waiting(wait, within_s), **options)

    def _reference_writer(self) -> Engine:
        # Its changes count as those of the placement.
        version = self.placement.version
        if self._writer is None or self._writer_at != version:
            self._writer = writer_of(self._catalog)
            self._writer_at = version
        if self._writer is None:
            raise ClusterConflict(
                "the cluster has no reference tables",
                hint="To make one: shardids reference create NAME --writer NODE",
            )
        return self._engines.of(self.placement.nodes[self._writer])

    def _waiting(self, wait: bool, within_s: float) -> dict[str, Any]:
        return {"followers": self._reference_followers if wait else None, "within_s": within_s}

    def _reference_followers(self) -> dict[str, str]:
        return slots_of(self._description.cluster, self.placement.nodes, str(self._writer))


@event.listens_for(ReferenceSession, "after_commit")
def _note(session: Any) -> None:
    session.note_commit()


@event.listens_for(ReferenceSession, "after_transaction_end")
def _await(session: Any, transaction: Any) -> None:
    if transaction.parent is None:
        session.await_followers()
