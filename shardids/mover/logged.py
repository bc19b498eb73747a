"""Logs a move: its begin and end, the fence, and each step with how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardids.logs import logger, shown_error
from shardids.mover.events import Event, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.mover.history import Move

if TYPE_CHECKING:
    from shardids.mover.failover import Replacement

log = logger("mover")


class MoveLog:
    """Is told a move's events, logs them, and passes them on to ``on_event``.

    Records have the fields ``move`` (its number in the catalog), ``shard``, ``node``, which it moves from,
    and ``target``.
    """

    def __init__(self, move: Move, on_event: OnEvent) -> None:
        self._move = move
        self._fields = {"move": move.id, "shard": move.shard, "node": move.source, "target": move.target}
        self._on_event = on_event
        self._step = move.step
        self._since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Logs an event and passes it on."""
        match event:
            case StepBegun(step=step):
                self._step, self._since = step, time.monotonic()
            case StepDone(step=step):
                seconds = time.monotonic() - self._since
                self._tell(logging.DEBUG, f"step {step} took {seconds:.3f} s", step=step, seconds=seconds)
                if step in {"cutover", "stop"}:
                    self._tell(logging.INFO, f'fenced on node "{self._move.source}"')
                elif step == "place":
                    self._tell(logging.INFO, f'placed on node "{self._move.target}"')
            case Waiting(attempt=attempt, reason=reason):
                self._tell(
                    logging.INFO, f"step {self._step} waits: {reason}", step=self._step, attempt=attempt
                )
        self._on_event(event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Logs the move's begin, and why it stopped if an error leaves the block."""
        move = self._move
        self._tell(logging.INFO, f'move from node "{move.source}" to "{move.target}" at step {move.step}')
        try:
            yield
        except BaseException as error:
            self._tell(
                logging.WARNING, f"stopped at step {self._step}: {shown_error(error)}", step=self._step
            )
            raise

    def ended(self, result: Result) -> None:
        """Logs how the move ended."""
        pause = "" if result.pause_ms is None else f", no writes for {result.pause_ms:.0f} ms"
        self._tell(
            logging.INFO,
            f"{result.outcome} after {result.seconds:.1f} s{pause}",
            outcome=result.outcome,
            seconds=result.seconds,
            pause_ms=result.pause_ms,
        )

    def _tell(self, level: int, words: str, **fields: object) -> None:
        if log.isEnabledFor(level):
            log.log(level, "shard %s: %s", self._move.shard, words, extra=self._fields | fields)


def log_replacement(done: Replacement) -> None:
    """Logs that a node was replaced, with the numbers of shards that were ``fenced`` or ``lost``."""
    log.warning(
        'node "%s" is at %s now: %s shards, %s lost',
        done.node,
        done.url,
        done.shards,
        len(done.lost),
        extra={
            "node": done.node,
            "fenced": list(done.fenced),
            "lost": [one.shard for one in done.lost],
            "accepted": [one.shard for one in done.accepted],
        },
    )
