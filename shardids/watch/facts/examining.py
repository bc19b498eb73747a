"""An examination: the catalog and all nodes asked at once for all that can be judged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, text

from shardids.beside.capture import read_capture
from shardids.beside.citus.facts import read_facts
from shardids.catalog.keys.copies import catalog_state, node_state
from shardids.catalog.keys.homes import homeless, misled, refused_keys
from shardids.catalog.nodes import Nodes
from shardids.catalog.objects import read_objects
from shardids.catalog.recorded import contract_of, read_contracts, read_schemas
from shardids.catalog.references import references_in
from shardids.catalog.regions import Region
from shardids.catalog.revisions import read_revisions
from shardids.catalog.rows import Catalog, Description, read_placement
from shardids.catalog.shards import Shard, issuers, read_shards
from shardids.catalog.skipped import read_skipped
from shardids.catalog.topology import Node
from shardids.errors import ClusterConflict
from shardids.migrate.environment import read_recorded
from shardids.migrate.install import trees
from shardids.pg.clock import LocalClock
from shardids.pg.queries import prepare, read, rows
from shardids.pg.reader import reading_as_reader
from shardids.pg.schemas import ON_NODES, engine_owner, owner_of, strangers_in
from shardids.pg.sqlfiles import read_sql
from shardids.tables.lookups.claiming import compare_all
from shardids.tables.views.refresh import state_of
from shardids.watch.facts.asking import ATTEMPTS, collect
from shardids.watch.facts.cluster import (
    ChangedFunction,
    ClusterFacts,
    ForeignKey,
    GeneratorSequence,
    Installation,
    InvalidIndex,
    KeyColumn,
    Leftover,
    LocalShard,
    LockHolder,
    NodeFacts,
    PathTrap,
    Placed,
    Strangers,
    Stray,
)
from shardids.watch.facts.reading import CatalogState, OpenKeyMove, OpenLoss, OpenMove, read_catalog
from shardids.watch.facts.references import ask_references
from shardids.watch.facts.rows import (
    KINDS,
    ZONES,
    Adopted,
    ShardingKey,
    Unread,
    adopted_in,
    read_counters,
    read_keys,
    read_serials,
    sample_ids,
)

T = TypeVar("T", OpenMove, OpenKeyMove, OpenLoss)

_NAME: Final = "shardids doctor"
_CONNECT_TIMEOUT_S: Final = 5
_MOST_HOMES: Final = 20
"""How many entries of the directory of keys are named whose shards can't have them."""
_RATE_INTERVAL_S: Final = 0.5
"""The shortest time between the two readings that give a shard's ticks per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The optional questions of an examination.

    ``rates``: read the shards' generators twice, at least half a second apart. ``keys``: sharding keys, whose
    hash places rows. ``every_row``: read all rows of their tables, not a sample. ``read_only``: leave out
    comparisons that create objects.
    """

    rates: bool = True
    keys: Sequence[ShardingKey] = ()
    every_row: bool = False
    read_only: bool = False


def ask(catalog: Catalog, wishes: Wishes) -> ClusterFacts:
    """Gather the facts of a cluster. A node that cannot be asked is also a fact.

    Raises:
        BadArgument: a column of ``wishes.keys`` has a type that cannot be hashed.
        ConnectionFailed, ClusterConflict: the catalog cannot be read.
    """
    for _ in range(ATTEMPTS):
        before, after, facts = _ask_once(catalog, wishes)
        # What nodes and catalog said belongs together only if nothing was placed elsewhere meanwhile.
        if before.version == after.version:
            break
    return facts


