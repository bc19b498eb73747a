"""Work in steps that can be repeated and undone: its journal, its events, and its runner.

A step is in the journal before it is taken. Work that stopped goes on at the step that the journal has, or is
undone. Command line, console and logs receive the same events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Protocol, TypeVar

from shardids.errors import ShardidsError
from shardids.logs import logger, shown_error
from shardids.traces import span

ABORT: Final = "abort"
"""The step that a journal records while the work is undone."""

A = TypeVar("A")
"""The taker of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of work in steps. ``shard``: the one that is worked at; ``None`` for a whole database."""

    shard: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun(Event):
    """A step is about to be taken: the ``number``-th of ``total``; both are 0 where no others follow it."""

    step: str
    number: int = field(default=0, compare=False)
    total: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """A step was taken."""

    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagging(Event):
    """The number of bytes of a server's log that the follower farthest behind has not confirmed yet."""

    lag_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """An attempt that was postponed and will be repeated; ``reason`` names the obstacle."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Event):
    """Something that may go wrong later."""

    note: str


OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Report nothing."""


class Journal(Protocol):
    """The record of the steps of one piece of work.

    Attributes:
        step: the step that is taken, or is to be taken next.
    """

    step: str

    def begin_step(self, step: str) -> None:
        """Record the step that is taken next."""

    def is_past(self, step: str, error: BaseException) -> bool:
        """Return whether the entry that ends a step was made; ``error`` may have hidden its answer."""


def always(_actions: object) -> bool:
    """Return that a step is needed."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[A]):
    """A part of the work. ``act`` and ``undo`` are idempotent.

    Attributes:
        name: the step's name in the journal.
        act: takes the step.
        undo: removes whatever the step has done; ``None`` if undoing the other steps leaves nothing of it.
        is_needed: whether there is anything to do; asked when its turn comes.
        back_to: nobody may write during this step, which ends with the journal's entry of what follows it: if
            it fails before, it is undone at once, and the journal goes back to this other step.
        is_journaled: the journal records the step. One that it does not record counts as part of the step
            before, and finds its own work done when it is repeated.
    """

    name: str
    act: Callable[[A], object]
    undo: Callable[[A], object] | None = None
    is_needed: Callable[[A], bool] = always
    back_to: str | None = None
    is_journaled: bool = True


class Report:
    """A log of the events of one piece of work, which also passes them to ``on_event``.

    Args:
        package: whose logger it is: ``adopt`` for ``shardids.adopt``.
        subject: the beginning of messages, such as ``adoption 3``.
        fields: fields of each record.
        on_event: receives the events.
        step: the step that the work is at.
        milestones: messages to log at INFO, by the step that was taken.
        ways: the commands that resume and undo the work, for the user who interrupts it.
    """

    def __init__(
        self,
        package: str,
        subject: str,
        fields: Mapping[str, object],
        on_event: OnEvent,
        *,
        step: str = "",
        shard: int | None = None,
        milestones: Mapping[str, str] | None = None,
        ways: str = "",
    ) -> None:
        self._logger = logger(package)
        self._subject = subject
        self._fields = fields
        self._on_event = on_event
        self._step = step
        self._shard = shard
        self._milestones = milestones or {}
        self._ways = ways
        self._has_ended = False
        self._since = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Log an event and pass it on."""
        match event:
            case StepBegun(step=step):
                self._step, self._since = step, time.monotonic()
            case StepDone(step=step):
                seconds = time.monotonic() - self._since
                self.log(logging.DEBUG, f"step {step} took {seconds:.3f} s", step=step, seconds=seconds)
                if step in self._milestones:
                    self.log(logging.INFO, self._milestones[step])
            case Waiting(attempt=attempt, reason=reason):
                words = f"step {self._step} waits: {reason}"
                self.log(logging.INFO, words, step=self._step, attempt=attempt)
        self._on_event(event if self._shard is None else replace(event, shard=self._shard))

    @contextmanager
    def watching(self, begins: str) -> Iterator[None]:
        """Log that work begins, and why it stopped if an error leaves the block.

        A :exc:`KeyboardInterrupt` gets a note for the user: at which step, and how to go on.
        """
        self.log(logging.INFO, begins, step=self._step)
        try:
            yield
        except BaseException as error:
            words = f"stopped at step {self._step}: {shown_error(error)}"
            self.log(logging.WARNING, words, step=self._step)
            if (interrupt := _interrupt_behind(error)) is not None:
                interrupt.add_note(self._interrupted())
                raise interrupt from None
            raise

    def _interrupted(self) -> str:
        if self._has_ended:
            return "Interrupted. Nothing is left to resume."
        return f'Interrupted at step "{self._step}". {self._ways}'.rstrip()

    def ended(self, state: str, *, seconds: float, pause_ms: float | None, **fields: object) -> None:
        """Log how far the work is now, which has ended."""
        self._has_ended = True
        pause = "" if pause_ms is None else f", no writes for {pause_ms:.0f} ms"
        words = f"{state} after {seconds:.1f} s{pause}"
        self.log(logging.INFO, words, seconds=seconds, pause_ms=pause_ms, **fields)

    def log(self, level: int, words: str, **fields: object) -> None:
        """Log a message about the work."""
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s: %s", self._subject, words, extra={**self._fields, **fields})


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that an error is, or that it followed, as when a driver closes its connection.

    One of :class:`ShardidsError` says more than an interrupt.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt | ShardidsError):
        found = found.__context__
    return found if isinstance(found, KeyboardInterrupt) else None


