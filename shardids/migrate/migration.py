"""Migrations of all shards and nodes: upgrade, downgrade, stamp, and the tables of new shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from types import TracebackType
from typing import Final, Self

from psycopg import sql
from sqlalchemy import Engine

from shardids.catalog.leases import Leases, Standing, of_owners, read_leases
from shardids.catalog.nodes import Answers, Nodes
from shardids.catalog.references import references_of
from shardids.catalog.revisions import read_node_heads
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement, lost_shard
from shardids.errors import BadArgument, ClusterConflict, ShardidsError, StatementFailed
from shardids.migrate.compiled import Compiled, Compiler
from shardids.migrate.drops import DropGuard, Dropped, Loss
from shardids.migrate.environment import Direction, Environment, Recorded, contract_of, read_recorded, record
from shardids.migrate.lint import require_own_schema
from shardids.migrate.models import OWN_VERSION_TABLE
from shardids.migrate.node_revisions import migrate_node, pending_on_node, require_migrated
from shardids.migrate.plan import (
    Heads,
    MigrationPlan,
    NodeOutcome,
    Outcome,
    Position,
    Route,
    RunReport,
    Start,
    make_plan,
    shown_heads,
)
from shardids.migrate.player import Limits, Player, finished_parts, named_drops
from shardids.migrate.recording import VERSION_TABLE, SchemaRecorder, recording_node
from shardids.migrate.runner import (
    MOST_JOBS,
    Observer,
    Run,
    RunLog,
    RunSettings,
    busy_outcome,
    until_free,
)
from shardids.migrate.status import State, in_transactions, read_node, read_state
from shardids.pg.notation import named_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run before it begins: its plan, what its routes compile to, and the shards that can't take part."""

    plan: MigrationPlan
    compiler: Compiler
    direction: Direction
    target: str
    stop_at_contract: bool
    refused: tuple[Outcome, ...]
    again: Callable[[Migration, Sequence[int]], PreparedRun]
    """Plans the same for some shards, from where they are by then."""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The node revisions that run first, by node."""

    def route_from(self, start: Start, target: str) -> Route:
        """Return the route from any starting point to a revision that is not relative."""
        environment = self.compiler.environment
        return environment.route(start, target, self.direction, stop_at_contract=self.stop_at_contract)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do, and nothing to report."""
        return not (self.plan.pending or self.refused or self.nodes)

    def compiled(self) -> list[Compiled]:
        """Compile the statements to run, once for each starting point that has something to do."""
        return [self.compiler.compile(route) for route in self.plan.routes.values() if not route.is_empty]

    @property
    def held_back(self) -> str | None:
        """Returns the contract revision that shards stop before, if any does."""
        return next((route.held_back for route in self.plan.routes.values() if route.held_back), None)


APPLICATION_NAME: Final = "shardids migrate"


def _read_recorded(engine: Engine) -> list[Recorded]:
    with in_transactions(engine) as connection:
        return read_recorded(connection)


