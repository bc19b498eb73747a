"""Logs a run of migrations: its begin and end, and each shard with how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from shardids.logs import logger
from shardids.migrate.plan import Outcome, Position, RunReport, shown_heads
from shardids.migrate.runner import Observer

log = logger("migrate")


class RunLog(Observer):
    """Is told a run's events, logs them, and passes them on to ``observer``.

    Records of a shard have the fields ``shard`` and ``node``.
    """

    def __init__(self, observer: Observer, target: str) -> None:
        self._observer = observer
        self._target = target
        self._began = time.monotonic()

    def planned(self, counts: Mapping[str, int]) -> None:
        """Logs that the run begins."""
        log.info("%s shards are brought to %s", sum(counts.values()), self._target, extra={"shards": counts})
        self._observer.planned(counts)

    def started(self, position: Position) -> None:
        """Passes it on."""
        self._observer.started(position)

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Logs an attempt that failed. What is tried again is a lock timeout or its like, without values."""
        fields = {"shard": position.shard, "node": position.node, "attempt": attempt}
        log.warning("shard %s: attempt %s failed: %s", position.shard, attempt, error, extra=fields)
        self._observer.retried(position, attempt, error)

    def ended(self, outcome: Outcome) -> None:
        """Logs how a shard ended."""
        is_done = outcome.status == "done"
        log.log(
            logging.DEBUG if is_done else logging.WARNING,
            "shard %s: %s after %.3f s%s",
            outcome.shard,
            f"{shown_heads(outcome.start)} -> {shown_heads(outcome.end)}" if is_done else outcome.status,
            outcome.seconds,
            f": {outcome.cause}" if outcome.cause else "",
            extra={
                "shard": outcome.shard,
                "node": outcome.node,
                "status": outcome.status,
                "revision": shown_heads(outcome.end),
                "seconds": outcome.seconds,
                "attempts": outcome.attempts,
            },
        )
        self._observer.ended(outcome)

    def finished(self, report: RunReport) -> None:
        """Logs how the run ended."""
        counts = {status: len(report.of(status)) for status in ("done", "failed", "not started")}
        log.log(
            logging.INFO if report.succeeded else logging.WARNING,
            "the run to %s ended after %.1f s: %s",
            self._target,
            time.monotonic() - self._began,
            ", ".join(f"{count} {status}" for status, count in counts.items()),
            extra={"shards": counts, "nodes": {node.node: node.status for node in report.nodes}},
        )
