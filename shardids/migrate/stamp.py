"""Records in the shards' version tables that they are as the code's revisions make them, and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from psycopg import sql

from shardids.migrate.compiled import Compiled, Compiler
from shardids.migrate.environment import Environment
from shardids.migrate.hashes import record
from shardids.migrate.migration import Migration
from shardids.migrate.plan import Heads, Route, Start, make_plan, shown_heads
from shardids.migrate.prepared import PreparedRun


def prepare_stamp(
    migration: Migration, revision: str, shards: Sequence[int], *, continue_on_error: bool = False
) -> PreparedRun:
    """Plans to record a revision in the shards' version tables without running it.

    As with Alembic, branches that have nothing to do with it keep what is recorded.

    Raises:
        BadArgument: there is no such revision.
    """
    environment = migration.environment
    target = environment.target(revision, "up")
    if target != "base":
        environment.revision(target)
    moving = migration.moving(shards)
    shards = [shard for shard in shards if shard not in moving]
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
        refused=(
            *moving.values(),
            *(migration.refused_outcome(shard, error, state) for shard, error in troubles.items()),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped:
    """What a version table says once a revision is recorded in it.

    ``hashes`` are those of the code's revisions up to it; ``kept`` the revisions of other branches, of which
    nothing is said.
    """

    heads: Heads
    hashes: Mapping[str, str]
    kept: frozenset[str]

    @classmethod
    def of(cls, environment: Environment, heads: Heads, target: str) -> Self:
        """Returns what a version table at ``heads`` says after it."""
        own = () if target == "base" else (target,)
        others = _apart_from(environment, heads, target)
        return cls(
            heads=tuple(sorted({*own, *others})),
            hashes=hashes_up_to(environment, own),
            kept=frozenset(environment.ancestors(others) - environment.ancestors(own)),
        )


def _apart_from(environment: Environment, heads: Heads, revision: str) -> Heads:
    """Returns the heads of branches that have nothing to do with a revision, or none for ``base``.

    Heads that the code does not have are not among them.
    """
    if revision == "base":
        return ()
    below = environment.ancestors([revision])
    known = [head for head in heads if environment.knows(head) and head not in below]
    return tuple(head for head in known if revision not in environment.ancestors([head]))


def hashes_up_to(environment: Environment, heads: Heads) -> dict[str, str]:
    """Returns the hashes of the code's revisions that a version table at ``heads`` implies."""
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
