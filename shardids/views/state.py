"""Looks for faults of the query node, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import prepare
from shardids.catalog.query_node import QueryNode, query_node_of
from shardids.catalog.references import references_of
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement
from shardids.errors import ConnectionFailed, ShardidsError
from shardids.views.database import connection_to, strangers_on
from shardids.views.refresh import Shown, digest_in, shown_tables, try_nodes, unlike_tables
from shardids.views.statements import FOREIGN

REFRESH: Final = "shardids query-node refresh"
_PATIENCE_S: Final = 10
"""How long a node may keep silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something wrong with the query node. ``is_passing``: a move or a migration may repair it by itself."""

    what: str
    to_do: str
    commands: str = REFRESH
    is_passing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The query node: its place, the number of its tables, and its faults."""

    there: QueryNode
    tables: int | None
    faults: tuple[Fault, ...]


def state_of(catalog: Catalog) -> State | None:
    """Returns the state of the cluster's query node; ``None`` if it has none. Nothing is changed."""
    there = query_node_of(catalog)
    if there is None:
        return None
    placement = catalog.placement()
    shown: Shown | None = None
    faults: list[Fault] = []
    try:
        with connection_to(catalog, there) as database, database.begin():
            prepare(database)
            shown = shown_tables(database)
            faults += _faults(catalog, there, database, shown, placement)
    except ShardidsError as error:
        faults.append(Fault(what=error.message, to_do=error.hint or "Repair it", commands=""))
    return State(there=there, tables=None if shown is None else len(shown.tables), faults=tuple(faults))


def _faults(
    catalog: Catalog, there: QueryNode, database: Connection, shown: Shown, placement: Placement
) -> Iterator[Fault]:
    if strangers := strangers_on(database, there):
        # A table of another role is not read.
        yield from (Fault(what=one.message, to_do=one.fix, commands="") for one in strangers)
        return
    if not shown.has_schemas:
        yield Fault(
            what="it has not been made",
            to_do="Make it; where the nodes ask it for a password: --store-password",
        )
        return
    if digest_in(database) != placement.digest():
        yield Fault(
            what="it does not read every shard from its owner, and sessions are refused there",
            to_do="Refresh it",
            is_passing=True,
        )
    # Other roles than its owner may read the views, but not the foreign tables.
    if database.scalar(
        text("select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = :schema"),
        {"schema": FOREIGN},
    ):
        try:
            # libpq's connect_timeout does not hold in postgres_fdw: a silent node would keep it waiting.
            database.execute(text(f"set local statement_timeout = {_PATIENCE_S * 1000}"))
            try_nodes(database, placement, shown, there.where)
        except ConnectionFailed as error:
            yield Fault(what=error.message, to_do=error.hint, commands="")
        except ShardidsError as error:
            yield Fault(
                what=error.message, to_do=error.hint or "Repair it", commands=f"{REFRESH} --store-password"
            )
    with Nodes(
        placement.nodes, catalog.url, connect_timeout_s=_PATIENCE_S, read_only=catalog.read_only
    ) as nodes:
        names = unlike_tables(nodes, placement, there, shown, references_of(catalog))
    if names:
        yield Fault(
            what=f"tables have changed since it was refreshed: {', '.join(names)}",
            to_do="Refresh it",
            is_passing=True,
        )
