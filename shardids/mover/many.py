"""Several moves: some at once, or a whole plan one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict
from shardids.mover.balance import Transfer
from shardids.mover.events import OnEvent, Result
from shardids.mover.journal import open_moves
from shardids.mover.moves import move, resume
from shardids.mover.steps import Options


def each(shards: Sequence[int], work: Callable[[int], Result], jobs: int = 1) -> list[Result]:
    """Does something with each shard, ``jobs`` at once; after a failure nothing more is begun.

    Raises:
        ShardidsError: the first failure, when what was begun has ended.
    """
    if jobs == 1 or len(shards) == 1:
        # In this thread, so that an interrupt reaches the move and lets the source take writes again.
        return [work(shard) for shard in shards]
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, shard) for shard in shards]
        try:
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def require_none_open(catalog: Catalog) -> None:
    """Refuses to plan moves while others are not over.

    Raises:
        ClusterConflict: some are.
    """
    if shards := [move.shard for move in open_moves(catalog)]:
        raise ClusterConflict(
            f"moves of these shards are not over: {', '.join(map(str, shards))}",
            hint="To go on with them first: --resume. To undo one: shardids shard move SHARD --abort",
        )


def resume_open(catalog: Catalog, options: Options, on_event: OnEvent) -> list[Result]:
    """Goes on with all moves that were broken off, one after another."""
    return [
        resume(catalog, broken.shard, options=options, on_event=on_event) for broken in open_moves(catalog)
    ]


def carry_out(
    catalog: Catalog, transfers: Iterable[Transfer], options: Options, on_event: OnEvent
) -> list[Result]:
    """Moves shards one after another; old copies of them on their targets go."""
    return [
        move(catalog, transfer.shard, transfer.target, back=True, options=options, on_event=on_event)
        for transfer in transfers
    ]
