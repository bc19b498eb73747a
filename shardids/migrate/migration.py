"""An application's migrations on a cluster: the shards' revisions, the plan of a run, and the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from threading import Event
from types import TracebackType
from typing import Final, Self

from sqlalchemy import Engine

from shardids.catalog.nodes import Answers, Nodes
from shardids.catalog.notation import named_shards
from shardids.catalog.references import references_of
from shardids.catalog.revisions import read_node_heads
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement, lost_shard
from shardids.errors import BadArgument, ClusterConflict, ShardidsError, StatementFailed
from shardids.migrate.compiled import Compiler
from shardids.migrate.environment import Direction, Environment, contract_of
from shardids.migrate.hashes import Recorded, read_recorded
from shardids.migrate.lint import require_own_schema
from shardids.migrate.logged import RunLog
from shardids.migrate.models import OWN_VERSION_TABLE
from shardids.migrate.node_revisions import migrate_node, pending_on_node
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
from shardids.migrate.player import Limits, Player
from shardids.migrate.prepared import PreparedRun
from shardids.migrate.runner import MOST_JOBS, Observer, Run, RunSettings
from shardids.migrate.status import OpenMoves, State, in_transactions, read_state

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
        self._moves = OpenMoves(catalog)
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
        """Closes the connections to the nodes."""
        self.nodes.close()

    def choose(self, shards: Sequence[int] | None = None, nodes: Sequence[str] | None = None) -> list[int]:
        """Returns the shards to work on: all that are placed or those listed, on all nodes or on some.

        Raises:
            UnknownShard: a shard of the list is on no node.
            ClusterConflict: there is no such node.
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
        """Reads which revisions the shards are at."""
        return read_state(self.nodes, self.placement, shards, self.environment.version_table)

    def recorded(self, names: Collection[str]) -> Answers[list[Recorded]]:
        """Reads the hashes of revisions that nodes and their shards recorded."""
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
        """Plans a run to a target over some shards.

        A shard that can't take part (its node is down, its version table names a revision that the code
        lacks) is an error, or with ``continue_on_error`` a failed outcome of the run. A shard that is being
        moved is left out, and its outcome says that it was not started.

        Raises:
            BadArgument: there is no such target.
            ClusterConflict: a contract is to run, and a shard is not past its expand revision.
            ShardLost: a contract is to run, and a shard was lost with its node.
        """
        target = self.environment.target(target, direction)
        nodes = self._nodes_of(shards)
        moving = self.moving(shards)
        shards = [shard for shard in shards if shard not in moving]
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
        if direction == "up":
            self._require_own_schemas(plan, compiler)
        return PreparedRun(
            plan=plan,
            compiler=compiler,
            direction=direction,
            target=target,
            stop_at_contract=stop_at_contract,
            refused=(
                *moving.values(),
                *(self.refused_outcome(shard, error, state) for shard, error in refused.items()),
            ),
            nodes=self._pending_on_nodes(nodes - state.down.keys()) if direction == "up" else {},
        )

    def _require_own_schemas(self, plan: MigrationPlan, compiler: Compiler) -> None:
        if self.environment.version_table == OWN_VERSION_TABLE:
            return
        routes = [route for route in plan.routes.values() if not route.is_empty]
        require_own_schema(self.environment, map(compiler.compile, routes))

    def _nodes_of(self, shards: Collection[int]) -> set[str]:
        """Returns the owners of the shards, or every node, empty ones too, if these are all placed shards."""
        if set(shards) == set(self.placement.node_of):
            return set(self.placement.nodes)
        return {self.placement.node_of[shard] for shard in shards}

    def node_heads(self, names: Collection[str]) -> Answers[Heads]:
        """Reads which node revisions the nodes are at."""
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
                outcomes.append(migrate_node(self.node_environment, name, self.nodes[name], limits))
            except ShardidsError as error:
                failed = NodeOutcome(node=name, start=(), end=(), status="failed", error=error.in_a_line())
                outcomes.append(failed)
        return outcomes

    def moving(self, shards: Sequence[int]) -> dict[int, Outcome]:
        """Returns the shards that are being moved, as outcomes that were not started.

        If ``shards`` are all that are placed, those that were lost with their node are among them.
        """
        lost = self.placement.lost if set(shards) == set(self.placement.node_of) else {}
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
            shard: Outcome(
                shard=shard,
                node=self.placement.node_of[shard],
                start=None,
                end=None,
                status="not started",
                error=move,
            )
            for shard, move in self._moves.now().items()
            if shard in shards
        }

    def _absolute(self, target: str, direction: Direction, positions: Sequence[Position]) -> str:
        """Resolves a relative target once for all shards, from those with the longest way to go.

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
        """Returns a shard that can't take part, as a failed outcome."""
        position = state.positions.get(shard)
        heads = position.heads if position else None
        node = self.placement.node_of[shard]
        return Outcome(
            shard=shard, node=node, start=heads, end=heads, status="failed", error=error.in_a_line()
        )

    def _check_expanded(self, target: str, state: State, shards: Collection[int]) -> None:
        """Refuses unless every shard of the cluster, chosen or not, is past the expand revision."""
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

    def run(self, prepared: PreparedRun, settings: RunSettings, observer: Observer, stop: Event) -> RunReport:
        """Carries out a prepared run. The caller holds :func:`shardids.migrate.runner.one_run`."""
        # Compiles in this thread, before the workers compete for Alembic.
        prepared.compiled()
        log = RunLog(observer, prepared.target)
        nodes = self._run_on_nodes(prepared, settings.limits)
        report = Run(
            prepared.plan,
            compile_route=prepared.compiler.compile,
            route_from=prepared.route_from,
            check_free=self._moves.check_free,
            player_on=lambda name: Player(
                self.nodes[name], self.environment.version_table, settings.limits, self.environment
            ),
            settings=settings,
            failed_nodes={o.node: StatementFailed(o.error) for o in nodes if o.status == "failed"},
            observer=log,
            stop=stop,
        ).go()
        outcomes = sorted((*prepared.refused, *report.outcomes), key=lambda outcome: outcome.shard)
        report = replace(report, outcomes=tuple(outcomes), nodes=tuple(nodes))
        log.finished(report)
        return report
