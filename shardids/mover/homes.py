"""Homes of shards that were lost with their node: the newest copy, or an empty shard without one.

The home's activation is prepared in a transaction, the placement is switched and the loss recorded, and the
activation is committed, as in a move: before the switch the home takes no writes, after it no other node
does. All of it happens under the shard's lease, on the home and on the node's new server.

IDs. The last ID of the lost server is known from clocks only, as for a promoted standby: the home issues IDs
above all that it and the node's new server know of, and above both clocks, by some ``safety_margin``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine, text

from shardids.catalog.leases import FAILOVER, Leases
from shardids.catalog.losses import Arrival, Loss, accept_loss, complete_loss, open_losses
from shardids.catalog.moves import Move, read_moves
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import require_no_issuer
from shardids.catalog.skipped import bring, read_skipped
from shardids.catalog.topology import Node, Placement
from shardids.errors import ClusterConflict, ConnectionFailed, StatementFailed
from shardids.pg.locks import AdvisoryLock, holders_of_tables, named
from shardids.replication import subscriptions
from shardids.replication.barrier import HeldLock
from shardids.replication.sides import SESSION, Side
from shardids.replication.subscriptions import LOCK_FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A shard's row in ``shardids.shard`` of a node."""

    shard: int
    state: str
    moved_to: str | None
    arrived: str | None
    high_water_tick: int
    is_own: bool
    has_schema: bool

    @property
    def is_whole(self) -> bool:
        """Returns whether this is a copy with all rows of its time, and not one that a move had begun."""
        return self.arrived is None and self.has_schema

    @property
    def is_active(self) -> bool:
        """Returns whether it may issue IDs: one whose schema was dropped has no sequences to draw from."""
        return self.state == "active" and self.has_schema


_HELD = text("""
    select s.id as shard, s.state, s.moved_to, s.arrived, s.high_water_tick,
           coalesce(s.server = shardids.server(), false) as is_own,
           to_regnamespace(quote_ident(s.schema)) is not null as has_schema
    from shardids.shard s where s.id = any (:shards)""")


