"""Fences a shard, and ends that: on the node where the catalog places it, and not while it is moved."""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardids.catalog.queries import read
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.errors import ClusterConflict, UnknownShard
from shardids.metrics.facts import Shard
from shardids.mover.alone import alone


def require_state(catalog: Catalog, shard: int, state: str) -> str:
    """Returns the node of a shard that is in this state there, and is not being moved.

    Raises:
        ClusterConflict: it is in another state, or a move of it or an adoption is not over.
    """
    with alone(catalog, shard) as (node, connection):
        _require(connection, node, shard, state)
    return node


def fence(catalog: Catalog, shard: int) -> str:
    """Stops a shard from issuing IDs, at once and for every session; returns what to tell.

    Raises:
        ClusterConflict: it is not active, or a move of it or an adoption is not over.
    """
    with alone(catalog, shard) as (node, connection):
        _require(connection, node, shard, "active")
        with connection.begin():
            connection.execute(text("select shardids.fence(:shard)"), {"shard": shard})
    return f'Shard {shard} on node "{node}" is fenced'


def activate(catalog: Catalog, shard: int) -> str:
    """Lets a fenced shard issue IDs again; returns what to tell.

    Raises:
        ClusterConflict: it is not fenced, or a move of it or an adoption is not over.
    """
    with alone(catalog, shard) as (node, connection):
        _require(connection, node, shard, "fenced")
        with connection.begin():
            bring(connection, skipped_ranges(catalog, [shard]))
            connection.execute(text("select shardids.activate(:shard)"), {"shard": shard})
    return f'Shard {shard} on node "{node}" is active'


def _require(connection: Connection, node: str, shard: int, state: str) -> None:
    found = [
        one
        for one in read(connection, "metrics/shards.v1", Shard, first_shard=shard, count=1)
        if one.shard == shard
    ]
    if not found:
        raise UnknownShard(
            f'the catalog places shard {shard} on node "{node}", which does not have it',
            hint="Restore its schema there from a backup, or see what else can be done: shardids doctor",
        )
    if found[0].state != state:
        raise ClusterConflict(
            f'shard {shard} on node "{node}" is {found[0].state}, not {state}',
            hint="shardids doctor says what to do.",
        )
