"""Where a cluster stands: how many shards are at which revision, who lags, and whether shards are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import text

from shardids.migrate.migration import Migration
from shardids.migrate.plan import Position, Start
from shardids.migrate.state import State, migration_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A cluster's revisions.

    ``counts`` is how many shards of a node are at a revision, ``stragglers`` those behind the most advanced
    shard, ``unfinished`` those half way through a revision, and ``pending`` what some shard has still to
    run, as (revision, message).
    """

    counts: dict[tuple[str, Start], int]
    stragglers: tuple[Position, ...]
    unfinished: tuple[Position, ...]
    pending: tuple[tuple[str, str], ...]
    state: State


def standing(migration: Migration, shards: Sequence[int]) -> Standing:
    """Asks all nodes, and compares with the revisions of the code. A node that is down is in ``state``."""
    environment = migration.environment
    state = migration.state(shards)
    positions = list(state.positions.values())
    behind = {heads: len(_behind(migration, heads)) for heads in {p.heads for p in positions}}
    best = max(behind.values(), default=0)
    applied = [_behind(migration, heads) for heads in behind]
    common = set.intersection(*applied) if applied else set()
    return Standing(
        counts=dict(
            sorted(Counter((p.node, p.heads or ()) for p in positions).items(), key=lambda entry: entry[0])
        ),
        stragglers=tuple(p for p in positions if behind[p.heads] < best),
        unfinished=tuple(p for p in positions if p.unfinished is not None),
        pending=tuple(
            (script.revision, script.doc)
            for script in reversed(list(environment.script.walk_revisions()))
            if script.revision not in common
        ),
        state=state,
    )


def _behind(migration: Migration, heads: Start) -> set[str]:
    known = [revision for revision in heads or () if migration.environment.knows(revision)]
    return migration.environment.ancestors(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a shard has and the reference has not (``+``), and the other way round (``-``), a line each."""

    shard: int
    node: str
    lines: tuple[str, ...]


def unlike(migration: Migration, reference: int, shards: Sequence[int]) -> list[Difference]:
    """The shards whose tables are not those of a reference shard: one query a node, all nodes at once.

    Raises:
        ConnectionFailed: a node is down.
    """
    per_node: dict[str, list[int]] = {}
    for shard in (reference, *shards):
        per_node.setdefault(migration.placement.node_of[shard], []).append(shard)
    with ThreadPoolExecutor(len(per_node)) as pool:
        digests: dict[int, str] = {}
        for answer in [pool.submit(_digests, migration, node, found) for node, found in per_node.items()]:
            digests |= answer.result()
    odd = [shard for shard in shards if digests.get(shard) != digests.get(reference)]
    if not odd:
        return []
    expected = set(_lines(migration, reference))
    differences = []
    for shard in odd:
        lines = set(_lines(migration, shard))
        said = [f"+ {line}" for line in sorted(lines - expected)]
        said += [f"- {line}" for line in sorted(expected - lines)]
        node = migration.placement.node_of[shard]
        differences.append(Difference(shard=shard, node=node, lines=tuple(said)))
    return differences


def _digests(migration: Migration, node: str, shards: list[int]) -> dict[int, str]:
    engine = migration_engine(migration.placement.nodes[node], migration.catalog)
    try:
        with engine.connect() as connection:
            rows = connection.execute(
                text("""
                    select s.shard, (select md5(string_agg(line, chr(10) order by line collate "C"))
                                     from shardids.description(shardids.schema_of(s.shard)) line) as digest
                    from unnest(cast(:shards as integer[])) as s (shard)"""),
                {"shards": shards},
            )
            return {row.shard: row.digest for row in rows}
    finally:
        engine.dispose()


def _lines(migration: Migration, shard: int) -> list[str]:
    engine = migration_engine(migration.placement.locate(shard), migration.catalog)
    try:
        with engine.connect() as connection:
            query = text("select line from shardids.description(shardids.schema_of(:shard)) line")
            return list(connection.scalars(query, {"shard": shard}))
    finally:
        engine.dispose()
