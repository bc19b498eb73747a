"""Records in the shards' version tables that they are as the code's revisions make them, and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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

    Raises:
        BadArgument: there is no such revision.
    """
    target = migration.environment.target(revision, "up")
    end = () if target == "base" else (migration.environment.revision(target).revision,)
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
    hashes = hashes_up_to(migration.environment, end)
    nodes = {position.node for position in state.positions.values()}
    recorded = {
        shard
        for there in migration.recorded(nodes).all().values()
        for one in there
        if one.hashes == hashes
        for shard in one.shards
    }
    is_recorded = not hashes or recorded >= state.positions.keys()

    def route_from(start: Start) -> Route:
        there = start is not None and start == end and not marked and is_recorded
        revisions = () if there else (f"stamp {shown_heads(end)}",)
        return Route(start=start, end=end, target=target, revisions=revisions)

    return PreparedRun(
        plan=make_plan(positions, route_from, canaries=0),
        compiler=_Stamper(migration.environment, "up"),
        direction="up",
        target=target,
        stop_at_contract=False,
        refused=(
            *moving.values(),
            *(migration.refused_outcome(shard, error, state) for shard, error in troubles.items()),
        ),
    )


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
        hashes = hashes_up_to(self.environment, route.end)
        statements.append(record(self.environment.version_table, None, hashes) + ";")
        return Compiled(route=route, direction="up", way="sql", sql="\n".join(statements))