class Migration:
    """An application's migrations on a cluster. Closing it, or leaving its ``with`` block, disconnects.

    Args:
        catalog: the cluster's catalog, whose placement is read once.
        environment: the application's revisions.
    """

    def __init__(self, catalog: Catalog, environment: Environment) -> None:
        self.catalog = catalog
        self.environment = environment
        self.node_environment = environment.of_nodes()
        self.placement: Placement = catalog.placement()
        self.nodes = Nodes(
            self.placement.nodes,
            catalog.url,
            application_name=APPLICATION_NAME,
            connections=MOST_JOBS + 1,
            autocommit=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the nodes."""
        self.nodes.close()

    def choose(self, shards: Sequence[int] | None = None, nodes: Sequence[str] | None = None) -> list[int]:
        """Return the shards to work on: all that are placed or those listed, on all nodes or on some.

        Raises:
            UnknownShard: a shard of the list is on no node.
            ClusterConflict: the node is unknown.
            BadArgument: no shard is left.
        """
        placed = self.placement.node_of
        for name in nodes or ():
            if name not in self.placement.nodes:
                raise unknown_node(name, self.placement.nodes)
        for shard in shards or ():
            self.placement.locate(shard)
        chosen = sorted(
            shard
            for shard in (placed if shards is None else shards)
            if nodes is None or placed[shard] in nodes
        )
        if not chosen:
            raise BadArgument(
                "no shard is chosen",
                hint="List them with: shardids shard list"
                if placed
                else "The cluster has no shards yet. To make them: shardids shard create",
            )
        return chosen

    def state(self, shards: Collection[int]) -> State:
        """Read which revisions the shards are at."""
        return read_state(self.nodes, self.placement, shards, self.environment.version_table)

    def recorded(self, names: Collection[str]) -> Answers[list[Recorded]]:
        """Read the hashes of revisions that nodes and their shards recorded."""
        return self.nodes.each(lambda _name, engine: _read_recorded(engine), names)

    def prepare(
        self,
        target: str,
        direction: Direction,
        shards: Sequence[int],
        *,
        canaries: int = 1,
        contract: bool = False,
        continue_on_error: bool = False,
    ) -> PreparedRun:
        """Plan a run to a target over some shards.

        A shard that can't take part (its node is down, its version table names a revision that the code
        lacks) is an error, or with ``continue_on_error`` a failed outcome of the run. A shard whose lease
        another command has is left out: :meth:`run` waits for it, or reports that it was not started.

        Raises:
            BadArgument: the target is unknown.
            ClusterConflict: a contract is to run, and a shard is not past its expand revision.
            ShardLost: a contract is to run, and a shard was lost with its node.
        """
        target = self.environment.target(target, direction)
        nodes = self._nodes_of(shards)
        busy = self.busy(shards)
        shards = [shard for shard in shards if shard not in busy]
        state = self.state(shards)
        refused = self._refusals(shards, state)
        if refused and not continue_on_error:
            raise next(iter(refused.values()))
        stop_at_contract = direction == "up" and not contract
        if direction == "up" and contract:
            self._check_expanded(target, state, shards)
        compiler = Compiler(self.environment, direction)
        positions = [position for shard, position in state.positions.items() if shard not in refused]
        target = self._absolute(target, direction, positions)

        def route_from(start: Start) -> Route:
            return self.environment.route(start, target, direction, stop_at_contract=stop_at_contract)

        plan = make_plan(positions, route_from, canaries)
        half_way = _half_way(plan, direction)
        if half_way and not continue_on_error:
            raise next(iter(half_way.values()))
        refused |= half_way
        if direction == "up":
            self._require_own_schemas(plan, compiler)
        return PreparedRun(
            plan=plan,
            compiler=compiler,
            direction=direction,
            target=target,
            stop_at_contract=stop_at_contract,
            refused=(
                *busy.values(),
                *(self.refused_outcome(shard, error, state) for shard, error in refused.items()),
            ),
            again=lambda migration, left: migration.prepare(
                target,
                direction,
                left,
                canaries=0,
                contract=contract,
                continue_on_error=continue_on_error,
            ),
            nodes=self._pending_on_nodes(nodes - state.down.keys()) if direction == "up" else {},
        )

    def _require_own_schemas(self, plan: MigrationPlan, compiler: Compiler) -> None:
        if self.environment.version_table == OWN_VERSION_TABLE:
            return
        routes = [route for route in plan.routes.values() if not route.is_empty]
        require_own_schema(self.environment, map(compiler.compile, routes))

    def _nodes_of(self, shards: Collection[int]) -> set[str]:
        """Return the owners of the shards, or every node, empty ones too, if these are all placed shards."""
        if set(shards) == set(self.placement.node_of):
            return set(self.placement.nodes)
        return {self.placement.node_of[shard] for shard in shards}

    def node_heads(self, names: Collection[str]) -> Answers[Heads]:
        """Read which node revisions the nodes are at."""
        return self.nodes.each(lambda name, engine: read_node_heads(engine, f'node "{name}"'), names)

    def _pending_on_nodes(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        if self.node_environment is None:
            return {}
        heads = self.node_heads(names).all()
        pending = {name: pending_on_node(self.node_environment, heads[name]) for name in sorted(names)}
        # A column that rows of the writer have must be on the nodes that follow it first.
        writer = self._reference_writer()
        pending |= {name: pending.pop(name) for name in (writer,) if name in pending}
        return {name: tuple(revisions) for name, revisions in pending.items() if revisions}

    def _reference_writer(self) -> str | None:
        return references_of(self.catalog).writer

    def _run_on_nodes(self, prepared: PreparedRun, limits: Limits) -> list[NodeOutcome]:
        outcomes = list[NodeOutcome]()
        if self.node_environment is None:
            return outcomes
        writer = self._reference_writer()
        for name in prepared.nodes:
            try:
                if name == writer and any(one.status == "failed" for one in outcomes):
                    raise ClusterConflict(
                        f'not run: node "{name}" is the writer of reference tables, and a node that follows'
                        " it failed"
                    )
                with recording_node(self.catalog, name, self.nodes[name], "migrate"):
                    outcomes.append(migrate_node(self.node_environment, name, self.nodes[name], limits))
            except ShardidsError as error:
                failed = NodeOutcome(node=name, start=(), end=(), status="failed", error=error.in_a_line())
                outcomes.append(failed)
        return outcomes

    def busy(self, shards: Sequence[int]) -> dict[int, Outcome]:
        """Return the shards whose lease another command has, as outcomes that were not started.

        If ``shards`` are all that are placed, those that were lost with their node are among them.
        """
        chosen = set(shards)
        lost = self.placement.lost if chosen == set(self.placement.node_of) else {}
        left_out = {
            shard: Outcome(
                shard=shard,
                node=node,
                start=None,
                end=None,
                status="not started",
                error=lost_shard(shard, node).in_a_line(),
            )
            for shard, node in lost.items()
        }
        return left_out | {
            shard: busy_outcome(self.placement.node_of[shard], lease)
            for shard, lease in of_owners(
                read_leases(self.catalog, self.nodes, all_must_answer=False), self.placement.node_of
            ).items()
            if shard in chosen and lease.standing is not Standing.GONE
        }

    def _absolute(self, target: str, direction: Direction, positions: Sequence[Position]) -> str:
        """Resolve a relative target once for all shards, from those with the longest way to go.

        Counted from each shard's own revision, repeating a run would take the finished shards one further.
        """
        if target[:1] not in ("+", "-") or not positions:
            return target
        farthest = (max if direction == "down" else min)(
            (position.heads for position in positions),
            key=lambda heads: len(self.environment.ancestors(heads or ())),
        )
        if direction == "down" and len(farthest or ()) > 1:
            raise BadArgument(
                f"{target} is ambiguous: shards are at several heads, {shown_heads(farthest)}",
                hint="Name the revision to go to: shardids migrate down REV",
            )
        return self.environment.route(farthest, target, direction).target

    def _refusals(self, shards: Collection[int], state: State) -> dict[int, ShardidsError]:
        refused = dict(state.unread)
        for shard in shards:
            node = self.placement.node_of[shard]
            if node in state.down:
                refused[shard] = state.down[node]
        known = {script.revision for script in self.environment.script.walk_revisions()}
        for shard, position in state.positions.items():
            foreign = [revision for revision in position.heads or () if revision not in known]
            if foreign:
                refused[shard] = ClusterConflict(
                    f"shard {shard} is at revision {', '.join(foreign)}, which this code does not have"
                    f' [node "{position.node}"]',
                    hint="Use the code that migrated it, or record where it is: shardids migrate stamp",
                )
        return dict(sorted(refused.items()))

    def refused_outcome(self, shard: int, error: ShardidsError, state: State) -> Outcome:
        """Return a shard that can't take part, as a failed outcome."""
        position = state.positions.get(shard)
        heads = position.heads if position else None
        node = self.placement.node_of[shard]
        return Outcome(
            shard=shard, node=node, start=heads, end=heads, status="failed", error=error.in_a_line()
        )

    def _check_expanded(self, target: str, state: State, shards: Collection[int]) -> None:
        """Refuse unless every shard of the cluster, chosen or not, is past the expand revision."""
        expands = {
            expand
            for position in state.positions.values()
            for revision in self.environment.route(position.heads, target, "up").revisions
            if (expand := contract_of(self.environment.revision(revision))) is not None
        }
        if not expands:
            return
        self.placement.all_shards()
        whole = state if set(shards) == set(self.placement.node_of) else self.state(self.placement.node_of)
        whole.check()
        for expand in sorted(expands):
            behind = [
                shard
                for shard, position in whole.positions.items()
                if expand not in self.environment.ancestors(position.heads or ())
            ]
            if behind:
                raise ClusterConflict(
                    f"{named_shards(behind)}: not past revision {expand}, which the contract completes",
                    hint="Bring them there first: shardids migrate up",
                )

    def losses(self, prepared: PreparedRun) -> list[Loss]:
        """Count the rows that a run would lose with the tables and columns that its SQL names as dropped.

        Raises:
            ConnectionFailed: a node is down.
        """
        drops: dict[Dropped, str] = {}
        for compiled in prepared.compiled():
            drops |= named_drops(compiled)
        losses, _ = self._guard(prepared).losses(drops, [p.shard for p in prepared.plan.pending])
        return [replace(loss, revision=drops.get(loss.what, "")) for loss in losses]

    def _guard(self, prepared: PreparedRun, allowed: Collection[Dropped] = ()) -> DropGuard:
        shards = [p.shard for p in prepared.plan.pending]
        return DropGuard(self.nodes, self.placement, shards, direction=prepared.direction, allowed=allowed)

    def run(
        self,
        prepared: PreparedRun,
        settings: RunSettings,
        observer: Observer,
        stop: Event,
        leases: Leases,
        *,
        allowed: Collection[Dropped] | None = (),
    ) -> RunReport:
        """Carry out a prepared run with the leases of :func:`shardids.migrate.runner.one_run`.

        ``allowed`` are the drops of rows that were allowed; ``None`` allows all.
        """
        log = RunLog(observer, prepared.target)

        def again(left: list[int]) -> RunReport:
            # Another command had them: it may have moved them, or changed their revision.
            with Migration(self.catalog, self.environment) as migration:
                later = prepared.again(migration, left)
                return migration._run_once(later, settings, log, stop, leases, allowed=allowed)

        report = until_free(
            self._run_once(prepared, settings, log, stop, leases, allowed=allowed),
            again=again,
            catalog=self.catalog,
            nodes=self.nodes,
            settings=settings,
            observer=log,
            stop=stop,
        )
        log.finished(report)
        return report

    def _run_once(
        self,
        prepared: PreparedRun,
        settings: RunSettings,
        log: RunLog,
        stop: Event,
        leases: Leases,
        *,
        allowed: Collection[Dropped] | None,
    ) -> RunReport:
        # Compiles in this thread, before the workers compete for Alembic.
        prepared.compiled()
        nodes = self._run_on_nodes(prepared, settings.limits)
        guard = None if allowed is None else self._guard(prepared, allowed)
        report = Run(
            prepared.plan,
            compile_route=prepared.compiler.compile,
            route_from=prepared.route_from,
            leases=leases,
            engines=self.nodes,
            player_on=lambda name: Player(
                self.nodes[name],
                self.environment.version_table,
                settings.limits,
                self.environment,
                epoch=leases.epoch,
                guard=guard,
            ),
            settings=settings,
            failed_nodes={o.node: StatementFailed(o.error) for o in nodes if o.status == "failed"},
            observer=self._recorder(prepared, log),
            stop=stop,
        ).go()
        outcomes = sorted((*prepared.refused, *report.outcomes), key=lambda outcome: outcome.shard)
        return replace(report, outcomes=tuple(outcomes), nodes=tuple(nodes))

    def _recorder(self, prepared: PreparedRun, observer: Observer) -> Observer:
        """Return an observer that records schemas too; a stamp, and shardids' own objects, have none."""
        if isinstance(prepared.compiler, _Stamper) or self.environment.version_table != VERSION_TABLE:
            return observer
        return SchemaRecorder(self.catalog, self.nodes, prepared.plan.routes, observer)


