"""Plans a run of ``manage.py migrate_shards`` from where the shards are, and carries it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from types import TracebackType
from typing import Final, Self

from shardids.catalog.leases import Leases, Standing, of_owners, read_leases
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import lost_shard
from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.playing import DjangoPlayer
from shardids.django.migrating.rehearsal import Rehearsed, RouteCompiler, rehearse
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.compiled import Compiled
from shardids.migrate.environment import VERSION_TABLE
from shardids.migrate.lint import node_wide
from shardids.migrate.plan import MigrationPlan, Outcome, Position, Route, RunReport, Start, make_plan
from shardids.migrate.runner import MOST_JOBS, Observer, Run, RunSettings, busy_outcome, until_free
from shardids.migrate.status import State, read_state

_APPLICATION_NAME: Final = "shardids migrate_shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMigrations:
    """A run before it begins: its plan, what its routes compile to, and the shards that can't take part."""

    plan: MigrationPlan
    compiled: Mapping[Route, Compiled]
    compiler: RouteCompiler | None
    targets: Collection[str] | None
    left_out: tuple[Outcome, ...]
    again: Callable[[ShardMigrations, Sequence[int]], PreparedMigrations]


class ShardMigrations:
    """Django's migrations on a cluster. Leaving its ``with`` block disconnects.

    Args:
        catalog: the cluster's catalog, whose placement is read once.
        history: the migrations of the code.
    """

    def __init__(self, catalog: Catalog, history: ShardHistory) -> None:
        self._history = history
        self._catalog = catalog
        self.placement = catalog.placement()
        self._nodes = Nodes(
            self.placement.nodes,
            catalog.url,
            application_name=_APPLICATION_NAME,
            connections=MOST_JOBS + 1,
            autocommit=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nodes.close()

    def position(self, shard: int) -> Position:
        """Return the migrations that a shard has run. Raises as :meth:`prepare`."""
        self.placement.locate(shard)
        state = read_state(self._nodes, self.placement, [shard], VERSION_TABLE)
        if refused := self._refused([shard], state):
            raise refused[shard]
        return state.positions[shard]

    def rehearsed(self, shard: int, name: str) -> Rehearsed:
        """Return a migration as a shard's node has it, after those that it depends on.

        Raises as :func:`shardids.django.migrating.rehearsal.rehearse`.
        """
        node = self.placement.locate(shard)
        label, _, short = name.partition(".")
        plan = {".".join(key) for key in self._history.loader.graph.forwards_plan((label, short))}
        applied = (plan & set(self._history.of_shards)) - {name}
        (found,) = rehearse(self._history, self._nodes[node.name], applied, [name])
        return found

    def prepare(
        self,
        shards: Sequence[int] | None = None,
        *,
        targets: Collection[str] | None = None,
        canaries: int = 1,
        continue_on_error: bool = False,
        is_fake: bool = False,
    ) -> PreparedMigrations:
        """Plan a run over some shards, or all that are placed; compile its statements.

        A shard that can't take part (its node is down, it has run migrations that the code lacks) is an
        error, or with ``continue_on_error`` a failed outcome. One that is being moved or was lost is left
        out.

        Raises:
            BadArgument: a migration can't be turned into SQL for shards; a shard does not exist.
            ClusterConflict, ConnectionFailed, MissingPrivilege: as they say.
        """
        left_out = self._away(shards)
        chosen = [
            one for one in (self.placement.node_of if shards is None else shards) if one not in left_out
        ]
        for shard in chosen:
            self.placement.locate(shard)
        state = read_state(self._nodes, self.placement, chosen, VERSION_TABLE)
        refused = self._refused(chosen, state)
        if refused and not continue_on_error:
            raise next(iter(refused.values()))
        positions = [position for shard, position in state.positions.items() if shard not in refused]
        if is_fake:
            positions = [self._repaired(position, targets) for position in positions]
        plan = make_plan(positions, lambda start: self._history.route(start, targets), canaries)
        compiler = None
        compiled = dict[Route, Compiled]()
        if plan.pending:
            compiler = RouteCompiler(self._history, self._nodes[plan.pending[0].node], is_fake=is_fake)
            routes = [route for route in plan.routes.values() if not route.is_empty]
            compiled = {route: compiler.compile(route) for route in routes}
            _require_own_schema(compiled.values())
        left_out |= {
            shard: self._outcome(shard, error.in_a_line(), state) for shard, error in refused.items()
        }
        return PreparedMigrations(
            plan=plan,
            compiled=compiled,
            compiler=compiler,
            targets=targets,
            left_out=tuple(left_out[shard] for shard in sorted(left_out)),
            again=lambda migrations, left: migrations.prepare(
                left, targets=targets, canaries=0, continue_on_error=continue_on_error, is_fake=is_fake
            ),
        )

    def run(
        self,
        prepared: PreparedMigrations,
        settings: RunSettings,
        observer: Observer,
        stop: Event,
        leases: Leases,
    ) -> RunReport:
        """Carry out a prepared run under the leases of :func:`shardids.migrate.runner.one_run`."""

        def again(left: list[int]) -> RunReport:
            with ShardMigrations(self._catalog, self._history) as migrations:
                return migrations._run_once(
                    prepared.again(migrations, left), settings, observer, stop, leases
                )

        return until_free(
            self._run_once(prepared, settings, observer, stop, leases),
            again=again,
            catalog=self._catalog,
            nodes=self._nodes,
            settings=settings,
            observer=observer,
            stop=stop,
        )

    def _run_once(
        self,
        prepared: PreparedMigrations,
        settings: RunSettings,
        observer: Observer,
        stop: Event,
        leases: Leases,
    ) -> RunReport:
        if prepared.compiler is None:
            return RunReport(outcomes=prepared.left_out, seconds=0.0)
        report = Run(
            prepared.plan,
            compile_route=prepared.compiler.compile,
            route_from=lambda start, _target: self._route_again(start, prepared),
            leases=leases,
            engines=self._nodes,
            player_on=lambda name: DjangoPlayer(
                self._history, self._nodes[name], VERSION_TABLE, settings.limits, epoch=leases.epoch
            ),
            settings=settings,
            failed_nodes={},
            observer=observer,
            stop=stop,
        ).go()
        outcomes = sorted((*prepared.left_out, *report.outcomes), key=lambda outcome: outcome.shard)
        return replace(report, outcomes=tuple(outcomes))

    def _repaired(self, position: Position, targets: Collection[str] | None) -> Position:
        """Return a position without its mark, if the migration that was begun is recorded as run."""
        _, revision, *_ = [*(position.unfinished or "").split(" "), "", ""]
        if revision in self._history.route(position.heads, targets).revisions:
            return replace(position, heads=position.heads, unfinished=None)
        return position

    def _route_again(self, start: Start, prepared: PreparedMigrations) -> Route:
        return self._history.route(start, prepared.targets)

    def _refused(self, shards: Collection[int], state: State) -> dict[int, ShardidsError]:
        refused = dict(state.unread)
        for shard in shards:
            node = self.placement.node_of[shard]
            if node in state.down:
                refused[shard] = state.down[node]
        for shard, position in state.positions.items():
            try:
                self._history.check_known(shard, position.node, position.heads)
            except ShardidsError as error:
                refused[shard] = error
        return dict(sorted(refused.items()))

    def _away(self, shards: Sequence[int] | None) -> dict[int, Outcome]:
        """Return the shards whose lease another command has and, if all are meant, those that were lost."""
        lost = self.placement.lost if shards is None else {}
        chosen = set(self.placement.node_of if shards is None else shards)
        away = {
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
        return away | {
            shard: busy_outcome(self.placement.node_of[shard], lease)
            for shard, lease in of_owners(
                read_leases(self._catalog, self._nodes, all_must_answer=False), self.placement.node_of
            ).items()
            if shard in chosen and lease.standing is not Standing.GONE
        }

    def _outcome(self, shard: int, error: str, state: State) -> Outcome:
        position = state.positions.get(shard)
        heads = position.heads if position else None
        node = self.placement.node_of[shard]
        return Outcome(shard=shard, node=node, start=heads, end=heads, status="failed", error=error)


def _require_own_schema(compiled: Collection[Compiled]) -> None:
    for found in node_wide(None, compiled):
        raise BadArgument(
            str(found),
            hint="Shards of a node share it: run it once on each node, in schema public, and leave it out of"
            " the migrations of applications with sharded models.",
        )
