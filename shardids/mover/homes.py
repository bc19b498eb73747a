"""Gives a shard that was lost with its node a home: its newest copy, or an empty shard if there is none.

The catalog's journal records the choice first. Then the home's activation is prepared in a transaction, the
placement is switched, and the activation is committed, as in a move: before the switch the home takes no
writes, after it nobody else does.

IDs. What the lost server issued is known from clocks only, as for a promoted standby: the home issues IDs
above all that it and the node's new server know of, and above both clocks, by some ``safety_margin``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring
from shardids.catalog.topology import Node, Placement
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.mover import replication
from shardids.mover.events import Result
from shardids.mover.history import LOSS, Move, Outcome, all_moves
from shardids.mover.journal import Journal
from shardids.mover.losses import held
from shardids.mover.replication import LOCK_FAILURES
from shardids.mover.sides import SESSION, Side
from shardids.views import follow

_LOCK_MS = 10_000
"""How long to wait for those who read the old copy that becomes the home."""


def failover_nodes(placement: Placement, catalog: Catalog, replaced: Node | None = None) -> Nodes:
    """Returns all nodes of a cluster for a failover to work on; ``replaced`` is the new address of one."""
    there = dict(placement.nodes) | ({} if replaced is None else {replaced.name: replaced})
    return Nodes(
        there,
        catalog.url,
        application_name="shardids_failover",
        connections=3,
        durable=True,
        settings=SESSION,
    )


def accept(catalog: Catalog, nodes: Nodes, journal: Journal, home: str) -> tuple[str, ...]:
    """Makes ``home`` the owner of the journal's shard, which is lost. Returns what :func:`complete` does.

    Raises:
        ClusterConflict: the shard does not count as lost, or its copy is gone.
        TooFarAhead: the home's clock is so far behind that it could not issue IDs above all that were issued.
    """
    journal.enter_loss(home)
    try:
        return complete(catalog, nodes, journal)
    except ShardidsError:
        # Whatever has failed is found again; what has no home is lost still.
        with suppress(ShardidsError):
            if not journal.is_placed():
                journal.end("aborted")
        raise


def complete(catalog: Catalog, nodes: Nodes, journal: Journal) -> tuple[str, ...]:
    """Does what is left to do of what the journal's open entry says. Idempotent.

    Returns the schemas to which incomplete copies were renamed, each with its node.
    """
    move = journal.move
    past = [
        one
        for one in all_moves(catalog)
        if one.shard == move.shard and one.step != LOSS and move.source in (one.source, one.target)
    ]
    remains = _Remains(catalog, nodes, past)
    # Before the rest: replication may not write to a copy while it is renamed or becomes the home.
    remains.unsubscribe()
    renamed = _settle(nodes, journal, past)
    remains.unpublish()
    renamed += remains.set_aside(move.shard)
    journal.end("accepted")
    return tuple(renamed)


def resume(catalog: Catalog, journal: Journal) -> Result:
    """Brings an interrupted acceptance to its end, or ends it if the shard has no home yet."""
    move, began = journal.move, time.monotonic()
    outcome: Outcome = "accepted" if journal.is_placed() else "aborted"
    if outcome == "accepted":
        with failover_nodes(catalog.placement(), catalog) as nodes:
            complete(catalog, nodes, journal)
    else:
        journal.end(outcome)
    return Result(
        shard=move.shard,
        source=move.source,
        target=move.target,
        outcome=outcome,
        seconds=time.monotonic() - began,
        stale_views=follow(catalog) if outcome == "accepted" else (),
    )


def _settle(nodes: Nodes, journal: Journal, past: Iterable[Move]) -> list[str]:
    """Activates the shard at its home, and makes that the owner."""
    move = journal.move
    skipped = journal.skipped()
    # A tick that the shard passes over says nothing of where it was before and after it.
    ticks = [
        tick
        for tick in (one.high_water_tick or -1 for one in past)
        if not any(one.first_tick <= tick <= one.last_tick for one in skipped)
    ]
    ticks += [_safe_tick(nodes, name, move.shard) for name in {move.source, move.target}]
    with nodes[move.target].connect() as home, home.begin() as transaction:
        home.execute(text("select set_config('lock_timeout', :ms, true)"), {"ms": str(_LOCK_MS)})
        try:
            bring(home, skipped)
            renamed = _activate(home, move, max(ticks))
        except StatementFailed as error:
            if error.sqlstate in LOCK_FAILURES:
                raise _in_use(nodes, move) from error
            raise
        if not journal.is_placed():
            journal.place_lost(max(ticks))
        transaction.commit()
    return renamed


def _activate(home: Connection, move: Move, tick: int) -> list[str]:
    """Lets the home issue IDs above a tick and take writes, from the COMMIT of its transaction on."""
    home.execute(text("select from shardids.shard where id = :shard for update"), {"shard": move.shard})
    there = held(home, [move.shard]).get(move.shard)
    renamed: list[str] = []
    if there is not None and there.is_active:
        return renamed
    if there is None or not there.is_whole:
        if move.target != move.source:
            raise ClusterConflict(
                f'node "{move.target}" has no whole copy of shard {move.shard} any more',
                hint="Look again with --dry-run.",
            )
        if there is not None and not there.has_schema:
            home.execute(text("delete from shardids.shard where id = :shard"), {"shard": move.shard})
        elif there is not None:
            renamed.append(_renamed(home, move.shard, move.target))
        # Brings Alembic, which a move can do without: a fifth of a second.
        from shardids.install.provision import make_shard  # noqa: PLC0415

        make_shard(home, move.shard)
    home.execute(
        text("select shardids.drop_barriers(:shard), shardids.activate(:shard, :tick)"),
        {"shard": move.shard, "tick": tick},
    )
    return renamed


def _in_use(nodes: Nodes, move: Move) -> ClusterConflict:
    """Returns the error for a copy that others read or write, which names them."""
    with nodes[move.target].connect() as connection:
        who = connection.execute(
            text("""
                select string_agg(distinct format('process %s of role "%s"', a.pid, a.usename), ', ')
                from pg_locks l join pg_stat_activity a using (pid)
                where l.locktype = 'relation' and l.granted and l.database = shardids.database()
                  and l.relation = any (shardids.tables_of(:shard)::oid[]) and l.pid <> pg_backend_pid()"""),
            {"shard": move.shard},
        ).scalar_one()
    return ClusterConflict(
        f'the tables of shard {move.shard} on node "{move.target}" are locked by'
        f" {who or 'a session that has just ended'}",
        hint="Run it again. A session that holds them for long can be ended with pg_terminate_backend(pid).",
    )


def _safe_tick(nodes: Nodes, name: str, shard: int) -> int:
    """Returns a tick above all that a server knows of a shard, and five margins above its clock."""
    with nodes[name].connect() as connection:
        tick: int = connection.execute(_SAFE_TICK, {"shard": shard}).scalar_one()
    return tick


_SAFE_TICK = text("""
    with own as (select s.* from shardids.shard s where s.id = :shard)
    select shardids.safe_tick(
      :shard, (select c.oid::regclass from own join pg_class c on c.oid = own.id_counter),
      (select c.oid::regclass from own join pg_class c on c.oid = own.id_offset))""")


class _Remains:
    """What past moves may have left of a shard on the nodes; those that do not answer are left out."""

    def __init__(self, catalog: Catalog, nodes: Nodes, past: Sequence[Move]) -> None:
        self._cluster = catalog.describe().cluster
        self._nodes = nodes
        self._past = past
        self._silent: set[str] = set()

    def unsubscribe(self) -> None:
        """Drops the moves' subscriptions."""
        for move in self._past:
            self._try(move.target, partial(self._end, move, replication.unsubscribe))

    def unpublish(self) -> None:
        """Drops the moves' slots and publications."""
        for move in self._past:
            self._try(move.source, partial(self._end, move, replication.unpublish))

    def _end(self, move: Move, end: Callable[[Side, str], None], node: str) -> None:
        end(Side(name=node, engine=self._nodes[node]), move.session_name(self._cluster))

    def set_aside(self, shard: int) -> list[str]:
        """Renames incomplete copies; returns their names, each with its node."""
        renamed: list[str] = []

        def rename(node: str) -> None:
            with self._nodes[node].begin() as connection:
                there = held(connection, [shard]).get(shard)
                if there is not None and there.arrived is not None:
                    renamed.append(_renamed(connection, shard, node))

        for name in sorted({move.target for move in self._past}):
            self._try(name, rename)
        return renamed

    def _try(self, node: str, work: Callable[[str], None]) -> None:
        if node in self._nodes and node not in self._silent:
            try:
                work(node)
            except ConnectionFailed:
                self._silent.add(node)


def _renamed(connection: Connection, shard: int, node: str) -> str:
    schema = connection.execute(text("select shardids.set_copy_aside(:shard)"), {"shard": shard}).scalar_one()
    return f'{schema} on node "{node}"'


@contextmanager
def journals(catalog: Catalog, shards: Iterable[int], *, patience_s: float) -> Iterator[dict[int, Journal]]:
    """Yields the journals of shards; waits a while for movers that have not noticed yet that a node is gone.

    Raises:
        ClusterConflict: a shard is being moved still.
    """
    deadline = time.monotonic() + patience_s
    with ExitStack() as kept:
        opened = {}
        for shard in sorted(set(shards)):
            while shard not in opened:
                try:
                    opened[shard] = kept.enter_context(Journal.opened(catalog, shard))
                except ClusterConflict:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
        yield opened
