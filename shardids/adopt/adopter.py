"""One adoption under way: takes its steps in order, recovers when one fails, and undoes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from shardids.adopt.back_steps import BACK
from shardids.adopt.events import OnEvent, Result, StepBegun, StepDone
from shardids.adopt.journal import ABORT, KEPT, Journal, Outcome
from shardids.adopt.logged import AdoptionLog
from shardids.adopt.replication import let_follow
from shardids.adopt.sides import Sides, opened_sides, relay_url, source_url
from shardids.adopt.steps import SWITCH, Actions, Step, run_steps
from shardids.catalog.connections import on_connect
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.errors import AdoptionFailed, ConnectionFailed


class Adopter:
    """One adoption and the means to take its steps."""

    def __init__(self, journal: Journal, sides: Sides, actions: Actions, log: AdoptionLog) -> None:
        self._journal = journal
        self._sides = sides
        self._actions = actions
        self._log = log
        self._started = time.monotonic()

    @classmethod
    @contextmanager
    def opened(
        cls,
        catalog: Catalog,
        journal: Journal,
        urls: tuple[str | None, str | None],
        max_pause_s: float,
        on_event: OnEvent,
        *,
        reader: str | None = None,
    ) -> Iterator[Self]:
        """Yields what takes the steps of the journal's adoption.

        ``urls``: of the source and the relay, if they differ from the plan's, or to give passwords.
        ``reader``: as :func:`shardids.adopt.adoption.check` takes it.
        """
        adoption, (source, via) = journal.adoption, urls
        name = adoption.session_name(catalog.describe().cluster)
        url = source_url(catalog, adoption.source, source)
        relay = relay_url(catalog, adoption.plan, via)
        log = AdoptionLog(adoption, on_event)
        with (
            log.watching(),
            opened_sides(catalog, adoption.plan, url, via=relay, reader=reader, name=name) as sides,
        ):
            # A process that slept, and lost the lock, finds its sessions ended. It is not to open others.
            for side in sides.all:
                on_connect(side.engine, lambda *_: journal.require_lock())
            ranges = skipped_ranges(catalog)
            for taker in sides.takers:
                if own := [one for one in ranges if one.shard in taker.shards]:
                    with taker.side.begin() as connection:
                        bring(connection, own)
            actions = Actions(
                catalog=catalog, journal=journal, sides=sides, max_pause_s=max_pause_s, on_event=log
            )
            yield cls(journal, sides, actions, log)

    def end_former_sessions(self, *, at_source: bool = True) -> None:
        """Ends sessions that a killed process may have left running."""
        self._sides.end_sessions(at_source=at_source)

    def follow(self) -> None:
        """Lets the nodes go on after a pause."""
        if self._journal.adoption.is_paused:
            for follower in self._sides.followers:
                let_follow(follower, is_enabled=True)
            self._journal.pause(is_paused=False)

    def stop_following(self) -> Result:
        """Pauses the nodes."""
        self._journal.pause(is_paused=True)
        for follower in self._sides.followers:
            let_follow(follower, is_enabled=False)
        return self.result()

    def take(self, steps: Sequence[Step], *, then: str | None = None, outcome: str | None = None) -> Result:
        """Takes the steps from the one that the journal is at to the last."""
        journal = self._journal
        steps = [step for step in steps if journal.adoption.keeps_back or not step.only_back]
        names = [step.name for step in steps]
        first = names.index(journal.step) if journal.step in names else 0
        for step in steps[first:]:
            # The switch itself records the step after it, with what it decides.
            if journal.step != step.name:
                journal.begin_step(step.name)
            self._log(StepBegun(step=step.name))
            try:
                step.act(self._actions)
            except BaseException as error:
                self._recover(step, error)
                raise
            self._log(StepDone(step=step.name))
        if then is not None:
            journal.begin_step(then)
        if outcome is not None:
            journal.end("adopted")
        return self.result(outcome)

    def undo(self) -> Result:
        """Leaves the source as it was, and the shards empty; after a return, the source as it has become."""
        outcome: Outcome = "aborted" if self._journal.adoption.switched_at is None else "returned"
        self._journal.begin_step(ABORT)
        self._log(StepBegun(step=ABORT))
        for step in reversed((*run_steps(self._journal.adoption.plan), *SWITCH)):
            if step.undo is not None:
                step.undo(self._actions)
        if outcome == "returned":
            self._journal.forget_old_ids(self._actions.bare_names)
        self._log(StepDone(step=ABORT))
        self._journal.end(outcome)
        return self.result(outcome)

    def keep_way_back(self, *, is_kept: bool) -> None:
        """Lets the switch keep a way back, or not; drops what an attempt that was to keep one has made."""
        if self._journal.adoption.keeps_back == is_kept:
            return
        # An interrupted attempt has taken the steps of the other way, and may have closed the source.
        self._actions.reopen()
        first = SWITCH[0].name
        if not is_kept:
            # Until the next entry it is to be made again.
            self._journal.begin_step(first)
            self._actions.back.drop()
        self._journal.keep_back(first, is_kept=is_kept)

    def stay(self) -> Result:
        """Gives the return up before it was decided: the shards go on."""
        for step in reversed(BACK):
            if step.undo is not None:
                step.undo(self._actions)
        self._journal.begin_step(KEPT)
        return self.result()

    def compare(self) -> Result:
        """Compares all rows."""
        self._actions.compare()
        return self.result()

    def _recover(self, step: Step, error: BaseException) -> None:
        """Lets the side that took writes take them again if the failed step had stopped them."""
        if not step.stops_writes:
            return
        try:
            if self._is_over(step, error):
                return
            if step.undo is not None:
                step.undo(self._actions)
            self._journal.begin_step(KEPT if step in BACK else "catch up")
        except ConnectionFailed as second:
            raise AdoptionFailed(
                f"step {step.name!r} failed ({error}); who takes writes is unknown: {second.message}",
                hint="When all servers answer again: shardids adopt resume, or shardids adopt abort.",
            ) from error

    def _is_over(self, step: Step, error: BaseException) -> bool:
        # An interrupt may have come before the answer to the COMMIT.
        if isinstance(error, ConnectionFailed) or not isinstance(error, Exception):
            return self._journal.settle(step.name)
        return self._journal.step != step.name

    def result(self, outcome: str | None = None) -> Result:
        """Returns how far the adoption is now."""
        result = Result(
            step=self._journal.step,
            outcome=outcome,
            seconds=time.monotonic() - self._started,
            pause_ms=self._actions.pause_ms or self._actions.back.pause_ms,
        )
        self._log.ended(result)
        return result