def _half_way(plan: MigrationPlan, direction: Direction) -> dict[int, ShardidsError]:
    """Return the shards without revisions to run that stopped half way through another."""
    found: dict[int, ShardidsError] = {}
    for position in plan.settled:
        route = plan.routes[position.heads]
        try:
            finished_parts(position, Compiled(route=route, direction=direction, way="sql"))
        except ClusterConflict as error:
            found[position.shard] = error
    return found


MigrateNew = Callable[[str, Sequence[int]], None]
"""Brings new shards of a node to the cluster's revision."""


@contextmanager
def migrator_of_new_shards(catalog: Catalog, environment: Environment) -> Iterator[MigrateNew]:
    """Yield what :func:`shardids.migrate.install.provision.create_shards` takes as ``migrate``.

    The cluster's revision is the one that most of its shards are at or, without shards, the code's newest.

    Raises:
        BadArgument: the code lacks that revision, or has several heads.
        ConnectionFailed: a node that owns shards is down.
    """
    with Migration(catalog, environment) as migration:
        target = cluster_revision(migration)
        compiler = Compiler(environment, "up")

        def migrate(name: str, shards: Sequence[int]) -> None:
            if target == "base":
                return
            engine = migration.nodes[name]
            require_migrated(environment, name, engine)
            positions = read_node(name, engine, environment.version_table)
            routes: dict[Start, Route] = {}
            recorder = SchemaRecorder(catalog, migration.nodes, routes, Observer())
            player_of_node = Player(engine, environment.version_table, Limits(), environment)
            with closing(player_of_node) as player:
                for shard in shards:
                    position = positions[shard]
                    if isinstance(position, ShardidsError):
                        raise position
                    route = routes[position.heads] = environment.route(position.heads, target, "up")
                    if not route.is_empty:
                        compiled = compiler.compile(route)
                        require_own_schema(environment, [compiled])
                        with recorder.following(position, route):
                            player.play(position, compiled)

        yield migrate