def held(connection: Connection, shards: Collection[int]) -> dict[int, Held]:
    """Return the rows of these shards on a node."""
    rows = connection.execute(_HELD, {"shards": sorted(shards)})
    return {row.shard: Held(**row._asdict()) for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A whole copy of a shard that issues no IDs; ``departure`` is the move that left it behind, if known."""

    node: str
    high_water_tick: int
    departure: Arrival | None

    @property
    def age(self) -> tuple[int, int]:
        """Returns a key that is greater for newer copies; a fence raises ticks, so those come second."""
        return (self.departure.id if self.departure else 0, self.high_water_tick)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShard:
    """A shard that the server which took over its node does not have as it was.

    Attributes:
        shard: its number.
        node: the node that it was lost with.
        reason: the fault of its copy on the new server.
        copy: the newest whole copy on the nodes that answer; ``None`` without one.
        silent: nodes that do not answer and may have a newer copy.
        active_on: another node on which it is active, against the placement.
    """

    shard: int
    node: str
    reason: str
    copy: Copy | None
    silent: tuple[str, ...] = ()
    active_on: str | None = None

    @property
    def home(self) -> str:
        """Returns the node that is its home once the loss is accepted."""
        return self.node if self.copy is None else self.copy.node

    def remains(self) -> str:
        """Return its remains, as a sentence without a full stop."""
        if self.copy is None:
            left = "no node has a copy of it, so it would be empty"
        elif self.copy.departure is None:
            left = f'node "{self.copy.node}" has an old copy of it'
        else:
            at = self.copy.departure.at
            left = f'node "{self.copy.node}" has it as it was when it left there ({at:%Y-%m-%d %H:%M:%S %Z})'
        if self.silent:
            names = ", ".join(f'"{name}"' for name in self.silent)
            left += f"; a newer copy may be on node {names}, which does not answer"
        return left


def last_arrivals(arrivals: Iterable[Arrival], node: str) -> dict[int, Arrival]:
    """Return how each shard last came to a node."""
    return {arrival.shard: arrival for arrival in arrivals if arrival.node == node}


def why_lost(
    there: Mapping[int, Held],
    placement: Placement,
    node: str,
    arrived_by: Mapping[int, Arrival],
    leaving: Mapping[int, str],
) -> dict[int, str]:
    """Return the shards that a server does not have as their owner node had them, and why.

    An activation raises the row's high-water tick, and so does a fence: a row with a lower one than the
    shard came with is from before it came.

    Args:
        there: the shards of the server.
        placement: the placement.
        node: the node whose place the server takes.
        arrived_by: see :func:`last_arrivals`.
        leaving: where open moves take shards from there.
    """
    reasons = {}
    for shard, name in placement.owners().items():
        row, arrival = there.get(shard), arrived_by.get(shard)
        if name != node:
            continue
        if row is None or not row.has_schema:
            reasons[shard] = "it is not there"
        elif row.arrived is not None:
            reasons[shard] = (
                "there is an incomplete copy of it, from before the move that brought it was over"
            )
        elif arrival is not None and row.high_water_tick < arrival.high_water_tick:
            reasons[shard] = "there is an old copy of it, from before it was moved there"
        elif row.state == "moved" and row.moved_to != leaving.get(shard):
            reasons[shard] = f'it is marked as moved to node "{row.moved_to}" there'
        elif row.state != "active" and shard in placement.lost:
            reasons[shard] = f"it is {row.state} there"
    return reasons


def examine(
    nodes: Nodes, node: str, reasons: Mapping[int, str], arrivals: Sequence[Arrival]
) -> list[LostShard]:
    """Look for copies of lost shards on all nodes; ``reasons`` is what :func:`why_lost` returned."""
    if not reasons:
        return []

    def ask(_name: str, engine: Engine) -> Mapping[int, Held]:
        with engine.connect() as connection:
            return held(connection, reasons)

    answers = nodes.each(ask)
    arrived_by = last_arrivals(arrivals, node)
    found = []
    for shard, reason in sorted(reasons.items()):
        rows = {name: there[shard] for name, there in answers.results.items() if shard in there}
        copies = [
            Copy(node=name, high_water_tick=row.high_water_tick, departure=_departure(arrivals, shard, name))
            for name, row in rows.items()
            if row.is_whole and (row.state != "active" or name == node)
        ]
        newest = max(copies, key=lambda copy: copy.age, default=None)
        found.append(
            LostShard(
                shard=shard,
                node=node,
                reason=reason,
                copy=newest,
                silent=() if _is_last(newest, arrived_by.get(shard)) else tuple(sorted(answers.failures)),
                active_on=next((n for n, row in rows.items() if row.state == "active" and n != node), None),
            )
        )
    return found


def _departure(arrivals: Iterable[Arrival], shard: int, node: str) -> Arrival | None:
    """Return the move that last took a shard from a node to another."""
    taken = [one for one in arrivals if one.shard == shard and one.source == node and one.is_moved]
    return taken[-1] if taken else None


def _is_last(copy: Copy | None, arrival: Arrival | None) -> bool:
    """Return whether a copy was left by the move that last brought the shard to the lost node."""
    if copy is None or arrival is None:
        return False
    return copy.departure == arrival and copy.high_water_tick >= arrival.high_water_tick


LOCK_MS: Final = 10_000
"""How long a command waits for sessions that use tables which it has to lock."""

T = TypeVar("T")


def failover_nodes(placement: Placement, catalog: Catalog, replaced: Node | None = None) -> Nodes:
    """Return all nodes of a cluster for a failover to work on; ``replaced`` is the new address of one."""
    there = dict(placement.nodes) | ({} if replaced is None else {replaced.name: replaced})
    return Nodes(
        there,
        catalog.url,
        application_name="shardids_failover",
        connections=3,
        durable=True,
        settings=SESSION,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """The homes that one command gives to lost shards, under their leases. :meth:`opened` makes it.

    ``held`` is the lock of the catalog that shows that the command lives.
    """

    catalog: Catalog
    nodes: Nodes
    held: HeldLock
    leases: Leases

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog, nodes: Nodes) -> Iterator[Homes]:
        """Yield it, and release its lock afterwards."""
        leases = Leases(catalog, FAILOVER)
        lost = ConnectionFailed(
            "the connection to the catalog was lost while a node was replaced",
            hint="When the catalog answers again, repeat the command.",
        )
        lock = AdvisoryLock.LEASE_HOLDER
        with HeldLock.taken(
            catalog, lock, leases.key, taken=lost, lost=lost, name="shardids_failover"
        ) as held:
            yield cls(catalog=catalog, nodes=nodes, held=held, leases=leases)

    def give(self, shard: int, *, lost_with: str, home: str) -> list[str]:
        """Make ``home`` the owner of a lost shard, or complete that. Idempotent.

        Returns the new names of incomplete copies, each with its node.

        Raises:
            ClusterConflict: the shard does not count as lost, or its copy is gone.
            ShardBusy: another command has the shard's lease.
            TooFarAhead: the home's clock is so far behind that it could not issue IDs above all that were
                issued.
        """
        with self.leases.held(
            {name: self.nodes[name] for name in {lost_with, home}},
            shard,
            takes_over=True,
            is_kept=lambda: self._is_kept(shard),
        ):
            with self.held.transaction() as journal:
                moves = read_moves(journal, [shard], ended=True)
            past = [move for move in moves if lost_with in (move.source, move.target)]
            sources, targets = {move.source for move in past}, {move.target for move in past}
            names = [move.session_name(self.catalog.describe().cluster) for move in past]
            # Before the rest: replication may not write to a copy while it is renamed or becomes the home.
            self._where_it_answers(targets, partial(_end, subscriptions.unsubscribe, names))
            renamed = self._settle(shard, lost_with, home, past)
            self._where_it_answers(sources, partial(_end, subscriptions.unpublish, names))
            renamed += self._where_it_answers(targets, partial(_set_aside, shard))
            with self.held.transaction() as journal:
                complete_loss(journal, shard)
        return renamed

    def _where_it_answers(self, nodes: Iterable[str], work: Callable[[Side], Sequence[T]]) -> list[T]:
        """Do something on those of the nodes that are still there and answer; return all that it returned."""
        found = self.nodes.each(
            lambda name, engine: work(Side(name=name, engine=engine)), self.nodes.keys() & nodes
        )
        for error in found.failures.values():
            if not isinstance(error, ConnectionFailed):
                raise error
        return [one for name in sorted(found.results) for one in found.results[name]]

    def open(self) -> list[Loss]:
        """Return the losses whose home is not complete."""
        with self.catalog.engine.connect() as connection:
            return open_losses(connection)

    def _is_kept(self, shard: int) -> bool:
        """Return whether the shard's home is not complete; also if the catalog does not answer."""
        try:
            return shard in [loss.shard for loss in self.open()]
        except ConnectionFailed:
            return True

    def _settle(self, shard: int, lost_with: str, home: str, past: Iterable[Move]) -> list[str]:
        """Activate the shard at its home, and make that the owner."""
        with self.held.transaction() as journal:
            skipped = read_skipped(journal, "shardids_catalog", [shard])
        # A tick that the shard passes over says nothing of where it was before and after it.
        ticks = [
            tick
            for tick in (one.high_water_tick or -1 for one in past)
            if not any(one.first_tick <= tick <= one.last_tick for one in skipped)
        ]
        ticks += [_safe_tick(self.nodes, name, shard) for name in {lost_with, home}]
        with self.nodes[home].connect() as connection, connection.begin() as transaction:
            connection.execute(
                text("select set_config('lock_timeout', :ms, true), shardids.require_lease(:shard, :epoch)"),
                {"ms": str(LOCK_MS), "shard": shard, "epoch": self.leases.epoch},
            )
            try:
                bring(connection, skipped)
                renamed = _activate(connection, shard, home, max(ticks), may_be_empty=home == lost_with)
            except StatementFailed as error:
                if error.sqlstate in LOCK_FAILURES:
                    raise in_use(self.nodes, shard, home) from error
                raise
            with self.held.transaction() as journal:
                if shard not in [loss.shard for loss in open_losses(journal)]:
                    accept_loss(
                        journal,
                        shard,
                        node=lost_with,
                        home=home,
                        high_water_tick=max(ticks),
                        epoch=self.leases.epoch,
                    )
            transaction.commit()
        return renamed


def _activate(home: Connection, shard: int, node: str, tick: int, *, may_be_empty: bool) -> list[str]:
    """Let the home issue IDs above a tick and take writes, from the COMMIT of its transaction on."""
    home.execute(text("select from shardids.shard where id = :shard for update"), {"shard": shard})
    there = held(home, [shard]).get(shard)
    renamed: list[str] = []
    if there is not None and there.is_active:
        return renamed
    if there is None or not there.is_whole:
        if not may_be_empty:
            raise ClusterConflict(
                f'node "{node}" has no whole copy of shard {shard} any more',
                hint="Look again with --dry-run.",
            )
        if there is not None and not there.has_schema:
            home.execute(text("delete from shardids.shard where id = :shard"), {"shard": shard})
        elif there is not None:
            renamed.append(_renamed(home, shard, node))
        # Brings Alembic, which a move can do without: a fifth of a second.
        from shardids.migrate.install.provision import make_shard  # noqa: PLC0415

        make_shard(home, shard)
    require_no_issuer(home, shard, node)
    home.execute(
        text("select shardids.drop_barriers(:shard), shardids.activate(:shard, :tick)"),
        {"shard": shard, "tick": tick},
    )
    return renamed


def in_use(nodes: Nodes, shard: int, node: str) -> ClusterConflict:
    """Return the error for a copy that others read or write, which names them."""
    with nodes[node].connect() as connection:
        tables = connection.scalar(text("select shardids.tables_of(:shard)::text[]"), {"shard": shard})
        who = named(holders_of_tables(connection, tables or ()))
    return ClusterConflict(
        f'the tables of shard {shard} on node "{node}" are locked by {who}',
        hint="Run it again. A session that holds them for long can be ended with pg_terminate_backend(pid).",
    )


def _safe_tick(nodes: Nodes, name: str, shard: int) -> int:
    """Return a tick above all that a server knows of a shard, and five margins above its clock."""
    with nodes[name].connect() as connection:
        tick: int = connection.execute(_SAFE_TICK, {"shard": shard}).scalar_one()
    return tick


_SAFE_TICK = text("""
    with own as (select s.* from shardids.shard s where s.id = :shard)
    select shardids.safe_tick(
      :shard, (select c.oid::regclass from own join pg_class c on c.oid = own.id_counter),
      (select c.oid::regclass from own join pg_class c on c.oid = own.id_offset))""")


def _end(end: Callable[[Side, str], None], names: Iterable[str], side: Side) -> tuple[()]:
    """End the replication of past moves on a node."""
    for name in names:
        end(side, name)
    return ()


def _set_aside(shard: int, side: Side) -> list[str]:
    """Rename the incomplete copy of a shard, if there is one; return its name, with the node."""
    with side.engine.begin() as connection:
        there = held(connection, [shard]).get(shard)
        return [] if there is None or there.arrived is None else [_renamed(connection, shard, side.name)]


def _renamed(connection: Connection, shard: int, node: str) -> str:
    schema = connection.execute(text("select shardids.set_copy_aside(:shard)"), {"shard": shard}).scalar_one()
    return f'{schema} on node "{node}"'
