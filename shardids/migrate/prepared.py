"""A run of migrations before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardids.migrate.compiled import Compiled, Compiler
from shardids.migrate.environment import Direction
from shardids.migrate.plan import MigrationPlan, Outcome, Route, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run before it begins: its plan, what its routes compile to, and the shards that can't take part."""

    plan: MigrationPlan
    compiler: Compiler
    direction: Direction
    target: str
    stop_at_contract: bool
    refused: tuple[Outcome, ...]
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The node revisions that run first, by node."""

    def route_from(self, start: Start, target: str) -> Route:
        """Returns the route from any starting point to a revision that is not relative."""
        environment = self.compiler.environment
        return environment.route(start, target, self.direction, stop_at_contract=self.stop_at_contract)

    def compiled(self) -> list[Compiled]:
        """Compiles what will run, once for each starting point that has something to do."""
        return [self.compiler.compile(route) for route in self.plan.routes.values() if not route.is_empty]

    @property
    def held_back(self) -> str | None:
        """Returns the contract revision that shards stop before, if any does."""
        return next((route.held_back for route in self.plan.routes.values() if route.held_back), None)
