"""The database that a shard lives in, statements there, and locks that nobody has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionFailed, ClusterConflict, StatementFailed
from shardids.ids.layout import Layout

LOCK_MS: Final = 50
"""How long a lock that others would queue behind is waited for, in milliseconds."""
_PATIENCE_S: Final = 120.0
"""How long such a lock is tried for, again and again."""
_PAUSE_S: Final = 0.2
"""How long writers are left alone after a lock was not to be had."""
_BUSY: Final = ("55P03", "40P01", "57014")
"""lock_not_available, deadlock_detected, query_canceled: by lock_timeout, or by statement_timeout."""

OnWait = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard, and a connection to its owner.

    ``schema``: of the shard. ``next_id``: its function, as SQL writes it.
    """

    connection: Connection
    number: int
    node: str
    schema: str
    layout: Layout

    @property
    def next_id(self) -> sql.Composable:
        """The call that draws an ID."""
        return sql.SQL("{}()").format(sql.Identifier(self.schema, "next_id"))

    def execute(self, statement: sql.Composable | str, **parameters: object) -> Any:
        """Runs a statement in the open transaction; ``:name`` in a plain string is a parameter."""
        if isinstance(statement, str):
            return self.connection.execute(text(statement), parameters)
        raw = self.connection.execution_options(no_parameters=True)
        return raw.exec_driver_sql(statement.as_string(None))


@contextmanager
def opened_shard(catalog: Catalog, shard: int) -> Iterator[Shard]:
    """Yields a shard, which is active, and a connection to the node that it lives on.

    Raises:
        UnknownShard: no node owns it, or its owner does not have it.
        ClusterConflict: it does not issue IDs.
    """
    node = catalog.node_of(shard)
    with (
        Nodes({node.name: node}, catalog.url, connections=2) as nodes,
        nodes[node.name].connect() as connection,
    ):
        row = connection.execute(
            text("select schema, state from shardids.shard where id = :shard"), {"shard": shard}
        ).one_or_none()
        connection.rollback()
        if row is None or row.state != "active":
            raise ClusterConflict(
                f'shard {shard} is not active on node "{node.name}"', hint=f"shardids shard show {shard}"
            )
        yield Shard(
            connection=connection,
            number=shard,
            node=node.name,
            schema=row.schema,
            layout=catalog.describe().layout,
        )


def with_short_locks(
    shard: Shard, what: str, work: Callable[[], T], *, tables: Sequence[str], on_wait: OnWait
) -> T:
    """Runs ``work`` in a transaction that waits at most 50 ms for all its locks; tries until it gets them.

    ``what`` and ``tables`` are for messages: whose locks stand in the way. ``on_wait`` hears of each attempt
    that failed.

    Raises:
        AdoptionFailed: not within two minutes; nothing was changed.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with shard.connection.begin():
                shard.execute(f"set local lock_timeout = '{LOCK_MS}ms'")
                return work()
        except StatementFailed as error:
            if error.sqlstate not in _BUSY:
                raise
        holders = _holders(shard, tables)
        if time.monotonic() > deadline:
            raise AdoptionFailed(
                f"{what}: no lock on {', '.join(tables)} within {_PATIENCE_S:.0f} s; held by {holders}",
                hint="Run the command again when those transactions have ended.",
            )
        on_wait(f"{what}: waiting for {holders}")
        time.sleep(_PAUSE_S)


def _holders(shard: Shard, tables: Sequence[str]) -> str:
    with shard.connection.begin():
        found = shard.execute(
            """select distinct coalesce(
                 (select format('process %s of role "%s", %s for %s s', a.pid, a.usename, a.state,
                                round(extract(epoch from clock_timestamp() - a.xact_start)))
                  from pg_stat_activity a where a.pid = l.pid),
                 (select format('prepared transaction %L', p.gid) from pg_prepared_xacts p
                  where l.pid is null and p.database = current_database() limit 1))
               from pg_locks l
               where l.granted and l.relation = any (:tables ::regclass[]::oid[])
                 and l.database = (select oid from pg_database where datname = current_database())
                 and l.pid is distinct from pg_backend_pid()""",
            tables=list(tables),
        ).scalars()
        return ", ".join(sorted(one for one in found if one)[:5]) or "short transactions"


def unable_to_draw(shard: Shard, roles: Sequence[int]) -> list[str]:
    """Returns those of the roles, by OID, that can't draw from the shard; 0 is PUBLIC, which never can."""
    found = shard.execute(
        """select case when r.oid = 0 then 'PUBLIC' else pg_get_userbyid(r.oid)::text end
           from unnest(:roles ::oid[]) r (oid), shardids.shard s
           where s.id = :shard and (r.oid = 0 or not (
             has_function_privilege(r.oid, format('%I.next_id()', s.schema)::regprocedure, 'execute')
             and has_function_privilege(
               r.oid, format('%I.late_id(regclass)', s.schema)::regprocedure, 'execute')
             and has_sequence_privilege(r.oid, s.id_counter, 'usage')
             and has_sequence_privilege(r.oid, s.id_offset, 'select')
             and has_schema_privilege(r.oid, 'shardids', 'usage')))
           order by 1""",
        roles=list(roles),
        shard=shard.number,
    )
    return [str(name) for name in found.scalars()]
