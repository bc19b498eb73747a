"""Revisions for the node: what its shards share, run once on each node before its shards' revisions.

They form the branch labelled ``node`` of the application's migrations, and create extensions, shared
types and functions in schema ``public``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from alembic.runtime.migration import RevisionStep
from sqlalchemy import Connection, Engine, text

from shardids.catalog.revisions import SHARED_SCHEMA, read_node_heads
from shardids.errors import ClusterConflict, ShardBusy, ShardidsError, StatementFailed
from shardids.migrate.environment import Environment
from shardids.migrate.plan import Heads, NodeOutcome
from shardids.migrate.player import Limits, require_own_session
from shardids.pg.locks import AdvisoryLock, session_lock
from shardids.pg.queries import quoted

_NO_SHARD: Final = -1
"""Stands for the node in its lock, whose second part is a shard in others."""


def pending_on_node(environment: Environment, heads: Heads) -> list[str]:
    """Return the node revisions that are still to run on a node at ``heads``, in order.

    Raises:
        BadArgument: the code lacks one of ``heads``, or has several heads in the node's branch.
    """
    return [step.revision.revision for step in environment.steps(heads, environment.head(), "up")]


def migrate_node(environment: Environment, name: str, engine: Engine, limits: Limits) -> NodeOutcome:
    """Bring a node to the newest node revision, through Alembic; in one transaction if it can.

    Raises:
        BadArgument: the code lacks the node's revision.
        ClusterConflict: others than its owner may create objects in schema ``public`` there.
        ConnectionFailed: the node is down.
        ShardBusy: another session runs revisions on the node.
    """
    start = read_node_heads(engine, f'node "{name}"')
    if not pending_on_node(environment, start):
        return NodeOutcome(node=name, start=start, end=start, status="done")
    try:
        _run(environment, name, engine, limits)
    except ShardidsError as error:
        if not isinstance(error, StatementFailed):
            raise
        message = error.in_a_line()
    except Exception as error:  # noqa: BLE001 -- a revision can raise anything
        message = f'node "{name}": {type(error).__name__}: {error}'
    else:
        return NodeOutcome(node=name, start=start, end=environment.heads, status="done")
    return NodeOutcome(
        node=name, start=start, end=read_node_heads(engine, f'node "{name}"'), status="failed", error=message
    )


def _run(environment: Environment, name: str, engine: Engine, limits: Limits) -> None:
    def work(there: Heads, _context: object) -> Sequence[RevisionStep]:
        return environment.steps(there, environment.head(), "up")

    with engine.connect() as connection, _locked(connection, name):
        _require_private(connection, name)
        for setting, value in (
            ("lock_timeout", str(limits.lock_timeout_ms)),
            ("statement_timeout", str(limits.statement_timeout_ms)),
            ("search_path", SHARED_SCHEMA),
        ):
            connection.execute(
                text("select set_config(:name, :value, false)"), {"name": setting, "value": value}
            )
        connection.commit()
        connection.execution_options(isolation_level="READ COMMITTED")
        try:
            environment.run(work, connection=connection)
        finally:
            connection.rollback()
            connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def _locked(connection: Connection, name: str) -> Iterator[None]:
    require_own_session(connection, name)
    busy = ShardBusy(
        f'another session is running revisions on node "{name}"',
        hint="Wait until it has ended, and run the migration again.",
    )
    with session_lock(connection, AdvisoryLock.MIGRATE_NODE, _NO_SHARD, taken=lambda: busy):
        yield


def _require_private(connection: Connection, name: str) -> None:
    """Refuse a schema where other roles could plant objects that the shards' revisions would find."""
    strangers: list[str] | None = connection.scalar(text("select shardids.strangers_in_shared_schema()"))
    if strangers is None:
        raise ClusterConflict(
            f'node "{name}" has no schema {SHARED_SCHEMA}',
            hint=f"On that database: CREATE SCHEMA {SHARED_SCHEMA};",
        )
    if strangers:
        shown = ", ".join("every role" if role == "public" else f'role "{role}"' for role in strangers)
        roles = ", ".join("PUBLIC" if role == "public" else quoted(role) for role in strangers)
        raise ClusterConflict(
            f'node "{name}": {shown} may create objects in schema {SHARED_SCHEMA}',
            hint=f"On that database: REVOKE CREATE ON SCHEMA {SHARED_SCHEMA} FROM {roles};",
        )


def require_migrated(environment: Environment, name: str, engine: Engine) -> NodeOutcome | None:
    """Bring a node to the newest node revision, before shards are created on it or moved to it.

    Returns the outcome, or ``None`` if the application has no revisions for nodes.

    Raises:
        StatementFailed: a revision failed. The rest as :func:`migrate_node` does.
    """
    of_nodes = environment.of_nodes()
    if of_nodes is None:
        return None
    outcome = migrate_node(of_nodes, name, engine, Limits())
    if outcome.status == "failed":
        raise StatementFailed(outcome.error, hint="See: shardids migrate status")
    return outcome
