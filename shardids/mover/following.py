"""Whether the target of a move has the rows of reference tables that the shard's rows refer to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Engine

from shardids.catalog.references import AWAIT, MARK, WITHIN_S, references_of, slot_of
from shardids.catalog.rows import Catalog
from shardids.errors import MoveFailed
from shardids.mover.sides import Directory, move_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencesOfTarget:
    """What the target has of reference tables: rows that arrive there are not checked against foreign keys.

    Attributes:
        target: the node's name.
        writer: the node that reference tables are written to on; ``None`` if the target follows nobody: it
            is the writer, or there are no reference tables.
        slot: the target's replication slot there.
    """

    target: str
    writer: Engine | None
    slot: str

    @classmethod
    @contextmanager
    def opened(
        cls, catalog: Catalog, directory: Directory, target: str, *, name: str
    ) -> Iterator[ReferencesOfTarget]:
        """Yields those of a move to a node; ``name`` is the name of its sessions."""
        known = references_of(catalog)
        slot = slot_of(directory.cluster, target)
        if known.writer in (None, target) or "active" not in known.states.values():
            yield cls(target=target, writer=None, slot=slot)
            return
        with move_nodes(directory.placement, directory.login, name=name) as nodes:
            yield cls(target=target, writer=nodes[str(known.writer)], slot=slot)

    def arrive(self, *, within_s: float) -> bool:
        """Waits until the target has all that the writer has committed; returns false if time runs out."""
        if self.writer is None:
            return True
        with self.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wanted = connection.scalar(MARK)
            asked = {"slots": [self.slot], "wanted": wanted, "patience_s": within_s}
            return not connection.scalars(AWAIT, asked).all()

    def require(self) -> None:
        """Requires that the target follows.

        Raises:
            MoveFailed: it has not in time.
        """
        if not self.arrive(within_s=WITHIN_S):
            raise MoveFailed(
                f'node "{self.target}" has not followed the writer of reference tables within {WITHIN_S:g} s:'
                " rows of the shard could refer to rows that it lacks",
                hint="See: shardids reference status. Then resume the move with --resume, or undo it with"
                " --abort.",
            )
