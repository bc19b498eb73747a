"""Records the state that shards must be in, as commands change it.

A command that changes shards reads one of them before and after, and records the difference. It commits in
the shards first: until the record is written, and if the process ends before, the revision has no record, and
its shards are compared with each other. See ``docs/decisions/0048-recorded-state.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final

from sqlalchemy import Engine

from shardids.catalog.leases import Standing, read_leases
from shardids.catalog.nodes import Nodes
from shardids.catalog.objects import NOT_COMPARED, SchemaObject, read_objects
from shardids.catalog.recorded import (
    Contract,
    Key,
    Objects,
    RecordedSchema,
    Thing,
    carried,
    compared,
    contract_of,
    forget_schemas,
    objects_of,
    read_contracts,
    read_schemas,
    revision_of,
    write_contract,
    write_schemas,
)
from shardids.catalog.revisions import revisions_on
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict, ShardidsError
from shardids.logs import logger
from shardids.migrate.plan import Outcome, Position, Route, Start
from shardids.migrate.runner import Observer
from shardids.migrate.status import in_transactions, read_state
from shardids.pg.connections import server_major
from shardids.pg.notation import named_shards
from shardids.pg.reader import Refused

VERSION_TABLE: Final = "alembic_version"
"""The version table whose rows say which shards are compared."""

log = logger("migrate")

_Way = tuple[str, str, int]
"""The revisions at its start and end, and the major version of the servers."""
_MOST_DOUBTED: Final = 5
"""How many shards that began otherwise than recorded are followed: reading one takes long."""


class SchemaRecorder(Observer):
    """Records the schema of each revision that a run brings shards to, and passes the run's events on.

    It follows the first shard that goes each way on each major version of PostgreSQL. One that an earlier run
    left half way through a revision has a part of the difference already. So a shard that is marked as such
    is not followed, and one that begins otherwise than recorded is believed once another one agrees.

    Args:
        catalog: where it records.
        nodes: the nodes.
        routes: the ways of the run, by starting point.
        observer: receives the run's events.
    """

    def __init__(
        self, catalog: Catalog, nodes: Nodes, routes: Mapping[Start, Route], observer: Observer
    ) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._routes = routes
        self._observer = observer
        self._lock = Lock()
        self._followed: dict[_Way, int] = {}
        """The shard that is followed, or was, by its way."""
        self._before: dict[int, tuple[_Way, Key, Objects]] = {}
        self._doubted: dict[_Way, list[dict[Thing, str]]] = {}
        """The schemas at the end of a way that shards have which began otherwise than recorded."""
        self._versions: dict[str, int] = {}
        with catalog.engine.connect() as connection:
            self._recorded = read_schemas(connection)

    def planned(self, counts: Mapping[str, int]) -> None:
        """Pass it on."""
        self._observer.planned(counts)

    def started(self, position: Position) -> None:
        """Read a shard before its migration, if it is the first to go its way."""
        self._observer.started(position)
        route = self._routes.get(position.heads)
        if route is not None and not route.is_empty:
            self._guarded(lambda: self._begin(position, route), position.shard)

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Pass it on."""
        self._observer.retried(position, attempt, error)

    def ended(self, outcome: Outcome) -> None:
        """Record the schema that the revision made of a shard that is followed."""
        with self._lock:
            before = self._before.pop(outcome.shard, None)
        if before is not None:
            if outcome.status == "done":
                self._guarded(lambda: self._end(outcome, *before), outcome.shard)
            else:
                self._follow_another(before[0])
        self._observer.ended(outcome)

    @contextmanager
    def following(self, position: Position, route: Route) -> Iterator[None]:
        """Record the schema that the block gives a shard, by this route."""
        self.started(position)
        yield
        self.ended(
            Outcome(
                shard=position.shard, node=position.node, start=position.heads, end=route.end, status="done"
            )
        )

    def _guarded(self, work: Callable[[], None], shard: int) -> None:
        try:
            work()
        except ShardidsError as error:
            # The shard is migrated. Of the new revision nothing is recorded, and the doctor says so.
            log.warning("the schema of shard %s was not recorded: %s", shard, error.message)

    def _begin(self, position: Position, route: Route) -> None:
        if position.unfinished is not None:
            return
        engine = self._nodes[position.node]
        # Asked once: a connection for each shard takes as long as its migration.
        version = self._versions.get(position.node) or major_of(engine)
        self._versions[position.node] = version
        start, end = (revision_of(position.heads), version), (revision_of(route.end), version)
        way = (start[0], *end)
        with self._lock:
            if way in self._followed or not self._is_wanted(start, end):
                return
            self._followed[way] = position.shard
        before = read_shard(engine, position.shard)
        with self._lock:
            self._before[position.shard] = (way, start, before)

    def _follow_another(self, way: _Way) -> None:
        with self._lock:
            self._followed.pop(way, None)

    def _is_wanted(self, start: Key, end: Key) -> bool:
        known, there = self._recorded.get(start), self._recorded.get(end)
        # What was recorded of the end later than of the start has all that was changed at the start.
        return there is None or (known is not None and known.at > there.at)

    def _end(self, outcome: Outcome, way: _Way, start: Key, before: Objects) -> None:
        known = self._recorded.get(start)
        if known is None and not is_blank(before):
            return
        after = read_shard(self._nodes[outcome.node], outcome.shard)
        expected = carried(known.objects if known else before, before, after)
        if known is not None and not _is_as(known.objects, before, outcome.shard):
            bare = {thing: one.bare or one.text for thing, one in expected.items()}
            doubted = self._doubted.setdefault(way, [])
            doubted.append(bare)
            if len(doubted) < _MOST_DOUBTED:
                # One that began as recorded has the last word.
                self._follow_another(way)
            if doubted.count(bare) < 2:
                return
        with self._catalog.engine.begin() as connection:
            write_schemas(connection, {(revision_of(outcome.end), start[1]): expected}, "migrate")


