"""Shards that were lost with their node: what is left of them anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.topology import Placement
from shardids.mover.history import Move


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
    """Returns what a node has of these shards."""
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
        """Returns what is left of it, as a sentence without a full stop."""
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
    """Returns the move by which each shard last came to a node."""
    return {move.shard: move for move in moves if move.target == node and move.high_water_tick is not None}


def why_lost(
    there: Mapping[int, Held],
    placement: Placement,
    node: str,
    arrived_by: Mapping[int, Move],
    leaving: Mapping[int, str],
) -> dict[int, str]:
    """Returns the shards that a server does not have as their owner node had them, and why.

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
    """Looks for copies of lost shards on all nodes; ``reasons`` is what :func:`why_lost` returned."""
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
    """Returns the move that last took a shard from a node to another."""
    taken = [
        move
        for move in moves
        if move.shard == shard and move.source == node != move.target and move.high_water_tick is not None
    ]
    return taken[-1] if taken else None


def _is_last(copy: Copy | None, arrival: Move | None) -> bool:
    """Returns whether a copy is what the move left behind that last brought the shard to the lost node."""
    return (
        copy is not None
        and arrival is not None
        and copy.departure == arrival
        and copy.high_water_tick >= (arrival.high_water_tick or -1)
    )
