"""Asks the catalog and all nodes at once, some round trips each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.clock import LocalClock
from shardids.catalog.connections import reading
from shardids.catalog.nodes import Nodes, administrative_engine
from shardids.catalog.objects import read_objects
from shardids.catalog.queries import DROPPED_MEANWHILE, batches, prepare, read
from shardids.catalog.reading import read_placement
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog, Description, describe_in
from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url, with_password_of
from shardids.doctor.cluster_facts import ClusterFacts, Placed, ViewFacts
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
    SchemaOwner,
    Stray,
)
from shardids.doctor.meanwhile import is_migrating_now, moves_meanwhile, read_moves
from shardids.doctor.old_ids import Adopted, adopted_in
from shardids.doctor.reference_facts import ask_references, read_references
from shardids.doctor.samples import ShardingKey, read_keys, sample_ids
from shardids.doctor.unread import Unread
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.lookups.comparing import compare_all
from shardids.lookups.places import faulty_nodes
from shardids.migrate.hashes import read_recorded
from shardids.views.state import View, read_sources, views_in

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
        views = views_in(connection)
        references, is_changing = read_references(connection)
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
        ThreadPoolExecutor(max_workers=max(1, len(views))) as pool,
    ):
        viewed = [pool.submit(_ask_view, catalog, view, description) for view in views]
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
        views=[one.result() for one in viewed],
        nodes=answers,
        lookups=lookups,
        strict=faulty_nodes(catalog),
        is_migrating=is_migrating or any(node.in_flux for node in answers.values()),
        references=followed,
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
            with engine.connect() as connection:
                for facts in _node_facts(
                    connection, clock, wishes, description, adopted=adopted, regions=regions
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


def _ask_view(catalog: Catalog, view: View, description: Description) -> ViewFacts:
    """Asks a view's own database about it; a view on a node is read with the rest of that node."""
    if view.url is None:
        return ViewFacts(view=view)
    engine = administrative_engine(
        with_password_of(parse_url(view.url), catalog.url),
        what=f'the database of view "{view.name}"',
        application_name=_NAME,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
    )
    try:
        with reading(engine, only=catalog.read_only).connect() as connection:
            return ViewFacts(view=view, sources=read_sources(connection, description.schema_prefix))
    except ShardidsError as error:
        return ViewFacts(view=view, error=error)
    finally:
        engine.dispose()


def _node_facts(
    connection: Connection,
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
    yield {"engine": engine, "shards": shards}
    begun = time.monotonic()
    first = _read_draws(connection, shards)
    held_before = {_held(holder) for holder in read(connection, "doctor/locks.v1", LockHolder)}
    unread = Unread()
    before = _read_revisions(connection, shards, "alembic_version", unread)
    yield {
        "unread": unread.tables,
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
        "schema_owners": read(connection, "doctor/owners.v1", SchemaOwner),
        "grants": read(connection, "doctor/grants.v1", Grant),
        "path_traps": read(connection, "doctor/paths.v1", PathTrap),
    }
    active = [local for local in shards.values() if local.state == "active"]
    kinds, zones = (
        [(local.shard, local.schema) for local in active if table in local.own_tables]
        for table in (KINDS, ZONES)
    )
    yield {"counters": read_counters(connection, kinds, zones, unread)}
    yield {"view_sources": read_sources(connection, description.schema_prefix)}
    prefix = description.schema_prefix
    yield {
        "samples": [
            *sample_ids(connection, prefix, keys, adopted, unread),
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
        draws |= {row.shard: row for row in rows}
    return draws


def _read_revisions(
    connection: Connection, shards: Mapping[int, LocalShard], table: str, unread: Unread
) -> dict[int, tuple[str, ...]]:
    """Returns the revisions in a version table of every shard that has one which can be read."""
    having = [local for local in shards.values() if table in local.own_tables]
    revisions: dict[int, list[str]] = {}
    for batch in batches(having):
        with connection.begin():
            prepare(connection)
            some = unread.leave_out(connection, batch, lambda local: (local.schema, table, local.shard))
            revisions |= {local.shard: [] for local in some}
            selects = [
                # Not cast: the owner of the column's type may have made a cast to text.
                sql.SQL("select {}, concat(version_num) from {}").format(
                    sql.Literal(local.shard), sql.Identifier(local.schema, table)
                )
                for local in some
            ]
            union = sql.SQL(" union all ").join(selects).as_string()
            for shard, revision in connection.exec_driver_sql(union) if some else ():
                revisions[shard].append(revision)
    return {shard: tuple(sorted(found)) for shard, found in revisions.items()}
