"""Takes one shard along its route, over one connection to its node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic.runtime.migration import RevisionStep
from sqlalchemy import Connection, Engine, text

from shardids.catalog.locks import AdvisoryLock
from shardids.errors import ClusterConflict, ShardBusy
from shardids.migrate.compiled import Compiled, Part, Stage
from shardids.migrate.environment import Direction, Environment
from shardids.migrate.mend import if_still_needed, is_concurrent
from shardids.migrate.plan import Heads, Position, Start
from shardids.migrate.statements import Limits, enter, enter_session, mark


class Player:
    """Plays routes on the shards of one node; not to be shared by threads.

    Args:
        engine: of the node, see :func:`shardids.migrate.state.migration_engine`.
        environment: for routes that need Alembic.
        limits: for every statement but those that are CONCURRENTLY, which block nobody while they wait.
    """

    def __init__(self, engine: Engine, environment: Environment, limits: Limits) -> None:
        self._engine = engine
        self._environment = environment
        self._limits = limits
        self._open: Connection | None = None

    def close(self) -> None:
        """Gives the connection back."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def play(self, position: Position, compiled: Compiled) -> None:
        """Runs a route on a shard.

        Raises:
            RevisionChanged: the shard is not at the route's start any more; nothing was changed.
            ShardBusy: another session migrates it.
            ClusterConflict: it is half way through another revision, or this one was changed since.
            ShardidsError: a statement failed; what its transaction did is undone.
        """
        if compiled.way == "sql" and position.unfinished is None:
            self._send(self._enter(position.shard, position.heads) + compiled.sql)
            return
        with self._locked(self._connection(), position):
            if compiled.way == "alembic":
                finished_parts(position, compiled)
                self._run_alembic(position.shard, position.heads, compiled, only_first=False)
            else:
                self._play_parts(position, compiled)

    def reread(self, position: Position) -> Position:
        """The shard's position as it is now."""
        row = self._connection().execute(
            text("select revisions, unfinished from shardids.revisions(:table) where shard = :shard"),
            {"table": self._environment.version_table, "shard": position.shard},
        ).one()  # fmt: skip
        heads = None if row.revisions is None else tuple(row.revisions)
        return Position(shard=position.shard, node=position.node, heads=heads, unfinished=row.unfinished)

    def _connection(self) -> Connection:
        if self._open is None or self._open.closed or self._open.invalidated:
            self.close()
            self._open = self._engine.connect()
        return self._open

    def _send(self, statements: str) -> None:
        # Several statements in one message are one transaction; a % in them is no placeholder.
        self._connection().execution_options(no_parameters=True).exec_driver_sql(statements)

    def _enter(self, shard: int, expected: Start) -> str:
        return enter(shard, self._environment.version_table, expected, self._limits) + ";\n"

    @contextmanager
    def _locked(self, connection: Connection, position: Position) -> Iterator[None]:
        """Holds the shard's lock over several transactions.

        It is tried, never waited for: a waiting statement has a snapshot, which CREATE INDEX CONCURRENTLY
        in the session that holds the lock would wait for in turn.
        """
        lock = {"class": AdvisoryLock.MIGRATE, "shard": position.shard}
        if not connection.scalar(text("select pg_try_advisory_lock(:class, :shard)"), lock):
            raise ShardBusy(
                f'shard {position.shard} is being migrated by another session [node "{position.node}"]',
                hint="Wait until it has ended, and run the migration again.",
            )
        try:
            yield
        finally:
            if not connection.closed and not connection.invalidated:
                connection.execute(text("select pg_advisory_unlock(:class, :shard)"), lock)

    def _play_parts(self, position: Position, compiled: Compiled) -> None:
        heads = position.heads
        done = finished_parts(position, compiled)
        if compiled.preface:
            self._send(self._enter(position.shard, heads) + compiled.preface)
            heads = ()
        for stage in compiled.stages:
            if stage.reason:
                self._run_alembic(position.shard, heads, compiled, only_first=True)
            else:
                self._play_stage(position.shard, heads, compiled.direction, stage, done)
            heads, done = stage.end, None

    def _play_stage(
        self, shard: int, heads: Start, direction: Direction, stage: Stage, done: int | None
    ) -> None:
        for number, part in enumerate(stage.parts):
            if number < (done or 0):
                continue
            if part.in_transaction:
                rest = self._mark(direction, stage, number + 1)
                self._send(self._enter(shard, heads) + part.sql + rest)
            else:
                if number == 0 and done is None:
                    self._send(self._enter(shard, heads) + self._mark(direction, stage, 0))
                self._play_outside(shard, part, resumed=number == done)
                self._send(self._enter(shard, heads) + self._mark(direction, stage, number + 1))

    def _mark(self, direction: Direction, stage: Stage, count: int) -> str:
        return "\n" + mark(self._environment.version_table, direction, stage, count)

    def _play_outside(self, shard: int, part: Part, *, resumed: bool) -> None:
        self._send(enter_session(shard, self._limits, waits=is_concurrent(part.sql)))
        self._send(if_still_needed(part.sql) if resumed else part.sql)

    def _run_alembic(self, shard: int, heads: Start, compiled: Compiled, *, only_first: bool) -> None:
        """Has Alembic run the route from ``heads`` on, or its first step; in one transaction if it can."""
        connection = self._connection()
        connection.exec_driver_sql(enter_session(shard, self._limits, waits=False))
        connection.commit()
        connection.execution_options(isolation_level="READ COMMITTED")

        def work(there: Heads, _context: object) -> list[RevisionStep]:
            steps = self._environment.steps(there, compiled.route.target, compiled.direction)
            return steps[:1] if only_first else steps

        try:
            self._environment.run(
                work,
                connection=connection,
                opening=lambda: connection.exec_driver_sql(self._enter(shard, heads)),
            )
        finally:
            connection.rollback()
            connection.execution_options(isolation_level="AUTOCOMMIT")


def finished_parts(position: Position, compiled: Compiled) -> int | None:
    """How many parts of the route's first revision the shard has behind it; ``None`` if it was not begun.

    Raises:
        ClusterConflict: the shard is half way through another revision, or this one was changed since.
    """
    if position.unfinished is None:
        return None
    direction, revision, count, digest = (position.unfinished.split(" ") + [""] * 4)[:4]
    stage = compiled.stages[0] if compiled.stages else None
    if stage is not None and (direction, revision) == (compiled.direction, stage.revision):
        done = int(count)
        if done < len(stage.parts) and stage.digest(done) == digest:
            return done
        what = f"revision {revision}, which was changed since"
    else:
        what = f"revision {revision} ({direction})"
    raise ClusterConflict(
        f'shard {position.shard} is half way through {what} [node "{position.node}"]',
        hint=f"Run just that revision as it was: shardids migrate {direction} …; or put the shard right by"
        " hand, and say so with: shardids migrate stamp",
    )
