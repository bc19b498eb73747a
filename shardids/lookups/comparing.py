"""Compares the rows of look-ups with their claims, both ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import sample
from typing import Final

from shardids.catalog.queries import DROPPED_MEANWHILE
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import RegisteredLookup
from shardids.errors import ShardidsError
from shardids.lookups.columns import check_guards
from shardids.lookups.pages import PAGE, opened
from shardids.lookups.reading import LookupReader, Unreadable, lookup_reader

_ATTEMPTS: Final = 3
_SHARDS: Final = 64
"""How many shards are read, unless every row is."""
_ROWS: Final = 100
"""How many rows and claims are read of each, unless all are."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """How many rows and claims of a look-up were read, and how many lacked the other; or why they can't be.

    Attributes:
        name: ``table.column``.
        is_ready: whether rows can be looked up.
        rows, without_claim: rows that were read, and those whose value is not claimed for their shard.
        example: the value of one of these.
        claims, without_row: claims that were read, and those whose shard has no such row.
        error: why they can't be read.
        unread: by table and shard, why a table could not be read; the comparison ended there.
        skips: why nothing is read.
    """

    name: str
    is_ready: bool
    rows: int = 0
    without_claim: int = 0
    example: str | None = None
    claims: int = 0
    without_row: int = 0
    error: ShardidsError | None = None
    unread: dict[tuple[str, int], str] = field(default_factory=dict)
    skips: str | None = None


def compare_all(catalog: Catalog, *, every_row: bool) -> list[Compared]:
    """Compares rows and claims of each look-up: some of up to 64 shards or, with ``every_row``, all."""
    return [_compare(catalog, one, every_row=every_row) for one in catalog.lookups().values()]


def _compare(catalog: Catalog, lookup: RegisteredLookup, *, every_row: bool) -> Compared:
    for attempt in range(_ATTEMPTS):
        seen = Compared(name=str(lookup), is_ready=lookup.is_ready)
        try:
            _compare_once(catalog, seen, every_row=every_row)
        except ShardidsError as error:
            seen.error = error
        except Unreadable as answer:
            seen.unread[answer.table, answer.shard] = answer.refused.reason
            # The shard may have moved.
            if answer.refused.sqlstate in DROPPED_MEANWHILE and attempt < _ATTEMPTS - 1:
                continue
        break
    return seen


def _compare_once(catalog: Catalog, seen: Compared, *, every_row: bool) -> None:
    with opened(catalog, seen.name) as one:
        shards = list(one.shards)
        some = shards if every_row else sample(shards, min(_SHARDS, len(shards)))
        check_guards(one.columns, one.registered)
        with lookup_reader(one) as reader:
            # A claim lies in another shard than its row, so one node can't be left out.
            seen.skips = reader.skips
            if seen.skips is not None:
                return
            for shard in some:
                _compare_rows(reader, shard, seen, every_row=every_row)
                _compare_claims(reader, shard, seen, every_row=every_row)


def _compare_rows(one: LookupReader, shard: int, seen: Compared, *, every_row: bool) -> None:
    for values in one.rows(shard):
        read = values[: PAGE if every_row else _ROWS]
        missing = one.without_claims(shard, read)
        # What was claimed between the two statements is so now; a row that is gone is not read again.
        missing = one.with_rows(shard, one.without_claims(shard, missing)) if missing else []
        seen.rows += len(read)
        seen.without_claim += len(missing)
        if missing and seen.example is None:
            seen.example = str(missing[0])
        if not every_row:
            return


def _compare_claims(one: LookupReader, shard: int, seen: Compared, *, every_row: bool) -> None:
    for page in one.claimed(shard):
        read = dict(list(page.items())[: PAGE if every_row else _ROWS])
        seen.claims += len(read)
        seen.without_row += len(one.without_rows(read))
        if not every_row:
            return
