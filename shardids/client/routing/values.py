"""The values of a statement's criteria, and the shards that they tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, ColumnElement

from shardids.client.routing.models import Claimant, ShardFinder, Tells
from shardids.client.routing.stored import claimed_value
from shardids.errors import BadArgument, ShardidsError, UnknownId
from shardids.models.lookups import Lookup

Choice = frozenset[int] | None
"""Shards outside of which no row fulfils a criterion; ``None`` if it could be any."""


class Values:
    """The values of one execution: those of the statement's literals, and those given beside it."""

    __slots__ = ("binds", "claims", "finder", "given", "lists")

    def __init__(
        self,
        binds: Sequence[BindParameter[Any]],
        parameters: Any,
        finder: ShardFinder,
        claims: Claimant | None = None,
    ) -> None:
        self.binds = binds
        self.given: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self.finder = finder
        self.claims = claims
        self.lists: dict[str, dict[int, list[Any]]] = {}

    def value(self, slot: int) -> Any:
        """Returns the value of a literal or a parameter; ``None`` if it is not known."""
        bind = self.binds[slot]
        return self.given.get(bind.key, bind.effective_value) if self.given else bind.effective_value

    def shard(self, column: ColumnElement[Any], tells: Tells, value: Any, slot: int) -> int | None:
        """Returns the shard that a value tells, ``None`` if no row has it; its error names the column."""
        try:
            # The parameter's type, not the column's, decides what is sent.
            return tells.shard(value, self.finder, self.binds[slot].type)
        except UnknownId:
            return None
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None

    def shards(
        self, column: ColumnElement[Any], tells: Tells, given: Iterable[Any], slot: int
    ) -> dict[int, list[Any]]:
        """Returns the values that rows can have, by their shards; its error names the column."""
        by_shard: dict[int, list[Any]] = defaultdict(list)
        try:
            told = tells.shards(
                [value for value in given if value is not None], self.finder, self.binds[slot].type
            )
        except ShardidsError as error:
            raise type(error)(f"{column}: {error.message}", hint=error.hint) from None
        for value, shard in told:
            by_shard[shard].append(value)
        return dict(by_shard)

    def looked_up(self, lookup: Lookup, given: Iterable[Any], slot: int) -> Choice:
        """Returns the shards whose rows can have values of a look-up key, which the nodes are asked for."""
        if self.claims is None:
            return None
        type_ = self.binds[slot].type
        try:
            wanted = [claimed_value(lookup, value, type_) for value in given if value is not None]
        except BadArgument:
            return None  # A value of another type, of which PostgreSQL makes one.
        found = self.claims.shards_of(lookup, wanted)
        return None if found is None else frozenset(found.values())
