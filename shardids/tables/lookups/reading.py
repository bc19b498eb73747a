"""A reader of look-ups: pages of rows and claims from each shard, with no rights beyond reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, Final
from uuid import UUID

from shardids.catalog import lookups
from shardids.catalog.lookups import SQL_TYPES, Stamped, shard_of_claim
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node, RegisteredLookup, schema_name
from shardids.client.lookups import Claims, Rows, attempted
from shardids.client.placement import FollowedPlacement
from shardids.errors import MissingPrivilege, StatementFailed
from shardids.models.lookups import Lookup
from shardids.pg.reader import HINT, Reader, Refused, reading_as_reader
from shardids.tables.lookups.lifecycle import (
    ShardColumn,
    check_claims,
    check_columns,
    check_owners,
    known,
    model_of,
    shard_columns,
)

PAGE: Final = 1_000
"""How many values one statement reads or claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A look-up, and what asks the shards about it.

    Attributes:
        registered: its row in the catalog.
        lookup: as a model would define it.
        columns: what each shard says of the column.
        claims: returns what changes claims, and reads rows by a given reader, or by its own role; in
            sessions whose names are PostgreSQL's own.
        shards: all shards.
        shard_count: how many of them values are hashed over.
        schema_of: returns a shard's schema.
        nodes, shards_of: the nodes, and the shards of each.
    """

    registered: RegisteredLookup
    lookup: Lookup
    columns: dict[int, ShardColumn]
    claims: Callable[[Rows | None], Claims]
    shards: Sequence[int]
    shard_count: int
    schema_of: Callable[[int], str]
    nodes: Nodes
    shards_of: Mapping[str, Sequence[int]]


@contextmanager
def opened(catalog: Catalog, name: str) -> Iterator[Opened]:
    """Yield a look-up that was created.

    Raises:
        ClusterConflict: the look-up does not exist, or the shards differ.
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
            shard_count=description.shard_count,
            schema_of=schema_of,
            nodes=nodes,
            shards_of=placement.by_node(),
        )


_DECODE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": int,
    "str": str,
    "bytes": lambda text: bytes.fromhex(text.removeprefix("\\x")),
    "UUID": UUID,
    "date": date.fromisoformat,
}
"""Values of a look-up from JSON, by the name of their kind."""