def _ask_once(catalog: Catalog, wishes: Wishes) -> tuple[CatalogState, CatalogState, ClusterFacts]:
    """Return the state of the catalog before and after, and the facts."""
    description = catalog.describe()
    with catalog.engine.connect() as connection:
        before = read_catalog(connection)
        with connection.begin():
            prepare(connection)
            revisions = connection.scalars(
                text("select version_num from shardids_catalog.shardids_version")
            ).all()
            known = read_placement(connection)
            references = references_in(connection)
            catalog_owner = owner_of(connection, "shardids_catalog.cluster")
            catalog_found = strangers_in(connection, ("shardids_catalog",), catalog_owner)
            skipped = read_skipped(connection, "shardids_catalog")
            homes, lost_homes = catalog_state(connection), homeless(connection, _MOST_HOMES)
            recorded = read_schemas(connection)
            contracts = read_contracts(connection)
    adopted = adopted_in(catalog, known, description.shard_count)
    regions = tuple(known.regions.values())
    clock = LocalClock()
    with (
        Nodes(
            known.nodes,
            catalog.url,
            application_name=_NAME,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            read_only=catalog.read_only,
        ) as nodes,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        query_node = pool.submit(state_of, catalog)
        answers = nodes.each(
            lambda name, node: _ask_node(
                known.nodes[name], node, clock, wishes, description, adopted=adopted, regions=regions
            )
        ).all()
        followed = ask_references(
            nodes, references, description.cluster, is_changing=before.references_change
        )
    # A node that can't be read is a finding of its own.
    all_read = all(node.error is None for node in answers.values())
    lookups = compare_all(catalog, every_row=wishes.every_row) if all_read else []
    with catalog.engine.connect() as connection:
        after = read_catalog(connection)
        with connection.begin():
            prepare(connection)
            # What was recorded meanwhile may be of before or of after the shards were read.
            recorded_now = read_schemas(connection)
            # Keys that were switched meanwhile are in both.
            strayed = misled(connection, [one for node in answers.values() for one in node.refused_keys])
    in_flux = any(node.in_flux for node in answers.values())
    facts = ClusterFacts(
        at=datetime.now(UTC),
        description=description,
        catalog_revisions=tuple(revisions),
        placed={
            shard: Placed(node=node, state=state)
            for (node, state), shards in before.placed.items()
            for shard in shards
        },
        moves=meanwhile(before.moves, after.moves),
        key_moves=meanwhile(before.key_moves, after.key_moves, attrgetter("kind", "key")),
        losses=meanwhile(before.losses, after.losses),
        query_node=query_node.result(),
        nodes=answers,
        lookups=lookups,
        is_migrating=before.is_migrating or after.is_migrating or in_flux,
        references=followed,
        catalog_strangers=Strangers(owner=catalog_owner, found=catalog_found),
        skipped=skipped,
        homes=homes,
        homeless=lost_homes,
        misled=strayed,
        recorded={key: one for key, one in recorded_now.items() if recorded.get(key) == one},
        contracts=contracts,
        rerecorded=frozenset(key for key, one in recorded_now.items() if recorded.get(key) != one),
        region_of={shard: region.name for region in regions for shard in region.shards},
    )
    return before, after, facts


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
    """Return a node's facts, as far as it answers."""

    def fields(is_repeated: bool) -> Iterator[dict[str, Any]]:
        with reading_as_reader(engine, f'node "{node.name}"') as reader, engine.connect() as connection:
            unread = Unread(reader, retries=is_repeated)
            yield from _node_facts(
                connection, unread, clock, wishes, description, adopted=adopted, regions=regions
            )

    return NodeFacts(node=node, **collect(fields))


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
    """Yield fields of :class:`NodeFacts`, as they become known."""
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
        homes = node_state(connection)
        contract = contract_of(connection)
        functions = issuers(connection)
        refused = refused_keys(connection)
    yield {"engine": engine, "shards": shards, "skipped": skipped, "homes": homes, "contract": contract}
    yield {"issuers": functions, "refused_keys": refused}
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
        "capture": read_capture(connection, description.cluster, engine.name),
        "citus": read_facts(connection) if description.engine == "citus" else None,
        "strays": read(connection, "doctor/strays.v1", Stray),
        "sequences": read(connection, "doctor/sequences.v1", GeneratorSequence),
        "strangers": _read_strangers(connection, shards),
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
    yield {"serials": read_serials(connection, prefix, unread)}
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
    """Return the indexes that two looks show as invalid, with nobody at work on them.

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


def _read_draws(connection: Connection, shards: Mapping[int, LocalShard]) -> dict[int, Shard]:
    """Return how far the generators of shards have come, of those that have one."""
    found = (one for batch in read_shards(connection) for one in batch)
    # A shard that has just come may lie between them.
    return {one.shard: one for one in found if one.shard in shards and one.offset_ms is not None}


def _read_revisions(
    connection: Connection, shards: Mapping[int, LocalShard], table: str, unread: Unread
) -> dict[int, tuple[str, ...]]:
    """Return the revisions in a version table of every shard that has one which can be read."""
    having = [local for local in shards.values() if table in local.own_tables]
    with connection.begin():
        answers = read_revisions(unread.reader, connection, [(local.schema, table) for local in having])
    found = (unread.noted(table, one.shard, it) for one, it in zip(having, answers, strict=True))
    return {local.shard: there for local, there in zip(having, found, strict=True) if there is not None}


def meanwhile(
    before: Sequence[T], after: Sequence[T], name: Callable[[T], object] = attrgetter("shard")
) -> list[T]:
    """Return those that were open at some time between two readings; one that ended was running."""
    later = {name(one) for one in after}
    ended: list[T] = [replace(one, is_running=True) for one in before if name(one) not in later]
    return ended + list(after)


_STATEMENT = re.compile(
    r"^(?:create (?:or replace )?function shardids\..*?"
    r"(?:as (?P<quote>\$\w*\$)$.*?^(?P=quote);$|^return\b.*?;$|^begin atomic\b.*?\bend;$)"
    r"|drop function (?:if exists )?shardids\.[^;]*;)",
    re.MULTILINE | re.DOTALL,
)
"""A statement of the node tree that creates or drops a function, outside of DO blocks."""
_FUNCTION = re.compile(r"\bfunction (?:if exists )?shardids\.")


def reference_sql() -> str:
    """Return SQL that creates the engine's functions in ``pg_temp``; they call the installed engine."""
    statements = (found[0] for found in _STATEMENT.finditer(trees.tree_sql("node")))
    return "\n".join(
        _FUNCTION.sub(lambda name: name[0].replace("shardids.", "pg_temp."), statement, count=1)
        for statement in statements
    )


def changed_functions(connection: Connection, installed: Installation) -> list[ChangedFunction]:
    """Return the engine's functions that are missing, unknown, or differ from the files.

    Empty for an engine of another revision, and where nothing can be created to compare it with.
    """
    if installed.revisions != [trees.head("node")] or installed.is_standby or installed.is_read_only:
        return []
    with connection.begin() as transaction:
        prepare(connection)
        connection.execution_options(no_parameters=True).exec_driver_sql(reference_sql())
        changed = rows(connection, read_sql("doctor/engine.v1"), ChangedFunction)
        transaction.rollback()
    return changed