class Runner(Generic[A]):
    """A runner of steps in order, which recovers when one fails, and undoes them.

    Args:
        actions: the taker of the steps.
        report: receives the events.
        journal: the record of the steps; ``None`` where each step sees for itself whether it is needed.
        stuck: returns the error for a step, its error, and another that kept it from being undone.
        reopen: lets writes pass again after a step with ``back_to`` has failed; by default that step is
            undone, and the journal goes back.
    """

    def __init__(
        self,
        actions: A,
        report: OnEvent,
        journal: Journal | None = None,
        stuck: Callable[[str, BaseException, ShardidsError], ShardidsError] | None = None,
        reopen: Callable[[Step[A]], object] | None = None,
    ) -> None:
        self._actions = actions
        self._report = report
        self._journal = journal
        self._stuck = stuck
        self._reopen = reopen or self._undo_at_once

    def take(self, steps: Sequence[Step[A]]) -> None:
        """Take the steps from the one that the journal is at to the last."""
        journal = self._journal
        names = [step.name for step in steps]
        first = names.index(journal.step) if journal is not None and journal.step in names else 0
        for number, step in enumerate(steps[first:], first + 1):
            if not step.is_needed(self._actions):
                continue
            # The step before may have recorded this one, with what it decides.
            if journal is not None and step.is_journaled and journal.step != step.name:
                journal.begin_step(step.name)
            self._report(StepBegun(step=step.name, number=number, total=len(steps)))
            try:
                with span("shardids.step", step=step.name):
                    step.act(self._actions)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._report(StepDone(step=step.name))

    def undo(self, steps: Sequence[Step[A]]) -> None:
        """Undo the steps, the last one first, whether they were taken or not."""
        for step in reversed(steps):
            if step.undo is not None:
                step.undo(self._actions)

    def abort(self, steps: Sequence[Step[A]], then: Callable[[], Any] = lambda: None) -> None:
        """Undo the steps as one that the journal records, and call ``then`` at its end."""
        if self._journal is not None:
            self._journal.begin_step(ABORT)
        self._report(StepBegun(step=ABORT))
        self.undo(steps)
        then()
        self._report(StepDone(step=ABORT))

    def _recover(self, step: Step[A], error: BaseException) -> None:
        """Undo a step that has stopped writes, unless what follows it was recorded."""
        if step.back_to is None or self._journal is None:
            return
        try:
            if not self._journal.is_past(step.name, error):
                self._reopen(step)
        except ShardidsError as second:
            raise (self._stuck(step.name, error, second) if self._stuck else second) from error

    def _undo_at_once(self, step: Step[A]) -> None:
        self.undo([step])
        if self._journal is not None and step.back_to is not None:
            self._journal.begin_step(step.back_to)