def _is_as(expected: Objects, found: Objects, shard: int) -> bool:
    """Return whether a shard has just the expected objects."""
    rows = [(thing, one.text, (shard,)) for thing, one in found.items()]
    return not compared(expected, frozenset({shard}), rows)


def major_of(engine: Engine) -> int:
    """Return the major version of a node's server."""
    with engine.connect() as connection:
        return server_major(connection)


def read_shard(engine: Engine, shard: int) -> Objects:
    """Return the objects of a shard."""
    with in_transactions(engine) as connection:
        return objects_of(shard, read_objects(connection, [shard]))


def is_blank(objects: Objects) -> bool:
    """Return whether a shard has nothing of an application, except a version table."""
    return all(
        kind in {"schema", "grants", "owner", "comment"} or name.partition(".")[0] == VERSION_TABLE
        for kind, name in objects
    )


def _classes(nodes: Nodes, placement: Placement) -> dict[Key, list[int]]:
    """Return the shards by revision and by their servers' versions.

    Raises:
        ShardidsError: a shard's revision can't be read.
    """
    state = read_state(nodes, placement, list(placement.node_of), VERSION_TABLE)
    state.check()
    versions = {name: major_of(nodes[name]) for name in placement.by_node()}
    found: dict[Key, list[int]] = {}
    for shard, position in sorted(state.positions.items()):
        found.setdefault((revision_of(position.heads), versions[position.node]), []).append(shard)
    return found


@contextmanager
def recording(catalog: Catalog, by: str, *, dry_run: bool = False) -> Iterator[None]:
    """Record, at the end of a block that changes all shards alike, its changes.

    ``by`` is the command. Revisions without a record get none.
    """
    with catalog.engine.connect() as connection:
        recorded = {} if dry_run else read_schemas(connection)
    if not recorded:
        yield
        return
    placement = catalog.placement()
    with Nodes(placement.nodes, catalog.url, application_name="shardids") as nodes:
        classes = {key: shards for key, shards in _classes(nodes, placement).items() if key in recorded}
        before = {key: _first(nodes, placement, shards) for key, shards in classes.items()}
        yield
        after = {key: _first(nodes, placement, shards) for key, shards in classes.items()}
    changed = {key: carried(recorded[key].objects, before[key], after[key]) for key in classes}
    with catalog.engine.begin() as connection:
        write_schemas(connection, changed, by)
        # No shard is at these; what was recorded of them lacks this change.
        forget_schemas(connection, [recorded[key] for key in recorded.keys() - changed.keys()])


