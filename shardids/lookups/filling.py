"""Claims the values of rows that are there: when a look-up is new, and when claims were lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardids.catalog.lookups import write_lookup
from shardids.catalog.rows import Catalog
from shardids.client.lookups import Claims
from shardids.errors import ClusterConflict
from shardids.lookups.lifecycle import guard
from shardids.lookups.pages import Opened, opened
from shardids.lookups.reading import LookupReader, required_reader

_SHOWN = 10
"""How many values that two rows have are named."""


@dataclass(slots=True, kw_only=True)
class Filled:
    """What a backfill has done.

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
    on_progress: Callable[[Filled], object] = lambda _filled: None,
) -> Filled:
    """Claims the values of all rows without a claim, while applications write; then the look-up is ready.

    From its beginning, triggers refuse statements that write the column and claim nothing: the model with
    ``lookup_key()`` is deployed before. Interrupted, it is begun again. ``on_progress`` is called after each
    shard.

    Raises:
        ClusterConflict: rows of two shards have one value: the look-up is not made ready; or there is none.
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
            _fill(one, reader, claims, shard, done, dry_run=dry_run)
            done.shards += 1
            on_progress(done)
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
