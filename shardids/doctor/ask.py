"""Asks the catalog and all nodes at once, some round trips each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from shardids.catalog.clock import LocalClock
from shardids.catalog.nodes import Nodes
from shardids.catalog.objects import read_objects
from shardids.catalog.queries import DROPPED_MEANWHILE, batches, prepare, read
from shardids.catalog.reader import reading_as_reader
from shardids.catalog.reading import read_placement
from shardids.catalog.regions import Region
from shardids.catalog.revisions import read_revisions
from shardids.catalog.rows import Catalog, Description, describe_in
from shardids.catalog.schemas import ON_NODES, engine_owner, owner_of, strangers_in
from shardids.catalog.skipped import read_skipped
from shardids.catalog.topology import Node
from shardids.doctor.cluster_facts import ClusterFacts, Placed
from shardids.doctor.counter_facts import KINDS, ZONES, read_counters
from shardids.doctor.engine import changed_functions
from shardids.doctor.facts import (
    Draws,
    ForeignKey,
    GeneratorSequence,
    Grant,
    Installation,
    InvalidIndex,
    KeyColumn,
    Leftover,
    LocalShard,
    LockHolder,
    NodeFacts,
    PathTrap,
    Strangers,
    Stray,
)
from shardids.doctor.meanwhile import is_migrating_now, moves_meanwhile, read_moves
from shardids.doctor.old_ids import Adopted, adopted_in
from shardids.doctor.reference_facts import ask_references, read_references
from shardids.doctor.samples import ShardingKey, read_keys, sample_ids
from shardids.doctor.unread import Unread
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.lookups.comparing import compare_all
from shardids.migrate.hashes import read_recorded
from shardids.views.state import state_of

_ATTEMPTS: Final = 3
_NAME: Final = "shardids doctor"
_CONNECT_TIMEOUT_S: Final = 5
_RATE_INTERVAL_S: Final = 0.5
"""The shortest time between the two readings from which a shard's ticks per second are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What to ask in addition.

    ``rates``: read the shards' generators twice, at least half a second apart. ``keys``: columns by whose
    hash rows are placed. ``every_row``: read all rows of their tables, not a sample. ``read_only``: leave out
    what is to be created for the comparison.
    """

    rates: bool = True
    keys: Sequence[ShardingKey] = ()
    every_row: bool = False
    read_only: bool = False


def ask(catalog: Catalog, wishes: Wishes) -> ClusterFacts:
    """Gathers the facts of a cluster. A node that cannot be asked is a fact, too.

    Raises:
        BadArgument: a column of ``wishes.keys`` has a type that cannot be hashed.
        ConnectionFailed, ClusterConflict: the catalog cannot be read.
    """
    for attempt in range(_ATTEMPTS):
        version, facts = _ask_once(catalog, wishes)
        # What nodes and catalog said belongs together only if nothing was placed elsewhere meanwhile.
        if attempt == _ATTEMPTS - 1 or version == _version(catalog):
            break
    return facts


def _ask_once(catalog: Catalog, wishes: Wishes) -> tuple[int, ClusterFacts]:
    with catalog.engine.connect() as connection, connection.begin():
        prepare(connection)
        version = connection.scalar(text("select version from shardids_catalog.cluster"))
        description = describe_in(connection, catalog.url)
        revisions = connection.scalars(
            text("select version_num from shardids_catalog.shardids_version")
        ).all()
        known = read_placement(connection)
        there = known.nodes
        placed = connection.execute(text("select shard, node, state from shardids_catalog.placement")).all()
        moves = read_moves(connection)
        is_migrating = is_migrating_now(connection)
        references, is_changing = read_references(connection)
        catalog_owner = owner_of(connection, "shardids_catalog.cluster")
        catalog_found = strangers_in(connection, ("shardids_catalog",), catalog_owner)
        skipped = read_skipped(connection, "shardids_catalog")
    adopted = adopted_in(catalog, known.old_ids, description.shard_count)
    regions = tuple(known.regions.values())
    clock = LocalClock()
    with (
        Nodes(
            there,
            catalog.url,
            application_name=_NAME,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            read_only=catalog.read_only,
        ) as nodes,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        query_node = pool.submit(state_of, catalog)
        asked = nodes.each(
            lambda name, node: _ask_node(
                there[name], node, clock, wishes, description, adopted=adopted, regions=regions
            )
        )
        followed = ask_references(nodes, references, description.cluster, is_changing=is_changing)
    with catalog.engine.connect() as connection, connection.begin():
        prepare(connection)
        moves = moves_meanwhile(moves, read_moves(connection))
        is_migrating = is_migrating or is_migrating_now(connection)
    answers = asked.all()
    # A node that can't be read is a finding of its own.
    lookups = compare_all(catalog, every_row=wishes.every_row) if _all_read(answers) else []
    return version, ClusterFacts(
        at=datetime.now(UTC),
        description=description,
        catalog_revisions=tuple(revisions),
        placed={row.shard: Placed(node=row.node, state=row.state) for row in placed},
        moves=moves,
        query_node=query_node.result(),
        nodes=answers,
        lookups=lookups,
        is_migrating=is_migrating or any(node.in_flux for node in answers.values()),
        references=followed,
        catalog_strangers=Strangers(owner=catalog_owner, found=catalog_found),
        skipped=skipped,
        region_of={shard: region.name for region in regions for shard in region.shards},
    )


def _all_read(answers: Mapping[str, NodeFacts]) -> bool:
    return all(node.error is None for node in answers.values())


def _version(catalog: Catalog) -> int:
    with catalog.engine.connect() as connection, connection.begin():
        prepare(connection)
        return int(connection.scalar(text("select version from shardids_catalog.cluster")) or 0)


def _ask_node(
    node: Node,
    engine: Engine,
    clock: LocalClock,
    wishes: Wishes,
    description: Description,
    *,
    adopted: Adopted,
    regions: Sequence[Region],
) -> NodeFacts:
    """Returns what a node says, as far as it answers."""
    for attempt in range(_ATTEMPTS):
        known: dict[str, Any] = {}
        try:
            with (
                reading_as_reader(engine, f'node "{node.name}"') as reader,
                engine.connect() as connection,
            ):
                unread = Unread(reader, retries=attempt < _ATTEMPTS - 1)
                for facts in _node_facts(
                    connection, unread, clock, wishes, description, adopted=adopted, regions=regions
                ):
                    known |= facts
        except BadArgument:
            raise
        except ShardidsError as error:
            known["error"] = error
            if error.sqlstate in DROPPED_MEANWHILE and attempt < _ATTEMPTS - 1:
                continue
        break
    return NodeFacts(node=node, **known)


def _node_facts(
    connection: Connection,
    unread: Unread,
    clock: LocalClock,
    wishes: Wishes,
    description: Description,
    *,
    adopted: Adopted,
    regions: Sequence[Region],
) -> Iterator[dict[str, Any]]:
    """Fields of :class:`NodeFacts`, as they become known."""
    yield {"clock": clock.compare(connection)}
    engines = read(connection, "doctor/node.v1", Installation)
    if len(engines) != 1:
        raise ClusterConflict(
            "schema shardids has no row in shardids.node",
            hint="Restore the row of shardids.node from a backup: it holds the node's name and cluster.",
        )
    engine = engines[0]
    shards = {local.shard: local for local in read(connection, "doctor/shards.v1", LocalShard)}
    # Together: without its shards a node would seem to have lost them.
    with connection.begin():
        prepare(connection)
        skipped = read_skipped(connection)
    yield {"engine": engine, "shards": shards, "skipped": skipped}
    begun = time.monotonic()
    first = _read_draws(connection, shards)
    held_before = {_held(holder) for holder in read(connection, "doctor/locks.v1", LockHolder)}
    before = _read_revisions(connection, shards, "alembic_version", unread)
    yield {
        "unread": unread.tables,
        "skips": unread.reader.skips,
        "revisions": _read_revisions(connection, shards, "shardids_version", unread),
        "objects": read_objects(connection, [s.shard for s in shards.values() if s.state == "active"]),
    }
    # A migration that committed in between took its shard from one revision to another.
    after = _read_revisions(connection, shards, "alembic_version", unread)
    in_flux = (shard for shard in shards if before.get(shard) != after.get(shard))
    yield {"application_revisions": after, "in_flux": frozenset(in_flux)}
    yield {
        "changed_functions": [] if wishes.read_only else changed_functions(connection, engine),
        "recorded": read_recorded(connection),
        "keys": (keys := read(connection, "doctor/keys.v1", KeyColumn)),
        "foreign_keys": read(connection, "doctor/foreign_keys.v1", ForeignKey),
        "invalid_indexes": _read_invalid_indexes(connection),
        "leftovers": read(connection, "doctor/leftovers.v1", Leftover),
        "strays": read(connection, "doctor/strays.v1", Stray),
        "sequences": read(connection, "doctor/sequences.v1", GeneratorSequence),
        "strangers": _read_strangers(connection, shards),
        "grants": read(connection, "doctor/grants.v1", Grant),
        "path_traps": read(connection, "doctor/paths.v1", PathTrap),
    }
    active = [local for local in shards.values() if local.state == "active"]
    kinds, zones = (
        [(local.shard, local.schema) for local in active if table in local.own_tables]
        for table in (KINDS, ZONES)
    )
    yield {"counters": read_counters(kinds, zones, unread)}
    prefix = description.schema_prefix
    yield {
        "samples": [
            *sample_ids(description, keys, adopted, unread, skipped=skipped),
            *read_keys(
                connection,
                prefix,
                wishes.keys,
                adopted,
                regions=regions,
                every_row=wishes.every_row,
                unread=unread,
            ),
        ]
    }
    if wishes.rates:
        time.sleep(max(0.0, begun + _RATE_INTERVAL_S - time.monotonic()))
    # A draw may hold its lock while it is asked for; not twice, as a rule.
    held = read(connection, "doctor/locks.v1", LockHolder)
    yield {"lock_holders": [holder for holder in held if _held(holder) in held_before]}
    second = _read_draws(connection, shards)
    yield {"draws": {shard: (first[shard], second[shard]) for shard in first.keys() & second.keys()}}


def _read_strangers(connection: Connection, shards: Mapping[int, LocalShard]) -> Strangers:
    """Return the objects of other roles in the schemas of a node and of its shards."""
    schemas = {local.schema: shard for shard, local in shards.items() if local.state in ("active", "fenced")}
    with connection.begin():
        prepare(connection)
        owner = engine_owner(connection)
        found = strangers_in(connection, (*ON_NODES, *schemas), owner)
    return Strangers(owner=owner, found=found, shards=schemas)


def _held(holder: LockHolder) -> tuple[int, int, int]:
    return holder.pid, holder.lock, holder.shard


def _read_invalid_indexes(connection: Connection) -> list[InvalidIndex]:
    """Returns the indexes that two looks show as invalid, with nobody at work on them.

    Locks are read as they are, after the moment that the catalogs are read for: in one look an index that is
    finished in between has no builder any more, but is invalid still.
    """
    found = read(connection, "doctor/indexes.v1", InvalidIndex)
    if not found:
        return []
    still = {
        (one.table_name, one.index_name): one.shards
        for one in read(connection, "doctor/indexes.v1", InvalidIndex)
    }
    both = [
        replace(
            one, shards=sorted({*one.shards}.intersection(still.get((one.table_name, one.index_name), ())))
        )
        for one in found
    ]
    return [one for one in both if one.shards]


def _read_draws(connection: Connection, shards: Mapping[int, LocalShard]) -> dict[int, Draws]:
    draws: dict[int, Draws] = {}
    for batch in batches(sorted(shards)):
        rows = read(connection, "doctor/draws.v1", Draws, first_shard=batch[0], last_shard=batch[-1])
        # A shard that has just come may lie between them.
        draws |= {row.shard: row for row in rows if row.shard in shards}
    return draws


def _read_revisions(
    connection: Connection, shards: Mapping[int, LocalShard], table: str, unread: Unread
) -> dict[int, tuple[str, ...]]:
    """Returns the revisions in a version table of every shard that has one which can be read."""
    having = [local for local in shards.values() if table in local.own_tables]
    with connection.begin():
        answers = read_revisions(unread.reader, connection, [(local.schema, table) for local in having])
    found = (unread.noted(table, one.shard, it) for one, it in zip(having, answers, strict=True))
    return {local.shard: there for local, there in zip(having, found, strict=True) if there is not None}
