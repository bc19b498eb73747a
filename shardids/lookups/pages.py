"""A look-up that was created, and what asks the shards about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import RegisteredLookup, schema_name
from shardids.client.claim_statements import Rows
from shardids.client.listener import FollowedPlacement
from shardids.client.lookups import Claims
from shardids.lookups.columns import (
    ShardColumn,
    check_claims,
    check_columns,
    check_owners,
    model_of,
    shard_columns,
)
from shardids.lookups.lifecycle import known
from shardids.models.lookups import Lookup

PAGE: Final = 1_000
"""How many values one statement reads or claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A look-up, and what asks the shards about it.

    Attributes:
        registered: what the catalog has.
        lookup: what a model would define.
        columns: what each shard says of the column.
        claims: returns what changes claims, and reads rows by a given reader; in sessions whose names are
            PostgreSQL's own.
        shards: all shards.
        schema_of: returns a shard's schema.
        nodes, shards_of: the nodes, and the shards of each.
    """

    registered: RegisteredLookup
    lookup: Lookup
    columns: dict[int, ShardColumn]
    claims: Callable[[Rows], Claims]
    shards: Sequence[int]
    schema_of: Callable[[int], str]
    nodes: Nodes
    shards_of: Mapping[str, Sequence[int]]


@contextmanager
def opened(catalog: Catalog, name: str) -> Iterator[Opened]:
    """Yields a look-up that was created.

    Raises:
        ClusterConflict: there is no such look-up, or the shards differ.
        BadArgument: values of the column can't be claimed any more.
        MissingPrivilege: claims belong to another role than the engine's owner.
    """
    registered = known(catalog, name)
    placement, description = catalog.placement(), catalog.describe()
    own = "shardids lookup"
    with (
        Nodes(placement.nodes, catalog.url, application_name=own, read_only=catalog.read_only) as nodes,
        Nodes(
            placement.nodes,
            catalog.url,
            application_name=own,
            autocommit=True,
            read_only=catalog.read_only,
        ) as claiming,
    ):
        columns = shard_columns(nodes, placement, registered)
        check_columns(columns, placement, registered)
        check_owners(nodes, placement, columns)
        check_claims(columns, registered)
        schema_of = partial(schema_name, description.schema_prefix)
        claims_ = partial(
            Claims,
            FollowedPlacement(catalog, listen=False),
            lambda node: claiming[node.name],
            shard_count=description.shard_count,
            schema_of=schema_of,
        )
        yield Opened(
            registered=registered,
            lookup=model_of(registered, next(iter(columns.values()))),
            columns=columns,
            claims=lambda rows: claims_(rows=rows),
            shards=placement.all_shards(),
            schema_of=schema_of,
            nodes=nodes,
            shards_of=placement.by_node(),
        )