def _first(nodes: Nodes, placement: Placement, shards: list[int]) -> Objects:
    return read_shard(nodes[placement.node_of[shards[0]]], shards[0])


def record_moved(catalog: Catalog, shard: int, source: Engine, target: Engine) -> None:
    """Record the schema of a moved shard as its new server writes it, if nothing is recorded of that version.

    Only if the copy that it left is as recorded; a failure is logged.
    """
    old, new = major_of(source), major_of(target)
    if old == new:
        return
    try:
        with catalog.engine.connect() as connection:
            recorded = read_schemas(connection)
        heads, _ = revisions_on(target, "the target", VERSION_TABLE)[shard]
        if isinstance(heads, Refused):
            return
        revision = revision_of(heads)
        known = recorded.get((revision, old))
        if known is None or (revision, new) in recorded:
            return
        left = _objects(source, [shard])
        if not compared(known.objects, frozenset({shard}), rows_of(left)):
            with catalog.engine.begin() as connection:
                write_schemas(connection, {(revision, new): read_shard(target, shard)}, "shard move")
    except ShardidsError as error:
        log.warning("the schema of shard %s was not recorded: %s", shard, error.message)


@contextmanager
def recording_node(catalog: Catalog, name: str, engine: Engine, by: str) -> Iterator[None]:
    """Record, at the end of a block that changes a node outside of its shards, its changes there."""
    before = read_contract(engine)
    yield
    after = read_contract(engine)
    if before != after:
        with catalog.engine.begin() as connection:
            recorded = read_contracts(connection).get(name)
            if recorded is not None:
                write_contract(connection, name, carried(recorded, before, after), by)


