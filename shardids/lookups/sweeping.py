"""Gives up claims of rows that were deleted, got another value, or never came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardids.catalog.claims import Stamped
from shardids.catalog.rows import Catalog
from shardids.client.lookups import Claims
from shardids.errors import LookupBusy
from shardids.lookups.pages import Opened, opened
from shardids.lookups.reading import required_reader


@dataclass(slots=True, kw_only=True)
class Swept:
    """What a sweep has done.

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
    on_progress: Callable[[Swept], object] = lambda _swept: None,
) -> Swept:
    """Deletes the claims that have no row, while applications write. ``on_progress``: after each shard.

    A claim without a row harms nobody: who needs the value takes it. Sweeping keeps the tables small.

    Raises:
        ClusterConflict: there is no such look-up.
        BadArgument: values of the column can't be claimed.
        MissingPrivilege: code of other roles would run as one that can write.
    """
    done = Swept()
    with opened(catalog, name) as one, required_reader(one) as reader:
        claims = one.claims(reader)
        for shard in one.shards:
            for page in reader.claimed(shard):
                done.claims += len(page)
                without = reader.without_rows(page)
                if dry_run:
                    done.given_up += len(without)
                else:
                    _give_up(one, claims, without, done)
            on_progress(done)
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