def cluster_revision(migration: Migration) -> str:
    """Return the revision that new shards should be at. Raises as :func:`migrator_of_new_shards` does."""
    environment = migration.environment
    state = migration.state(list(migration.placement.node_of))
    for error in state.down.values():
        raise error
    counts: Counter[Heads] = Counter(position.heads or () for position in state.positions.values())
    if not counts:
        return environment.head()
    heads = max(counts, key=lambda found: (counts[found], len(environment.ancestors(found))))
    if not heads:
        return "base"
    return environment.revision(heads[0]).revision if len(heads) == 1 else environment.head()


def prepare_stamp(
    migration: Migration, revision: str, shards: Sequence[int], *, continue_on_error: bool = False
) -> PreparedRun:
    """Plan to record a revision in the shards' version tables without running it.

    As with Alembic, branches that have nothing to do with it keep their record.

    Raises:
        BadArgument: the revision is unknown.
    """
    environment = migration.environment
    target = environment.target(revision, "up")
    if target != "base":
        environment.revision(target)
    busy = migration.busy(shards)
    shards = [shard for shard in shards if shard not in busy]
    state = migration.state(shards)
    troubles = {**state.unread} | {
        shard: state.down[migration.placement.node_of[shard]]
        for shard in shards
        if migration.placement.node_of[shard] in state.down
    }
    if troubles and not continue_on_error:
        raise next(iter(troubles.values()))
    # Whoever stamps has repaired the shard, so the run also drops the mark of an unfinished revision.
    positions = [replace(p, heads=p.heads, unfinished=None) for p in state.positions.values()]
    marked = {p.shard for p in state.positions.values() if p.unfinished is not None}
    nodes = {position.node for position in state.positions.values()}
    recorded = [one for there in migration.recorded(nodes).all().values() for one in there]

    def is_recorded(start: Heads) -> bool:
        stamped = Stamped.of(environment, start, target)
        shards = {
            shard
            for one in recorded
            if {name: one.hashes[name] for name in one.hashes.keys() - stamped.kept} == stamped.hashes
            for shard in one.shards
        }
        return not stamped.hashes or shards >= {p.shard for p in positions if p.heads == start}

    def route_from(start: Start) -> Route:
        end = Stamped.of(environment, start or (), target).heads
        there = start is not None and start == end and not marked and is_recorded(start)
        revisions = () if there else (f"stamp {shown_heads(end)}",)
        return Route(start=start, end=end, target=target, revisions=revisions)

    return PreparedRun(
        plan=make_plan(positions, route_from, canaries=0),
        compiler=_Stamper(environment, "up"),
        direction="up",
        target=target,
        stop_at_contract=False,
        again=lambda there, left: prepare_stamp(there, target, left, continue_on_error=continue_on_error),
        refused=(
            *busy.values(),
            *(migration.refused_outcome(shard, error, state) for shard, error in troubles.items()),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped:
    """The contents of a version table once a revision is recorded in it.

    ``hashes`` are those of the code's revisions up to it; ``kept`` the revisions of other branches, which
    stay as they are.
    """

    heads: Heads
    hashes: Mapping[str, str]
    kept: frozenset[str]

    @classmethod
    def of(cls, environment: Environment, heads: Heads, target: str) -> Self:
        """Return the contents of a version table at ``heads`` after it."""
        own = () if target == "base" else (target,)
        others = _apart_from(environment, heads, target)
        return cls(
            heads=tuple(sorted({*own, *others})),
            hashes=hashes_up_to(environment, own),
            kept=frozenset(environment.ancestors(others) - environment.ancestors(own)),
        )


def _apart_from(environment: Environment, heads: Heads, revision: str) -> Heads:
    """Return the heads of branches that have nothing to do with a revision, or none for ``base``.

    Heads that the code does not have are not among them.
    """
    if revision == "base":
        return ()
    below = environment.ancestors([revision])
    known = [head for head in heads if environment.knows(head) and head not in below]
    return tuple(head for head in known if revision not in environment.ancestors([head]))


def hashes_up_to(environment: Environment, heads: Heads) -> dict[str, str]:
    """Return the hashes of the code's revisions that a version table at ``heads`` implies."""
    hashes = {revision: environment.hash_of(revision) for revision in environment.ancestors(heads)}
    return {revision: value for revision, value in hashes.items() if value is not None}


class _Stamper(Compiler):
    """Compiles routes that change only the version table."""

    def compile(self, route: Route) -> Compiled:
        table = sql.Identifier(self.environment.version_table)
        statements = [self.version_table_sql()] if route.start is None else []
        statements.append(sql.SQL("delete from {};").format(table).as_string(None))
        statements += [
            sql.SQL("insert into {} (version_num) values ({});").format(table, revision).as_string(None)
            for revision in route.end
        ]
        statements.append(sql.SQL("comment on table {} is null;").format(table).as_string(None))
        stamped = Stamped.of(self.environment, route.start or (), route.target)
        known = {script.revision for script in self.environment.script.walk_revisions()}
        undone = known - stamped.kept if stamped.kept else None
        statements.append(record(self.environment.version_table, undone, stamped.hashes) + ";")
        return Compiled(route=route, direction="up", way="sql", sql="\n".join(statements))
