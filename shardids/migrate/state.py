"""At which revision the shards are: one query a node, all nodes at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import Engine, text

from shardids.catalog.connections import open_engine, parse_url, with_password_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, Placement
from shardids.errors import ConnectionFailed, ShardidsError, StatementFailed, UnknownShard
from shardids.migrate.mend import mend_indexes
from shardids.migrate.plan import Position

APPLICATION_NAME = "shardids migrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The shards that could be asked, by number, and the nodes and shards that could not, with the reason."""

    positions: Mapping[int, Position]
    down: Mapping[str, ShardidsError]
    unread: Mapping[int, ShardidsError]


def migration_engine(node: Node, catalog: Catalog, connections: int = 1) -> Engine:
    """An engine of up to ``connections`` to a node, in which every statement is a transaction of its own."""
    engine = open_engine(
        with_password_of(parse_url(node.url), catalog.url),
        what=f'node "{node.name}"',
        administrative=True,
        pool_size=connections,
        max_overflow=0,
        connect_args={"application_name": APPLICATION_NAME},
    )
    mend_indexes(engine)
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def read_state(catalog: Catalog, placement: Placement, shards: Collection[int], version_table: str) -> State:
    """Asks every node that holds one of the shards for their revisions."""
    wanted: dict[str, set[int]] = {}
    for shard in shards:
        wanted.setdefault(placement.locate(shard).name, set()).add(shard)
    positions: dict[int, Position] = {}
    down: dict[str, ShardidsError] = {}
    unread: dict[int, ShardidsError] = {}
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        asked = {
            name: pool.submit(read_node, catalog, placement.nodes[name], version_table) for name in wanted
        }
    for name, answer in asked.items():
        try:
            there = answer.result()
        except ConnectionFailed as error:
            down[name] = error
            continue
        positions |= {shard: there[shard] for shard in wanted[name] if shard in there}
        unread |= {shard: _missing(shard, name) for shard in wanted[name] if shard not in there}
    return State(positions=positions, down=down, unread=unread)


def read_node(catalog: Catalog, node: Node, version_table: str) -> dict[int, Position]:
    """Asks a node for the revisions of all its shards.

    Raises:
        ConnectionFailed: it is down.
        StatementFailed: its engine is of a version without migrations.
    """
    engine = migration_engine(node, catalog)
    try:
        with engine.connect() as connection:
            rows = connection.execute(
                text("select shard, revisions, unfinished from shardids.revisions(:table)"),
                {"table": version_table},
            ).all()
    except StatementFailed as error:
        if error.sqlstate == "42883":
            raise StatementFailed(
                f'node "{node.name}" has an engine that is too old for migrations',
                hint="To bring shardids' own objects up to date: shardids upgrade",
            ) from error
        raise
    finally:
        engine.dispose()
    return {
        row.shard: Position(
            shard=row.shard,
            node=node.name,
            heads=None if row.revisions is None else tuple(row.revisions),
            unfinished=row.unfinished,
        )
        for row in rows
    }


def _missing(shard: int, node: str) -> UnknownShard:
    return UnknownShard(
        f'the catalog places shard {shard} on node "{node}", which does not have it',
        hint="Restore its schema on that node from a backup.",
    )
