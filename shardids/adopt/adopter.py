"""One adoption under way: takes its steps in order, recovers when one fails, and undoes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from shardids.adopt.events import OnEvent, Result, StepBegun, StepDone
from shardids.adopt.journal import ABORT, Journal
from shardids.adopt.replication import let_follow
from shardids.adopt.sides import Sides, opened_sides, source_url
from shardids.adopt.steps import AFTER, STEPS, Actions, Step
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionFailed, CommitUncertain, ConnectionFailed


class Adopter:
    """One adoption and the means to take its steps."""

    def __init__(self, journal: Journal, sides: Sides, actions: Actions, on_event: OnEvent) -> None:
        self._journal = journal
        self._sides = sides
        self._actions = actions
        self._on_event = on_event
        self._started = time.monotonic()

    @classmethod
    @contextmanager
    def opened(
        cls, catalog: Catalog, journal: Journal, source: str | None, max_pause_s: float, on_event: OnEvent
    ) -> Iterator[Self]:
        """Yields what takes the steps of the journal's adoption."""
        adoption = journal.adoption
        name = adoption.session_name(catalog.describe().cluster)
        url = source_url(catalog, adoption.source, source)
        with opened_sides(catalog, adoption.plan, url, name=name) as sides:
            actions = Actions(
                catalog=catalog, journal=journal, sides=sides, max_pause_s=max_pause_s, on_event=on_event
            )
            yield cls(journal, sides, actions, on_event)

    def end_former_sessions(self) -> None:
        """Ends sessions that a killed process may have left running."""
        self._sides.end_sessions()

    def follow(self) -> None:
        """Lets the nodes go on after a pause."""
        if self._journal.adoption.is_paused:
            for taker in self._sides.takers:
                let_follow(taker, is_enabled=True)
            self._journal.pause(is_paused=False)

    def stop_following(self) -> Result:
        """Pauses the nodes."""
        self._journal.pause(is_paused=True)
        for taker in self._sides.takers:
            let_follow(taker, is_enabled=False)
        return self.result()

    def take(self, steps: Sequence[Step], *, then: str | None = None, outcome: str | None = None) -> Result:
        """Takes the steps from the one that the journal is at to the last."""
        journal, names = self._journal, [step.name for step in steps]
        first = names.index(journal.step) if journal.step in names else 0
        for step in steps[first:]:
            # The switch itself records the step after it, with what it decides.
            if journal.step != step.name:
                journal.begin_step(step.name)
            self._on_event(StepBegun(step=step.name))
            try:
                step.act(self._actions)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._on_event(StepDone(step=step.name))
        if then is not None:
            journal.begin_step(then)
        if outcome is not None:
            journal.end("adopted")
        return self.result(outcome)

    def undo(self) -> Result:
        """Leaves the source as it was, and the shards empty."""
        self._journal.begin_step(ABORT)
        self._on_event(StepBegun(step=ABORT))
        for step in reversed(STEPS):
            if step.undo is not None:
                step.undo(self._actions)
        self._on_event(StepDone(step=ABORT))
        self._journal.end("aborted")
        return self.result("aborted")

    def compare(self) -> Result:
        """Compares all rows."""
        self._actions.compare()
        return self.result()

    def _recover(self, step: Step, error: BaseException) -> None:
        """Lets the source take writes again if the failed step had stopped them."""
        if not step.stops_writes:
            return
        try:
            if self._has_switched(error):
                return
            self._actions.reopen()
            self._journal.begin_step("catch up")
        except ConnectionFailed as second:
            raise AdoptionFailed(
                f"the switch failed ({error}); whether the source takes writes is unknown: {second.message}",
                hint="When all servers answer again: shardids adopt resume, or shardids adopt abort.",
            ) from error

    def _has_switched(self, error: BaseException) -> bool:
        if isinstance(error, CommitUncertain | ConnectionFailed):
            return self._journal.settle()
        return self._journal.step == AFTER[0].name

    def result(self, outcome: str | None = None) -> Result:
        """Returns how far the adoption is now."""
        return Result(
            step=self._journal.step,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._actions.pause_ms,
        )
