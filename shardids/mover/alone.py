"""One shard for one command: no move of it, and no adoption, begins meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict
from shardids.mover.journal import Journal


@contextmanager
def alone(catalog: Catalog, shard: int) -> Iterator[tuple[str, Connection]]:
    """Yields the owner node of a shard and a connection there; nobody can move the shard meanwhile.

    Raises:
        ClusterConflict: a move of it or an adoption is not over.
        UnknownShard, ShardLost: no node holds it.
    """
    with Journal.opened(catalog, shard) as journal:
        journal.refuse_open()
        _refuse_adoption(catalog)
        node = catalog.node_of(shard)
        with (
            Nodes({node.name: node}, catalog.url, durable=True) as nodes,
            nodes[node.name].connect() as connection,
        ):
            yield node.name, connection


def _refuse_adoption(catalog: Catalog) -> None:
    """An adoption fences shards and activates them itself."""
    with catalog.engine.connect() as connection:
        is_open = connection.scalar(
            text("select exists (select from shardids_catalog.adoption where ended_at is null)")
        )
    if is_open:
        raise ClusterConflict("an adoption is not over", hint="To see how far it is: shardids adopt status")
