"""The database that a shard lives in, statements there, and locks that nobody has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionFailed, ClusterConflict, StatementFailed
from shardids.ids.layout import Layout
from shardids.mover.journal import alone
from shardids.pg.locks import holders_of_tables, named
from shardids.replication.barrier import until_locked
from shardids.replication.steps import OnEvent, Waiting
from shardids.replication.subscriptions import LOCK_FAILURES

LOCK_MS: Final = 50
"""How long a lock that others would queue behind is waited for, in milliseconds."""
_PATIENCE_S: Final = 120.0
"""How long such a lock is tried for, again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard, and a connection to its owner.

    ``schema``: of the shard. ``next_id``: its function, as SQL writes it. ``state``: active, fenced or moved.
    """

    connection: Connection
    number: int
    node: str
    schema: str
    layout: Layout
    state: str

    @property
    def next_id(self) -> sql.Composable:
        """The call that draws an ID."""
        return sql.SQL("{}()").format(sql.Identifier(self.schema, "next_id"))

    def require_active(self) -> None:
        """Require that the shard issues IDs.

        Raises:
            ClusterConflict: it does not.
        """
        if self.state != "active":
            raise ClusterConflict(
                f'shard {self.number} is not active on node "{self.node}"',
                hint=f"shardids shard list {self.number}",
            )

    def execute(self, statement: sql.Composable | str, **parameters: object) -> Any:
        """Run a statement in the open transaction; ``:name`` in a plain string is a parameter."""
        if isinstance(statement, str):
            return self.connection.execute(text(statement), parameters)
        raw = self.connection.execution_options(no_parameters=True)
        return raw.exec_driver_sql(statement.as_string(None))


@contextmanager
def opened_shard(
    catalog: Catalog,
    shard: int,
    *,
    purpose: str | None = None,
    dry_run: bool = False,
    may_be_fenced: bool = False,
) -> Iterator[Shard]:
    """Yield a shard, which is active unless it may be fenced, and a connection to the node that it lives on.

    With ``purpose``, which names the work to commands that meet it, under the shard's lease.

    Raises:
        UnknownShard: no node owns it, or its owner does not have it.
        ClusterConflict: it does not issue IDs; or, with ``purpose``, a move or an adoption is not over.
        ShardBusy: another command has the shard's lease.
    """
    with ExitStack() as kept:
        if purpose is not None:
            node, connection = kept.enter_context(alone(catalog, shard, purpose, dry_run=dry_run))
        else:
            there = catalog.node_of(shard)
            nodes = kept.enter_context(Nodes({there.name: there}, catalog.url, connections=2))
            node, connection = there.name, kept.enter_context(nodes[there.name].connect())
        row = connection.execute(
            text("select schema, state from shardids.shard where id = :shard"), {"shard": shard}
        ).one_or_none()
        connection.rollback()
        if row is None:
            raise ClusterConflict(
                f'shard {shard} is not on node "{node}"', hint=f"shardids shard list {shard}"
            )
        its = Shard(
            connection=connection,
            number=shard,
            node=node,
            schema=row.schema,
            layout=catalog.describe().layout,
            state=row.state,
        )
        if not (may_be_fenced and row.state == "fenced"):
            its.require_active()
        yield its


def with_short_locks(
    shard: Shard, what: str, work: Callable[[], None], *, tables: Sequence[str], on_event: OnEvent
) -> None:
    """Run ``work`` in a transaction that waits at most 50 ms for all its locks; tries until it gets them.

    ``what`` and ``tables`` are for messages: whose locks stand in the way. ``on_event`` receives the attempts
    that failed.

    Raises:
        AdoptionFailed: not within two minutes; nothing was changed.
    """

    def take() -> None:
        with shard.connection.begin():
            shard.execute(f"set local lock_timeout = '{LOCK_MS}ms'")
            work()

    def wait(attempt: int) -> None:
        reason = f"{what}: waiting for {_holders(shard, tables)}"
        on_event(Waiting(attempt=attempt, reason=reason))

    try:
        until_locked(take, wait, patience_s=_PATIENCE_S)
    except StatementFailed as error:
        if error.sqlstate not in LOCK_FAILURES:
            raise
        raise AdoptionFailed(
            f"{what}: no lock on {', '.join(tables)} within {_PATIENCE_S:.0f} s; held by"
            f" {_holders(shard, tables)}",
            hint="Run the command again when those transactions have ended.",
        ) from error


def _holders(shard: Shard, tables: Sequence[str]) -> str:
    with shard.connection.begin():
        return named(holders_of_tables(shard.connection, tables), "short transactions")


def unable_to_draw(shard: Shard, roles: Sequence[int]) -> list[str]:
    """Return those of the roles, by OID, that can't draw from the shard; 0 is PUBLIC, which never can."""
    found = shard.execute(
        """select case when r.oid = 0 then 'PUBLIC' else pg_get_userbyid(r.oid)::text end
           from unnest(:roles ::oid[]) r (oid), shardids.shard s
           where s.id = :shard and (r.oid = 0 or not (
             has_function_privilege(r.oid, format('%I.next_id()', s.schema)::regprocedure, 'execute')
             and has_function_privilege(
               r.oid, format('%I.late_id_%s(regclass)', s.schema, s.id)::regprocedure, 'execute')
             and has_sequence_privilege(r.oid, s.id_counter, 'usage')
             and has_sequence_privilege(r.oid, s.id_offset, 'select')
             and has_schema_privilege(r.oid, 'shardids', 'usage')))
           order by 1""",
        roles=list(roles),
        shard=shard.number,
    )
    return [str(name) for name in found.scalars()]
