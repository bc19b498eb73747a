"""Reads all values of a look-up, page by page: those of the rows, and those that are claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Engine

from shardids.catalog import claims
from shardids.catalog.claims import SQL_TYPES, Stamped
from shardids.catalog.nodes import Nodes
from shardids.catalog.queries import batches, prepare
from shardids.catalog.rows import Catalog
from shardids.catalog.strangers import strangers_code
from shardids.catalog.topology import RegisteredLookup, schema_name
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
        claims: asks the shards, in sessions whose names are PostgreSQL's own.
        shards: all shards.
        schema_of: returns a shard's schema.
        nodes, shards_of: the nodes, and the shards of each.
    """

    registered: RegisteredLookup
    lookup: Lookup
    columns: dict[int, ShardColumn]
    claims: Claims
    shards: Sequence[int]
    schema_of: Callable[[int], str]
    nodes: Nodes
    shards_of: Mapping[str, Sequence[int]]

    def rows(self, shard: int) -> Iterator[list[Any]]:
        """Yields the values of a shard's rows, in their order."""
        one = self.lookup
        for page in self._pages(
            shard,
            lambda schema, type_, after: claims.page_of_rows(
                schema, one.table, one.column, type_, after=after
            ),
        ):
            yield [row[0] for row in page]

    def claimed(self, shard: int) -> Iterator[dict[Any, Stamped]]:
        """Yields the claims that a shard keeps, by value."""
        table = self.registered.claims
        for page in self._pages(
            shard, lambda schema, type_, after: claims.page_of_claims(schema, table, type_, after=after)
        ):
            yield {value: (of, stamp) for value, of, stamp in page}

    def without_claims(self, shard: int, values: list[Any]) -> list[Any]:
        """Returns those values of a shard's rows that are not claimed for it."""
        found = self.claims.find(self.lookup, values)
        return [value for value in values if found.get(value, (None,))[0] != shard]

    def with_rows(self, shard: int, values: list[Any]) -> list[Any]:
        """Returns those of the values that rows of a shard have, as far as is committed."""
        one, type_ = self.lookup, SQL_TYPES[self.lookup.kind.__name__]
        statement = claims.rows_in(self.schema_of(shard), one.table, one.column, type_)
        return [row[0] for row in self.claims.ask(shard, statement, values)] if values else []

    def without_rows(self, found: dict[Any, Stamped]) -> dict[Any, Stamped]:
        """Returns those of the claims whose shard has no such row, as far as is committed."""
        by_shard: dict[int, list[Any]] = {}
        for value, (shard, _) in found.items():
            by_shard.setdefault(shard, []).append(value)
        there = {value for shard, values in by_shard.items() for value in self.with_rows(shard, values)}
        return {value: stamped for value, stamped in found.items() if value not in there}

    def strangers_code(self) -> dict[tuple[str, int], str]:
        """Returns what code of others it would run to read rows or claims, by table and shard."""
        tables = (self.lookup.table, self.registered.claims)

        def ask(name: str, engine: Engine) -> dict[tuple[str, int], str]:
            shard_of = {self.schema_of(shard): shard for shard in self.shards_of.get(name, ())}
            found: dict[tuple[str, int], str] = {}
            with engine.connect() as connection:
                for batch in batches(list(shard_of)):
                    there = [(schema, table) for schema in batch for table in tables]
                    with connection.begin():
                        prepare(connection)
                        code = strangers_code(connection, there)
                    found |= {(table, shard_of[schema]): what for (schema, table), what in code.items()}
            return found

        answers = self.nodes.each(ask).all()
        return {place: what for found in answers.values() for place, what in found.items()}

    def _pages(self, shard: int, statement: Any) -> Iterator[list[Any]]:
        schema, type_ = self.schema_of(shard), SQL_TYPES[self.lookup.kind.__name__]
        page = self.claims.ask(shard, statement(schema, type_, False), PAGE)
        while page:
            yield page
            if len(page) < PAGE:
                return
            page = self.claims.ask(shard, statement(schema, type_, True), page[-1][0], PAGE)


@contextmanager
def opened(catalog: Catalog, name: str) -> Iterator[Opened]:
    """Yields a look-up that was created.

    Raises:
        ClusterConflict: there is no such look-up, or the shards differ.
        BadArgument: values of the column can't be claimed any more.
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
        check_owners(columns, registered)
        check_claims(columns, registered)
        schema_of = partial(schema_name, description.schema_prefix)
        claims_ = Claims(
            FollowedPlacement(catalog, listen=False),
            lambda node: claiming[node.name],
            shard_count=description.shard_count,
            schema_of=schema_of,
        )
        yield Opened(
            registered=registered,
            lookup=model_of(registered, next(iter(columns.values()))),
            columns=columns,
            claims=claims_,
            shards=placement.all_shards(),
            schema_of=schema_of,
            nodes=nodes,
            shards_of=placement.by_node(),
        )
