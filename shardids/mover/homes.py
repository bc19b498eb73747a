"""Homes of shards that were lost with their node: the newest copy, or an empty shard if there is none.

The catalog's journal records the choice first. Then the home's activation is prepared in a transaction, the
placement is switched, and the activation is committed, as in a move: before the switch the home takes no
writes, after it no other node does.

IDs. The last ID of the lost server is known from clocks only, as for a promoted standby: the home issues IDs
above all that it and the node's new server know of, and above both clocks, by some ``safety_margin``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, Engine, text

from shardids.catalog.moves import LOSS, Move, Outcome, all_moves
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring
from shardids.catalog.topology import Node, Placement
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError, StatementFailed
from shardids.mover.journal import Journal, Result
from shardids.pg.locks import holders_of_tables, named
from shardids.replication import subscriptions
from shardids.replication.sides import SESSION, Side
from shardids.replication.subscriptions import LOCK_FAILURES
from shardids.tables.views import follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a node has of a shard: its row in ``shardids.shard``."""

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
    """Return what a node has of these shards."""
    rows = connection.execute(_HELD, {"shards": sorted(shards)})
    return {row.shard: Held(**row._asdict()) for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A whole copy of a shard that issues no IDs; ``departure`` is the move that left it behind, if known."""

    node: str
    high_water_tick: int
    departure: Move | None

    @property
    def age(self) -> tuple[int, int]:
        """Returns what is greater the newer a copy is; a fence raises ticks, so those come second."""
        return (self.departure.id if self.departure else 0, self.high_water_tick)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShard:
    """A shard that the server which took over its node does not have as it was.

    Attributes:
        shard: its number.
        node: the node that it was lost with.
        reason: what is wrong with it on the new server.
        copy: the newest whole copy on the nodes that answer; ``None`` if there is none.
        silent: nodes that do not answer and may have a newer copy.
        active_on: another node on which it is active, against what the catalog says.
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

    def what_is_left(self) -> str:
        """Return what is left of it, as a sentence without a full stop."""
        if self.copy is None:
            left = "no node has a copy of it, so it would be empty"
        elif self.copy.departure is None:
            left = f'node "{self.copy.node}" has an old copy of it'
        else:
            at = self.copy.departure.ended_at or self.copy.departure.started_at
            left = f'node "{self.copy.node}" has it as it was when it left there ({at:%Y-%m-%d %H:%M:%S %Z})'
        if self.silent:
            names = ", ".join(f'"{name}"' for name in self.silent)
            left += f"; a newer copy may be on node {names}, which does not answer"
        return left


def arrivals(moves: Iterable[Move], node: str) -> dict[int, Move]:
    """Return the move by which each shard last came to a node."""
    return {move.shard: move for move in moves if move.target == node and move.high_water_tick is not None}


def why_lost(
    there: Mapping[int, Held],
    placement: Placement,
    node: str,
    arrived_by: Mapping[int, Move],
    leaving: Mapping[int, str],
) -> dict[int, str]:
    """Return the shards that a server does not have as their owner node had them, and why.

    An activation raises the row's high-water tick, and so does a fence: a row with a lower one than the
    shard came with is from before it came.

    Args:
        there: what the server has.
        placement: the placement.
        node: the node whose place the server takes.
        arrived_by: see :func:`arrivals`.
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
        elif arrival is not None and row.high_water_tick < (arrival.high_water_tick or -1):
            reasons[shard] = "there is an old copy of it, from before it was moved there"
        elif row.state == "moved" and row.moved_to != leaving.get(shard):
            reasons[shard] = f'it is marked as moved to node "{row.moved_to}" there'
        elif row.state != "active" and shard in placement.lost:
            reasons[shard] = f"it is {row.state} there"
    return reasons


def examine(nodes: Nodes, node: str, reasons: Mapping[int, str], moves: Sequence[Move]) -> list[LostShard]:
    """Look for copies of lost shards on all nodes; ``reasons`` is what :func:`why_lost` returned."""
    if not reasons:
        return []

    def ask(_name: str, engine: Engine) -> Mapping[int, Held]:
        with engine.connect() as connection:
            return held(connection, reasons)

    answers = nodes.each(ask)
    arrived_by = arrivals(moves, node)
    found = []
    for shard, reason in sorted(reasons.items()):
        rows = {name: there[shard] for name, there in answers.results.items() if shard in there}
        copies = [
            Copy(node=name, high_water_tick=row.high_water_tick, departure=_departure(moves, shard, name))
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


def _departure(moves: Iterable[Move], shard: int, node: str) -> Move | None:
    """Return the move that last took a shard from a node to another."""
    taken = [
        move
        for move in moves
        if move.shard == shard and move.source == node != move.target and move.high_water_tick is not None
    ]
    return taken[-1] if taken else None


def _is_last(copy: Copy | None, arrival: Move | None) -> bool:
    """Return whether a copy is what the move left behind that last brought the shard to the lost node."""
    return (
        copy is not None
        and arrival is not None
        and copy.departure == arrival
        and copy.high_water_tick >= (arrival.high_water_tick or -1)
    )


_LOCK_MS = 10_000
"""How long to wait for those who read the old copy that becomes the home."""


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


def accept(catalog: Catalog, nodes: Nodes, journal: Journal, home: str) -> tuple[str, ...]:
    """Make ``home`` the owner of the journal's shard, which is lost. Returns what :func:`complete` does.

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
    """Do what is left to do of what the journal's open entry says. Idempotent.

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
    """Bring an interrupted acceptance to its end, or end it if the shard has no home yet."""
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
    """Activate the shard at its home, and make that the owner."""
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
    """Let the home issue IDs above a tick and take writes, from the COMMIT of its transaction on."""
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
        from shardids.migrate.install.provision import make_shard  # noqa: PLC0415

        make_shard(home, move.shard)
    home.execute(
        text("select shardids.drop_barriers(:shard), shardids.activate(:shard, :tick)"),
        {"shard": move.shard, "tick": tick},
    )
    return renamed


def _in_use(nodes: Nodes, move: Move) -> ClusterConflict:
    """Return the error for a copy that others read or write, which names them."""
    with nodes[move.target].connect() as connection:
        tables = connection.scalar(text("select shardids.tables_of(:shard)::text[]"), {"shard": move.shard})
        who = named(holders_of_tables(connection, tables or ()))
    return ClusterConflict(
        f'the tables of shard {move.shard} on node "{move.target}" are locked by {who}',
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


class _Remains:
    """What past moves may have left of a shard on the nodes; those that do not answer are left out."""

    def __init__(self, catalog: Catalog, nodes: Nodes, past: Sequence[Move]) -> None:
        self._cluster = catalog.describe().cluster
        self._nodes = nodes
        self._past = past
        self._silent: set[str] = set()

    def unsubscribe(self) -> None:
        """Drop the moves' subscriptions."""
        for move in self._past:
            self._try(move.target, partial(self._end, move, subscriptions.unsubscribe))

    def unpublish(self) -> None:
        """Drop the moves' slots and publications."""
        for move in self._past:
            self._try(move.source, partial(self._end, move, subscriptions.unpublish))

    def _end(self, move: Move, end: Callable[[Side, str], None], node: str) -> None:
        end(Side(name=node, engine=self._nodes[node]), move.session_name(self._cluster))

    def set_aside(self, shard: int) -> list[str]:
        """Rename incomplete copies; return their names, each with its node."""
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
def journals(
    catalog: Catalog, shards: Iterable[int], *, patience_s: float, takes_over: bool = True
) -> Iterator[dict[int, Journal]]:
    """Yield the journals of shards; wait a while for movers that have not noticed yet that a node is gone.

    With ``takes_over`` moves that were interrupted become this process's.

    Raises:
        ClusterConflict: a shard is being moved still.
    """
    deadline = time.monotonic() + patience_s
    with ExitStack() as kept:
        opened = {}
        for shard in sorted(set(shards)):
            while shard not in opened:
                try:
                    opened[shard] = kept.enter_context(Journal.opened(catalog, shard, takes_over=takes_over))
                except ClusterConflict:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
        yield opened
