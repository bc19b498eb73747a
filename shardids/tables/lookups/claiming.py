"""Claims compared with rows: missing ones are made, those without a row are given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import sample
from typing import Any, Final

from shardids.catalog.lookups import Stamped, write_lookup
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import RegisteredLookup
from shardids.client.lookups import Claims
from shardids.errors import ClusterConflict, LookupBusy, MissingPrivilege, ShardidsError
from shardids.pg.queries import DROPPED_MEANWHILE
from shardids.tables.lookups.lifecycle import check_guards, guard, refuse_key_moves
from shardids.tables.lookups.reading import (
    PAGE,
    LookupReader,
    Opened,
    Unreadable,
    lookup_reader,
    opened,
    required_reader,
)

_SHOWN = 10
"""How many values that two rows have are named."""


@dataclass(slots=True, kw_only=True)
class Filled:
    """The result of a backfill.

    Attributes:
        rows: how many rows were read.
        claimed: how many of them had no claim.
        shards: how many shards were read.
        taken: values that rows of two shards have; the first ten.
    """

    rows: int = 0
    claimed: int = 0
    shards: int = 0
    taken: list[object] = field(default_factory=list)


def backfill(
    catalog: Catalog,
    name: str,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> Filled:
    """Claim the values of all rows without a claim, while applications write; then the look-up is ready.

    From its beginning, triggers refuse statements that write the column and claim nothing: the model with
    ``lookup_key()`` is deployed before. Interrupted, it is begun again. ``on_progress`` is called after each
    shard, with how many are done and how many there are.

    Raises:
        ClusterConflict: rows of two shards have one value: the look-up is not made ready; or it does not
            exist; or the rows of a key are being moved.
        BadArgument: values of the column can't be claimed.
        MissingPrivilege: code of other roles would run as one that can write.
        LookupBusy: transactions that have written to the table don't end.
    """
    done = Filled()
    with opened(catalog, name) as one, required_reader(one) as reader:
        claims = one.claims(reader)
        if not dry_run:
            guard(catalog, one.nodes, one.columns, one.registered)
        for shard in one.shards:
            refuse_key_moves(catalog)
            _fill(one, reader, claims, shard, done, dry_run=dry_run)
            done.shards += 1
            on_progress(done.shards, len(one.shards))
        if done.taken:
            raise ClusterConflict(
                f"rows of two shards have one {name}, for example {done.taken[0]!r}: {len(done.taken)}"
                f"{' or more' if len(done.taken) == _SHOWN else ''} such values were found",
                hint="Change or delete one row of each, then run it again. All others are claimed.",
            )
        if not (dry_run or one.registered.is_ready):
            with catalog.engine.begin() as connection:
                write_lookup(connection, replace(one.registered, is_ready=True))
    return done


def backfill_if_empty(catalog: Catalog, name: str) -> bool:
    """Make a look-up ready whose column has no rows yet; return whether it is ready now.

    Raises as :func:`backfill`.
    """
    with opened(catalog, name) as one:
        if one.registered.is_ready:
            return True
        try:
            with required_reader(one) as reader:
                if any(rows for shard in one.shards for rows in reader.rows(shard)):
                    return False
        except MissingPrivilege:
            # A backfill says why it can't read them.
            return False
    backfill(catalog, name)
    return True


def _fill(
    one: Opened, reader: LookupReader, claims: Claims, shard: int, done: Filled, *, dry_run: bool
) -> None:
    if not dry_run:
        # Who wrote before the model had the look-up key, and has not committed yet, does not claim.
        claims.after_writers(one.lookup, shard)
    for values in reader.rows(shard):
        missing = reader.without_claims(shard, values)
        done.rows += len(values)
        done.claimed += len(missing)
        if not dry_run:
            # Also what is claimed: a sweep that has read the claim without its row must not delete it.
            taken = claims.claim_committed(one.lookup, shard, values)
            done.claimed -= len(taken)
            done.taken += taken[: _SHOWN - len(done.taken)]


_ATTEMPTS: Final = 3
_SHARDS: Final = 64
"""How many shards are read, unless every row is."""
_ROWS: Final = 100
"""How many rows and claims are read of each, unless all are."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """The numbers of rows and claims of a look-up, and of those without the other; or why they can't be read.

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
    """Compare rows and claim of each look-up: some of up to 64 shards or, with ``every_row``, all."""
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


@dataclass(slots=True, kw_only=True)
class Swept:
    """The result of a sweep.

    Attributes:
        claims: how many claims were read.
        given_up: how many of them were deleted; with ``dry_run``, how many have no row now.
        busy: how many have no row that anybody can see, but may get one: they stay until the next sweep.
    """

    claims: int = 0
    given_up: int = 0
    busy: int = 0


def sweep(
    catalog: Catalog,
    name: str,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> Swept:
    """Delete the claims that have no row, while applications write. ``on_progress`` as for :func:`backfill`.

    A claim without a row harms nobody: the next row with the value takes it over. Sweeping keeps the tables
    small.

    Raises:
        ClusterConflict: the look-up does not exist.
        BadArgument: values of the column can't be claimed.
        MissingPrivilege: code of other roles would run as one that can write.
    """
    done = Swept()
    with opened(catalog, name) as one, required_reader(one) as reader:
        claims = one.claims(reader)
        for read, shard in enumerate(one.shards, start=1):
            for page in reader.claimed(shard):
                done.claims += len(page)
                without = reader.without_rows(page)
                if dry_run:
                    done.given_up += len(without)
                else:
                    _give_up(one, claims, without, done)
            on_progress(read, len(one.shards))
    return done


def _give_up(one: Opened, claims: Claims, without: dict[Any, Stamped], done: Swept) -> None:
    by_shard: dict[int, dict[Any, Stamped]] = defaultdict(dict)
    for value, stamped in without.items():
        by_shard[stamped[0]][value] = stamped
    for some in by_shard.values():
        try:
            done.given_up += len(claims.give_up(one.lookup, some))
        except LookupBusy:
            done.busy += len(some)
