"""Rebalances: the moves of a plan, one after another; one that fails is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardids.catalog.leases import session_name
from shardids.catalog.moves import Move, open_moves
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, ConnectionFailed, ShardidsError
from shardids.mover.balance import Transfer
from shardids.mover.journal import Result
from shardids.mover.moves import abort, move, resume
from shardids.mover.steps import Options
from shardids.pg.locks import AdvisoryLock, holders_of
from shardids.pg.notation import named_shards
from shardids.replication.barrier import HeldLock
from shardids.replication.steps import OnEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMoved:
    """A shard of the plan that was not moved.

    Attributes:
        reason: the error, in one line.
        is_open: whether its move could not be undone either.
    """

    shard: int
    source: str
    target: str
    reason: str
    is_open: bool = False

    def __str__(self) -> str:
        """Name it as commands report it."""
        hint = f" To resume or undo it: shardids shard move {self.shard} --resume, or --abort."
        return (
            f'shard {self.shard} was not moved from node "{self.source}" to "{self.target}": {self.reason}'
            + (hint if self.is_open else "")
        )


@contextmanager
def rebalancing(catalog: Catalog, command: str = "rebalance") -> Iterator[HeldLock]:
    """Keep a second rebalance from beginning, until the block ends or the process does.

    ``command`` is the name that others read.

    Raises:
        ClusterConflict: another is under way; the message names it. Nothing was changed.
    """
    with catalog.engine.connect() as connection:
        others = ", ".join(
            f"{one.application} (process {one.pid})"
            for one in holders_of(connection, AdvisoryLock.REBALANCE, 0)
        )
    taken = ClusterConflict(
        f"another rebalance is under way: {others or 'it has just begun'}",
        hint="Wait until it has ended: each would move shards that the other has planned to move.",
    )
    lost = ConnectionFailed(
        "the connection to the catalog was lost, which shows that a rebalance is under way"
    )
    name = session_name(command)
    with HeldLock.taken(catalog, AdvisoryLock.REBALANCE, 0, taken=taken, lost=lost, name=name) as held:
        yield held


def require_none_open(catalog: Catalog) -> None:
    """Refuse to plan moves while others are open.

    Raises:
        ClusterConflict: a move is not over.
    """
    if shards := [one.shard for one in open_moves(catalog)]:
        raise ClusterConflict(
            f"{named_shards(shards)}: a move is not over",
            hint="To resume it first: --resume. To undo one: shardids shard move SHARD --abort",
        )


def resume_open(
    catalog: Catalog, options: Options, on_event: OnEvent, moves: Iterable[Move] | None = None
) -> list[Result | NotMoved]:
    """Resume interrupted moves, all or these, one after another; undo one that fails again."""
    done = list[Result | NotMoved]()
    for one in open_moves(catalog) if moves is None else moves:
        transfer = Transfer(shard=one.shard, source=one.source, target=one.target, weight=0.0)
        done.append(
            _done_or_undone(
                catalog,
                transfer,
                options,
                on_event,
                lambda t: resume(catalog, t.shard, options=options, on_event=on_event),
            )
        )
    return done


def carry_out(
    catalog: Catalog, transfers: Iterable[Transfer], options: Options, on_event: OnEvent
) -> list[Result | NotMoved]:
    """Move shards one after another, and replace old copies on their targets.

    A shard that another process has moved meanwhile, or that was lost, is passed over. A move that fails is
    undone, and the others go on.

    Raises:
        ConnectionFailed: the catalog is out of reach.
    """
    return [
        _done_or_undone(
            catalog,
            transfer,
            options,
            on_event,
            lambda t: move(catalog, t.shard, t.target, back=True, options=options, on_event=on_event),
        )
        for transfer in transfers
        if catalog.placement().node_of.get(transfer.shard) == transfer.source
    ]


def _done_or_undone(
    catalog: Catalog,
    transfer: Transfer,
    options: Options,
    on_event: OnEvent,
    work: Callable[[Transfer], Result],
) -> Result | NotMoved:
    try:
        return work(transfer)
    except ShardidsError as error:
        reason, is_open = error.in_a_line(), False
        if open_moves(catalog, [transfer.shard]):
            try:
                ended = abort(catalog, transfer.shard, options=options, on_event=on_event)
            except ShardidsError as second:
                reason, is_open = f"{reason} Undoing it failed: {second.in_a_line()}", True
            else:
                # After the switch of the placement an abort brings the move to its end.
                if ended.outcome == "moved":
                    return ended
        return NotMoved(
            shard=transfer.shard,
            source=transfer.source,
            target=transfer.target,
            reason=reason,
            is_open=is_open,
        )
