"""Logs an adoption: its begin and end, and each step with how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardids.adopt.events import Event, OnEvent, Result, StepBegun, StepDone, Waiting
from shardids.adopt.journal import Adoption
from shardids.logs import logger, shown_error

log = logger("adopt")


class AdoptionLog:
    """Is told an adoption's events, logs them, and passes them on to ``on_event``.

    Records have the field ``adoption``, its number in the catalog.
    """

    def __init__(self, adoption: Adoption, on_event: OnEvent) -> None:
        self._id = adoption.id
        self._on_event = on_event
        self._step = adoption.step
        self._since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Logs an event and passes it on."""
        match event:
            case StepBegun(step=step):
                self._step, self._since = step, time.monotonic()
            case StepDone(step=step):
                seconds = time.monotonic() - self._since
                self._tell(logging.DEBUG, f"step {step} took {seconds:.3f} s", step=step, seconds=seconds)
            case Waiting(attempt=attempt, reason=reason):
                self._tell(
                    logging.INFO, f"step {self._step} waits: {reason}", step=self._step, attempt=attempt
                )
        self._on_event(event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Logs that work at the adoption begins, and why it stopped if an error leaves the block."""
        self._tell(logging.INFO, f"begins at step {self._step}", step=self._step)
        try:
            yield
        except BaseException as error:
            words = f"stopped at step {self._step}: {shown_error(error)}"
            self._tell(logging.WARNING, words, step=self._step)
            raise

    def ended(self, result: Result) -> None:
        """Logs how far the adoption is now."""
        pause = "" if result.pause_ms is None else f", no writes for {result.pause_ms:.0f} ms"
        self._tell(
            logging.INFO,
            f"{result.outcome or result.step} after {result.seconds:.1f} s{pause}",
            step=result.step,
            outcome=result.outcome,
            seconds=result.seconds,
            pause_ms=result.pause_ms,
        )

    def _tell(self, level: int, words: str, **fields: object) -> None:
        if log.isEnabledFor(level):
            log.log(level, "adoption %s: %s", self._id, words, extra={"adoption": self._id, **fields})
