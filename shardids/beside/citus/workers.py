"""The workers of Citus: which holds which shard, and moves between them by Citus's own functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from sqlalchemy import Connection, text

from shardids.beside.citus.setup import NODE
from shardids.catalog.leases import Leases, OnBusy
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import unplaced_shard
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, ShardBusy
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import HeldLock

OnWait = Callable[[int, str], None]
"""Receives the number of an attempt to take a shard's lease, and the lease that is in its way."""


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    """A server of Citus that holds shards, as Citus knows it.

    Attributes:
        host: its host name or address.
        port: its port.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, words: str) -> Self:
        """Return the worker that ``host:port`` names.

        Raises:
            BadArgument: it is not of that form.
        """
        host, colon, port = words.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit()):
            raise BadArgument(
                f"{words!r} does not name a worker of Citus",
                hint="Write it as host:port, as in pg_dist_node.",
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        """Name it as commands do."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A shard that moves, or has moved, from one worker to another.

    Attributes:
        seconds: how long Citus took; ``None`` before the move.
    """

    shard: int
    source: Worker
    target: Worker
    seconds: float | None = None

    def row(self) -> dict[str, object]:
        """Return the move as commands show it."""
        took = {} if self.seconds is None else {"seconds": round(self.seconds, 1)}
        return {"shard": self.shard, "from": str(self.source), "to": str(self.target), **took}


PLACED: Final = text("""
    select s.id as shard, w.nodename as host, w.nodeport as port
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    left join pg_dist_schema d on d.schemaid = n.oid
    left join lateral (
      select w.nodename, w.nodeport
      from pg_dist_partition p
      join pg_dist_shard h on h.logicalrelid = p.logicalrelid
      join pg_dist_placement l on l.shardid = h.shardid
      join pg_dist_node w on w.groupid = l.groupid and w.noderole = 'primary'
      where p.colocationid = d.colocationid limit 1) w on true
    order by s.id""")
_WORKERS: Final = text("""
    select n.nodename as host, n.nodeport as port from pg_dist_node n
    where n.noderole = 'primary' and n.isactive and n.shouldhaveshards order by 1, 2""")
# Of the tables of one shard, which move together, any.
_PLAN: Final = text("""
    select distinct on (s.id) s.id as shard, p.sourcename, p.sourceport, p.targetname, p.targetport
    from get_rebalance_table_shards_plan() p
    join pg_class c on c.oid = p.table_name
    join pg_namespace n on n.oid = c.relnamespace
    join shardids.shard s on s.schema = n.nspname
    order by s.id""")
_MOVE: Final = text("""
    select citus_schema_move(cast(quote_ident(s.schema) as regnamespace), :host, :port)
    from shardids.shard s where s.id = :shard""")


def placed_on(catalog: Catalog) -> dict[int, Worker | None]:
    """Return the worker that holds each shard; ``None`` for a shard that has no table on any."""
    with catalog.engine.connect() as connection:
        return read_placed(connection)


def read_placed(connection: Connection) -> dict[int, Worker | None]:
    """Return what :func:`placed_on` does, read in the connection's transaction."""
    return {
        row.shard: None if row.host is None else Worker(row.host, row.port)
        for row in connection.execute(PLACED)
    }


def plan_move(catalog: Catalog, shards: Iterable[int], target: Worker) -> list[Transfer]:
    """Return the moves that bring shards to a worker; those that are there already need none.

    Raises:
        ClusterConflict: the worker does not take shards, or a shard has no table.
        UnknownShard: a shard is on no node.
    """
    with catalog.engine.connect() as connection:
        workers = [Worker(row.host, row.port) for row in connection.execute(_WORKERS)]
        placed = read_placed(connection)
    if target not in workers:
        raise ClusterConflict(
            f"{target} is not a worker of Citus that takes shards",
            hint=f"It has: {', '.join(map(str, workers))}",
        )
    moves = []
    for shard in shards:
        source = placed.get(shard)
        if shard not in placed:
            raise unplaced_shard(shard)
        if source is None:
            raise ClusterConflict(
                f"shard {shard} has no table that is on a worker, so Citus has not placed it",
                hint="See: shardids doctor --checks citus-shard-local",
            )
        if source != target:
            moves.append(Transfer(shard=shard, source=source, target=target))
    return moves


def plan_rebalance(catalog: Catalog) -> list[Transfer]:
    """Return the moves that Citus plans for shards, by its default strategy."""
    with catalog.engine.connect() as connection:
        return [
            Transfer(
                shard=row.shard,
                source=Worker(row.sourcename, row.sourceport),
                target=Worker(row.targetname, row.targetport),
            )
            for row in connection.execute(_PLAN)
        ]


def move(
    catalog: Catalog,
    transfers: Sequence[Transfer],
    *,
    on_busy: OnBusy = OnBusy.WAIT,
    on_begin: Callable[[Transfer], object] = lambda _transfer: None,
    on_wait: OnWait = lambda _attempt, _reason: None,
) -> tuple[list[Transfer], list[str]]:
    """Move shards one after another by ``citus_schema_move``, each under its lease.

    Its sequences stay on the coordinator: the shard issues IDs all the while, and writers wait for as long as
    Citus lets them.

    Returns:
        The moves that are done, and the reasons why others were left out with :attr:`OnBusy.SKIP`.

    Raises:
        ShardBusy: another command has the shard's lease, and ``on_busy`` does not leave it out.
        StatementFailed: Citus refused; this shard and the later ones stay where they are.
    """
    leases = Leases(catalog, "move by Citus")
    lost = ConnectionFailed(
        "the connection to the coordinator was lost, which shows that the command lives",
        hint="Citus may have moved the shard: shardids shard list",
    )
    taken = ShardBusy("another command has the same epoch", hint="Run the command again.")
    done, left = list[Transfer](), list[str]()
    with (
        HeldLock.taken(catalog, AdvisoryLock.LEASE_HOLDER, leases.key, taken=taken, lost=lost),
        Nodes(catalog.nodes(), catalog.url, application_name="shardids move", autocommit=True) as nodes,
        Nodes(catalog.nodes(), catalog.url, application_name="shardids move") as leasing,
    ):
        for one in transfers:
            try:
                with (
                    leases.held({NODE: leasing[NODE]}, one.shard, on_busy=on_busy, on_wait=on_wait),
                    nodes[NODE].connect() as connection,
                ):
                    on_begin(one)
                    begun = time.monotonic()
                    connection.execute(
                        _MOVE, {"shard": one.shard, "host": one.target.host, "port": one.target.port}
                    )
            except ShardBusy as error:
                if on_busy is OnBusy.WAIT or len(transfers) == 1:
                    raise
                left.append(error.in_a_line())
                continue
            done.append(
                Transfer(
                    shard=one.shard,
                    source=one.source,
                    target=one.target,
                    seconds=time.monotonic() - begun,
                )
            )
    return done, left
