"""Marks in the logs of all nodes, at a moment between the decisions of transactions on several of them.

While ``shardids.decision`` of every node is locked against inserts, no such transaction is decided. Those
that are decided already are committed where they are still prepared. Then no transaction is half committed,
and each server gets its restore point. Decisions wait meanwhile; other statements, and COMMITs on one node,
do not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.catalog.losses import unsettled
from shardids.catalog.nodes import Nodes
from shardids.catalog.prepared import all_of, read_prepared
from shardids.catalog.rows import Catalog
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    MissingPrivilege,
    ShardidsError,
    StatementFailed,
    UnsupportedServer,
)
from shardids.tables.transactions.resolver import (
    APPLICATION_NAME,
    Decision,
    end_decided,
    open_nodes,
    read_decisions,
)

WITHIN_S: Final = 10.0
"""How long decisions may be kept waiting."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,62}")
_LOCK_NOT_AVAILABLE: Final = "55P03"
_FACTS: Final = """
    select (select system_identifier from pg_control_system()) as server,
           has_function_privilege('pg_create_restore_point(text)', 'execute') as may_create,
           current_setting('wal_level') as wal_level, pg_is_in_recovery() as is_standby,
           current_user as role"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """A restore point on all servers.

    Attributes:
        name: what ``recovery_target_name`` has to be.
        positions: where it is in the log of each server, by the name of a node there, or ``catalog``. Nodes
            on one server have one log.
        held_s: how long decisions had to wait, in seconds.
    """

    name: str
    positions: Mapping[str, str]
    held_s: float


def create_restore_point(
    catalog: Catalog, name: str, *, within_s: float = WITHIN_S, dry_run: bool = False
) -> RestorePoint:
    """Create a restore point of one name on the servers of all nodes and of the catalog.

    With ``dry_run`` it does all but create the points.

    Raises:
        BadArgument: the name is not allowed.
        ClusterConflict: a shard is being moved, or was meanwhile; or what is decided could not be ended
            within ``within_s`` seconds. If points have been created the message says so: don't use them.
        MissingPrivilege: the role may not create restore points; the hint has the GRANT.
        ConnectionFailed, UnsupportedServer: a node cannot be asked, is a standby, or writes too little WAL.
    """
    if not _NAME.fullmatch(name):
        raise BadArgument(
            f"{name!r} can't be a restore point's name: it takes 1 to 63 of A-Z, a-z, 0-9 and _ . : + -"
        )
    cluster, version = catalog.describe().cluster, _version_at_rest(catalog)
    with (
        Nodes(catalog.nodes(), catalog.url, application_name=APPLICATION_NAME) as holders,
        open_nodes(catalog) as nodes,
        ExitStack() as stack,
    ):
        held = {node: stack.enter_context(holders[node].connect()) for node in holders}
        at_catalog = stack.enter_context(catalog.engine.connect())
        servers = _servers({**held, "catalog": at_catalog})
        begun = time.monotonic()
        with _decisions_waiting(held, begun + within_s):
            _finish(nodes, cluster, begun + within_s)
            positions = {
                where: "" if dry_run else _create(connection, name) for where, connection in servers.items()
            }
            held_s = time.monotonic() - begun
    if _version_at_rest(catalog) != version:
        raise ClusterConflict(
            f"shards were placed elsewhere while restore point {name!r} was created: don't restore to it",
            hint="Create another, under another name.",
        )
    return RestorePoint(name=name, positions=positions, held_s=held_s)


def _version_at_rest(catalog: Catalog) -> int:
    """Return the placement's version; refuse while a shard is being moved."""
    with catalog.engine.connect() as connection:
        moving = unsettled(connection)
        version = connection.scalar(text("select version from shardids_catalog.cluster"))
    if moving:
        raise ClusterConflict(
            f"shard {moving[0]} is being moved: a restored cluster could not go on with the move",
            hint="Wait until the move is over, or undo it: shardids shard move --list",
        )
    return int(version or 0)


def _servers(connections: Mapping[str, Connection]) -> dict[str, Connection]:
    """Return one connection for each server, when all of them can have a restore point."""
    servers: dict[int, tuple[str, Connection]] = {}
    for name, connection in connections.items():
        where = name if name == "catalog" else f'node "{name}"'
        facts = connection.execute(text(_FACTS)).one()
        connection.rollback()
        if facts.is_standby or facts.wal_level == "minimal":
            what = "is a standby" if facts.is_standby else "has wal_level = minimal"
            raise UnsupportedServer(f"{where} {what}, so it can't have a restore point")
        if not facts.may_create:
            raise MissingPrivilege(
                f'{where}: role "{facts.role}" may not create restore points',
                hint="As a superuser there:"
                f' GRANT EXECUTE ON FUNCTION pg_create_restore_point(text) TO "{facts.role}"',
            )
        servers.setdefault(facts.server, (name, connection))
    return dict(servers.values())


@contextmanager
def _decisions_waiting(held: Mapping[str, Connection], deadline: float) -> Iterator[None]:
    """Keep the nodes' decisions waiting, when those under way are over."""
    with ExitStack() as stack:
        for name, connection in held.items():
            transaction = connection.begin()
            stack.callback(transaction.rollback)
            left_ms = max(1, int((deadline - time.monotonic()) * 1000))
            connection.exec_driver_sql(f"set local lock_timeout = {left_ms}")
            try:
                connection.exec_driver_sql("lock table shardids.decision in share mode")
            except StatementFailed as error:
                if error.sqlstate != _LOCK_NOT_AVAILABLE:
                    raise
                raise ClusterConflict(
                    f'node "{name}": a decision is under way for too long; no restore point was created',
                    hint="Find its session in pg_locks, by relation shardids.decision, and end it.",
                ) from error
        yield


def _finish(nodes: Nodes, cluster: UUID, deadline: float) -> None:
    """Commit transactions that are decided and still prepared, until none is left."""
    pause = _pauses(deadline)
    while True:
        found = all_of(read_prepared(nodes, cluster).all().values())
        decisions, failures = read_decisions(nodes, found)
        for error in failures.values():
            raise error
        ours = [(one, one.gid) for one in found if one.gid is not None]
        for one, gid in ours:
            if (gid.decider, gid.transaction) not in decisions:
                raise ClusterConflict(
                    f'{one.name} is prepared on node "{one.node}", and node "{gid.decider}", which decides'
                    " on it, is not in the catalog; no restore point was created",
                    hint="To see it: shardids transactions",
                )
        decided = [o for o, gid in ours if decisions[gid.decider, gid.transaction] is Decision.COMMIT]
        if not decided:
            return
        left = [outcome for outcome in end_decided(nodes, decided, decisions) if outcome.result == "left"]
        if left and not pause():
            raise ClusterConflict(
                f'{left[0].prepared.name} is decided, but still prepared on node "{left[0].prepared.node}":'
                f" {left[0].reason}; no restore point was created",
                hint="To end it: shardids transactions --resolve",
            ) from left[0].error


def _pauses(deadline: float) -> Callable[[], bool]:
    def pause() -> bool:
        time.sleep(0.01)
        return time.monotonic() < deadline

    return pause


def _create(connection: Connection, name: str) -> str:
    try:
        position = connection.scalar(text("select pg_create_restore_point(:name)"), {"name": name})
    except ShardidsError as error:
        raise ClusterConflict(
            f"restore point {name!r} was not created on all servers: {error.message}; don't restore to it",
            hint="Create another, under another name.",
        ) from error
    return str(position)