class Unreadable(Exception):
    """A table of a shard could not be read."""

    def __init__(self, table: str, shard: int, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.table = table
        self.shard = shard
        self.refused = refused


class LookupReader:
    """A reader of a look-up's rows and claims in all shards.

    Every method raises :class:`Unreadable`.
    """

    def __init__(self, one: Opened, readers: Mapping[str, Reader]) -> None:
        self._one = one
        self._on = readers
        self._readers = {shard: readers[node] for node, shards in one.shards_of.items() for shard in shards}
        kind = one.lookup.kind.__name__
        self._type = SQL_TYPES[kind]
        self._decode = _DECODE[kind]

    @property
    def skips(self) -> str | None:
        """Returns why nothing is read."""
        return next((reader.skips for reader in self._readers.values() if reader.skips is not None), None)

    def rows(self, shard: int) -> Iterator[list[Any]]:
        """Yield the values of a shard's rows, in their order, a page at a time."""
        one, after = self._one.lookup, None
        while page := self._of_rows(
            shard,
            lookups.page_of_rows(
                self._one.schema_of(shard), one.table, one.column, self._type, after=after is not None
            ),
            *(() if after is None else (after,)),
            PAGE,
        ):
            yield page
            if len(page) < PAGE:
                return
            after = page[-1]

    def claimed(self, shard: int) -> Iterator[dict[Any, Stamped]]:
        """Yield the claims that a shard keeps, by value, a page at a time."""
        table, after = self._one.registered.claims, None
        while page := self._of_claims(
            {
                shard: (
                    lookups.page_of_claims(
                        self._one.schema_of(shard), table, self._type, after=after is not None
                    ),
                    (*(() if after is None else (after,)), PAGE),
                )
            }
        ):
            yield page
            if len(page) < PAGE:
                return
            after = list(page)[-1]

    def find(self, values: Sequence[Any]) -> dict[Any, Stamped]:
        """Return the claims of values."""
        by_shard: dict[int, list[Any]] = defaultdict(list)
        for value in values:
            by_shard[shard_of_claim(value, self._one.shard_count)].append(value)
        table = self._one.registered.claims
        return self._of_claims(
            {
                shard: (lookups.find_in([self._one.schema_of(shard)], table, self._type), (mine,))
                for shard, mine in by_shard.items()
            }
        )

    def without_claims(self, shard: int, values: Sequence[Any]) -> list[Any]:
        """Return those values of a shard's rows that are not claimed for it."""
        found = self.find(values)
        return [value for value in values if found.get(value, (None,))[0] != shard]

    def without_rows(self, found: Mapping[Any, Stamped]) -> dict[Any, Stamped]:
        """Return those of the claims whose shard has no such row, as far as is committed."""
        by_shard: dict[int, list[Any]] = defaultdict(list)
        for value, (shard, _) in found.items():
            by_shard[shard].append(value)
        there = {value for shard, values in by_shard.items() for value in self.with_rows(shard, values)}
        return {value: stamped for value, stamped in found.items() if value not in there}

    def with_rows(self, shard: int, values: Sequence[Any]) -> list[Any]:
        """Return those of the values that rows of a shard have; none of a shard that does not exist."""
        if shard not in self._readers:
            return []
        one = self._one.lookup
        statement = lookups.rows_in(self._one.schema_of(shard), one.table, one.column, self._type)
        return self._of_rows(shard, statement, list(values)) if values else []

    def with_values(
        self, node: Node, lookup: Lookup, shard: int, values: Sequence[Any], *, lock_ms: int | None = None
    ) -> list[Any]:
        """Return those of the values that rows have on a node: see :class:`Rows`."""
        schema = self._one.schema_of(shard)
        before = None
        if lock_ms is not None:
            before = lookups.wait_without_writing(shard, schema, lookup.table, lock_ms=lock_ms)
        reader = self._on.get(node.name)
        if reader is None:
            raise Unreadable(lookup.table, shard, Refused(reason=f'it is on node "{node.name}" now'))
        statement = reader.with_values(
            lookups.rows_in(schema, lookup.table, lookup.column, self._type), (list(values),)
        )
        (answer,) = attempted(lambda: reader.read([statement], before=before))
        if isinstance(answer, Refused):
            raise reader.error(answer, f"{schema}.{lookup.table}")
        return [self._decode(row[lookup.column]) for row in answer]

    def _of_rows(self, shard: int, statement: str, *given: Any) -> list[Any]:
        column = self._one.lookup.column
        ((_, rows),) = self._read({shard: (statement, given)}, self._one.lookup.table)
        return [self._decode(row[column]) for row in rows]

    def _of_claims(self, asked: Mapping[int, tuple[str, Sequence[Any]]]) -> dict[Any, Stamped]:
        return {
            self._decode(row["value"]): (row["shard"], UUID(row["stamp"]))
            for _, rows in self._read(asked, self._one.registered.claims)
            for row in rows
        }

    def _read(
        self, asked: Mapping[int, tuple[str, Sequence[Any]]], table: str
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        by_reader: dict[Reader, list[int]] = defaultdict(list)
        for shard in asked:
            by_reader[self._readers[shard]].append(shard)
        for reader, shards in by_reader.items():
            answers = reader.read([reader.with_values(*asked[shard]) for shard in shards])
            for shard, answer in zip(shards, answers, strict=True):
                if isinstance(answer, Refused):
                    raise Unreadable(table, shard, answer)
                yield shard, answer


@contextmanager
def required_reader(one: Opened) -> Iterator[LookupReader]:
    """Yield a reader of a look-up on all its nodes, for a command that needs one.

    Raises:
        MissingPrivilege: code of other roles would run as one that can write.
        StatementFailed: a table of a shard can't be read, perhaps since it has moved meanwhile.
    """
    with lookup_reader(one) as reader:
        if reader.skips is not None:
            raise MissingPrivilege(f"{one.registered}: no rows are read: {reader.skips}", hint=HINT)
        try:
            yield reader
        except Unreadable as error:
            raise StatementFailed(
                f"{error.table} in shard {error.shard} can't be read: {error.refused.reason}",
                hint="If the shard has moved meanwhile: run it again.",
                sqlstate=error.refused.sqlstate,
            ) from error


@contextmanager
def lookup_reader(one: Opened) -> Iterator[LookupReader]:
    """Yield the readers of a look-up on all its nodes."""
    with ExitStack() as stack:
        readers = {
            name: stack.enter_context(reading_as_reader(one.nodes[name], f'node "{name}"'))
            for name, shards in one.shards_of.items()
            if shards
        }
        yield LookupReader(one, readers)