def read_contract(engine: Engine) -> dict[Thing, str]:
    """Return the settings and objects that a node has outside of its shards."""
    with in_transactions(engine) as connection, connection.begin():
        return contract_of(connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedNode:
    """The contract that a node fulfils now, and how it differs from the recorded one."""

    node: str
    is_recorded: bool
    lines: tuple[str, ...]
    contract: Contract


def plan_node_acceptance(catalog: Catalog, names: Collection[str] = ()) -> list[AcceptedNode]:
    """Return the contracts that :func:`accept_nodes` would record of nodes, or of all.

    Raises:
        ClusterConflict: a node of these names does not exist.
        ShardidsError: a node can't be read.
    """
    placement = catalog.placement()
    with catalog.engine.connect() as connection:
        recorded = read_contracts(connection)
    with Nodes(placement.nodes, catalog.url, application_name="shardids") as nodes:
        found = nodes.each(lambda _name, engine: read_contract(engine), sorted(names) or None).all()
    return [
        AcceptedNode(
            node=name,
            is_recorded=name in recorded,
            lines=tuple(contract_lines(recorded.get(name, {}), contract)),
            contract=contract,
        )
        for name, contract in sorted(found.items())
    ]


def accept_nodes(catalog: Catalog, accepted: Collection[AcceptedNode], by: str) -> None:
    """Record the contracts that nodes fulfil now."""
    with catalog.engine.begin() as connection:
        for one in accepted:
            write_contract(connection, one.node, one.contract, by)


def contract_lines(expected: Contract, found: Contract) -> Iterator[str]:
    """Yield the differences between contracts, a line for each definition."""
    for thing in sorted(expected.keys() | found.keys()):
        if expected.get(thing) != found.get(thing):
            if thing in expected:
                yield f"- {' '.join(thing)} {expected[thing]}".rstrip()
            if thing in found:
                yield f"+ {' '.join(thing)} {found[thing]}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The state of shards of one key, and how it differs from the recorded one, a line for each definition.

    ``compared_with`` is the revision of the recorded one, ``None`` without a record; ``is_recorded``
    whether it is the shards' own.
    """

    key: Key
    shards: tuple[int, ...]
    compared_with: str | None
    is_recorded: bool
    lines: tuple[str, ...]
    objects: Objects


def plan_acceptance(catalog: Catalog, like: int | None = None) -> list[Accepted]:
    """Return the states that :func:`accept` would record: those of the shards of each key now.

    ``like`` is the shard to go by where shards of a class differ.

    Raises:
        ClusterConflict: shards of a class differ, and ``like`` is not one of them.
        ShardBusy: a command is changing a shard.
        ShardidsError: a node or a shard's revision can't be read.
    """
    placement = catalog.placement()
    if like is not None:
        placement.locate(like)
    with catalog.engine.connect() as connection:
        recorded = read_schemas(connection)
    with Nodes(placement.nodes, catalog.url, application_name="shardids") as nodes:
        for lease in read_leases(catalog, nodes):
            if lease.standing is not Standing.GONE:
                raise lease.error()
        classes = _classes(nodes, placement)
        objects = nodes.each(
            lambda name, engine: _objects(engine, placement.by_node()[name]), placement.by_node()
        ).all()
    everything = [one for there in objects.values() for one in there]
    found = []
    for key, shards in sorted(classes.items()):
        first = like if like in shards else shards[0]
        own = objects_of(first, everything)
        if is_blank(own):
            continue
        wrong = {} if like in shards else compared(own, frozenset(shards), rows_of(everything))
        if odd := {shard for there in wrong.values() for shard in there}:
            raise ClusterConflict(
                f"{named_shards(sorted(odd))} differ from shard {first}, at revision {key[0] or 'none'}",
                hint="Make them alike (shardids doctor names the differences), or name the shard that is as"
                " all have to be: --like N",
            )
        known = recorded.get(key) or _newest(recorded, key[1])
        found.append(
            Accepted(
                key=key,
                shards=tuple(shards),
                compared_with=None if known is None else known.key[0],
                is_recorded=key in recorded,
                lines=tuple(_lines(known.objects if known else {}, own)),
                objects=own,
            )
        )
    return found


def accept(catalog: Catalog, accepted: Collection[Accepted], by: str) -> None:
    """Record the state of shards, and forget revisions that no shard is at."""
    schemas = {one.key: one.objects for one in accepted}
    with catalog.engine.begin() as connection:
        known = read_schemas(connection)
        write_schemas(connection, schemas, by)
        forget_schemas(connection, [known[key] for key in known.keys() - schemas.keys()])


def rows_of(objects: Collection[SchemaObject]) -> Iterator[tuple[Thing, str, Collection[int]]]:
    """Yield objects as :func:`compared` takes them."""
    for one in objects:
        if one.kind not in NOT_COMPARED:
            yield (one.kind, one.name), one.definition, one.shards


def _newest(recorded: Mapping[Key, RecordedSchema], version: int) -> RecordedSchema | None:
    there = [one for one in recorded.values() if one.key[1] == version]
    return max(there, key=lambda one: one.at, default=None)


def _lines(expected: Objects, found: Objects) -> Iterator[str]:
    for kind, name in sorted(expected.keys() | found.keys()):
        before, after = expected.get((kind, name)), found.get((kind, name))
        if before != after and (
            before is None or after is None or before.bare is None or before.bare != after.bare
        ):
            if before is not None:
                yield f"- {kind} {name} {before.text}".rstrip()
            if after is not None:
                yield f"+ {kind} {name} {after.text}".rstrip()


def _objects(engine: Engine, shards: Collection[int]) -> list[SchemaObject]:
    with in_transactions(engine) as connection:
        return read_objects(connection, shards)
