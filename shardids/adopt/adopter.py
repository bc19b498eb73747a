"""One adoption: its steps, its leases, and the sides that it works on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Self

from shardids.adopt.run.following import let_follow
from shardids.adopt.run.journal import FOLLOW, KEPT, Journal, Outcome
from shardids.adopt.run.sides import Sides, opened_sides, relay_url, source_url
from shardids.adopt.run.sparing import NO_LIMITS, Limits, Sparing, TooMuchLog
from shardids.adopt.steps import AFTER, BACK, RUN, SWITCH, Actions, Steps, is_at, uses_relay
from shardids.catalog.leases import Lease, OnBusy, obtain
from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.errors import AdoptionFailed, ConnectionFailed, ShardidsError
from shardids.pg.connections import on_connect
from shardids.replication.sides import guard
from shardids.replication.steps import Noted, OnEvent, Report, Runner, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far a command has brought an adoption.

    ``step`` is the step that it is at; ``outcome`` is ``None`` while it is not over. ``pause_ms`` is how long
    no writes were taken, neither by the source nor by the shards, if this call has switched over, or back.
    """

    step: str
    outcome: str | None
    seconds: float
    pause_ms: float | None = None


class Adopter:
    """One adoption and the means to take its steps."""

    def __init__(
        self, journal: Journal, sides: Sides, actions: Actions, report: Report, *, dry_run: bool
    ) -> None:
        self._is_dry = dry_run
        self._journal = journal
        self._sides = sides
        self._actions = actions
        self._report = report
        self._runner = Runner(actions, report, journal, _stuck)
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
        limits: Limits = NO_LIMITS,
        dry_run: bool = False,
    ) -> Iterator[Self]:
        """Yield the runner of the steps of the journal's adoption.

        ``urls``: of the source and the relay, if they differ from the plan's, or to give passwords.
        ``reader``: as :func:`check` takes it. A dry run brings the nodes nothing.
        """
        adoption, (source, via) = journal.adoption, urls
        name = adoption.session_name(catalog.describe().cluster)
        url = source_url(catalog, adoption.source, source)
        relay = relay_url(catalog, adoption.plan, via) if uses_relay(adoption) else None
        subject, step = f"adoption {adoption.id}", adoption.step
        undo = "; undo: shardids adopt abort" if is_at(step, RUN) else ""
        ways = f"Go on: shardids adopt run --resume{undo}"
        report = Report("adopt", subject, {"adoption": adoption.id}, on_event, step=step, ways=ways)
        with (
            report.watching(f"begins at step {step}"),
            opened_sides(catalog, adoption.plan, url, via=relay, reader=reader, name=name) as sides,
            nullcontext() if dry_run else _leased(journal, sides, report),
        ):
            # A process that slept, and lost the lock, finds its sessions ended. It is not to open others.
            for side in sides.all:
                on_connect(side.engine, lambda *_: journal.require_lock())
            ranges = [] if dry_run else skipped_ranges(catalog)
            for taker in sides.takers:
                if own := [one for one in ranges if one.shard in taker.shards]:
                    with taker.side.begin() as connection:
                        bring(connection, own)
            actions = Actions(
                catalog=catalog,
                journal=journal,
                sides=sides,
                max_pause_s=max_pause_s,
                sparing=Sparing(sides, limits, report),
            )
            yield cls(journal, sides, actions, report, dry_run=dry_run)

    def end_former_sessions(self, *, at_source: bool = True) -> None:
        """End sessions that a killed process may have left running; a dry run only connects."""
        self._sides.end_sessions(at_source=at_source, dry_run=self._is_dry)

    def follow(self) -> None:
        """Let the nodes go on after a pause."""
        if self._journal.adoption.is_paused and not self._is_dry:
            for follower in self._sides.followers:
                let_follow(follower, is_enabled=True)
            self._journal.pause(is_paused=False)

    def stop_following(self) -> Result:
        """Pause the nodes; if a switch was interrupted, let the source take writes."""
        if is_at(self._journal.step, SWITCH):
            self._actions.reopen()
        self._journal.pause(is_paused=True)
        for follower in self._sides.followers:
            let_follow(follower, is_enabled=False)
        return self.result()

    def bring(self) -> Result:
        """Take the steps that bring the rows; abort if a server keeps too much of its log.

        Raises:
            AdoptionFailed: it stopped, or was aborted.
        """
        try:
            return self.take(RUN, then=FOLLOW)
        except TooMuchLog as error:
            self.undo()
            raise AdoptionFailed(
                f"{error.message}. The adoption was aborted, and no log is kept for it",
                hint="Find out why the nodes are slow, or give the log more room; then run the plan again.",
            ) from error

    def take(self, *tables: Steps, then: str | None = None) -> Result:
        """Take the steps from the one that the journal is at; without ``then`` the adoption is over."""
        self._runner.take([step for table in tables for step in table])
        if then is not None:
            self._journal.begin_step(then)
            return self.result()
        self._journal.end("adopted")
        return self.result("adopted")

    def take_over(self) -> Result:
        """Let the shards take over, if they have not, and take the remaining steps.

        Of a switch that fails before that nothing keeps a node's log.
        """
        try:
            return self.take(SWITCH, AFTER, then=KEPT if self._actions.keeps_back else None)
        except ShardidsError:
            # At its last step whoever has the shards may be unknown.
            if self._actions.keeps_back and is_at(self._journal.step, SWITCH[:-1]):
                self._drop_back()
            raise

    def _drop_back(self) -> None:
        try:
            # Until it is made again.
            self._journal.begin_step(SWITCH[0].name)
            self._actions.drop_back()
        except ShardidsError as error:
            note = f"nodes may keep their logs for the way back, see shardids adopt status: {error.message}"
            self._report(Noted(note=note))

    def undo(self) -> Result:
        """Leave the source as it was, and the shards empty; after a return, the source as it has become."""
        has_returned = self._journal.adoption.switched_at is not None
        outcome: Outcome = "returned" if has_returned else "aborted"

        def forget() -> None:
            if has_returned:
                self._journal.forget_old_ids(self._actions.bare_names)

        self._runner.abort((*RUN, *SWITCH), forget)
        self._journal.end(outcome)
        return self.result(outcome)

    def keep_way_back(self, *, is_kept: bool) -> None:
        """Let the switch keep a way back, or not; drop the objects of an earlier attempt to keep one."""
        if self._journal.adoption.keeps_back == is_kept:
            return
        # An interrupted attempt has taken the steps of the other way, and may have closed the source.
        self._actions.reopen()
        first = SWITCH[0].name
        if not is_kept:
            # Until the next entry it is to be made again.
            self._journal.begin_step(first)
            self._actions.drop_back()
        self._journal.keep_back(first, is_kept=is_kept)

    def stay(self) -> Result:
        """Give the return up before it was decided: the shards go on."""
        self._runner.undo(BACK)
        self._journal.begin_step(KEPT)
        return self.result()

    def compare(self) -> Result:
        """Compare all rows, from the first table on."""
        self._actions.compare(is_anew=True)
        return self.result()

    def result(self, outcome: str | None = None) -> Result:
        """Return how far the adoption is now."""
        step, seconds, pause_ms = self._journal.step, time.monotonic() - self._started, self._actions.pause_ms
        if not self._is_dry:
            self._report.ended(
                outcome or step, seconds=seconds, pause_ms=pause_ms, step=step, outcome=outcome
            )
        return Result(step=step, outcome=outcome, seconds=seconds, pause_ms=pause_ms)


@contextmanager
def _leased(journal: Journal, sides: Sides, on_event: OnEvent) -> Iterator[None]:
    """Take the leases of all shards, let the nodes' sessions require them, and return them at the end.

    As long as the adoption is open it keeps them. On a node all of its leases change hands at once, so that
    the lease of one shard stands for all.
    """

    def give_back() -> None:
        for taker in sides.takers:
            with suppress(ConnectionFailed):
                journal.leases.give_back(taker.side.engine, taker.shards)

    def take() -> list[Lease]:
        others: list[Lease] = []
        for taker in sides.takers:
            taker.side.end_sessions(sides.name)
            others += journal.leases.take(
                taker.side.engine, taker.side.name, taker.shards, keeps=taker.shards
            ).values()
        if others:
            give_back()
        return others

    obtain(take, OnBusy.WAIT, lambda attempt, reason: on_event(Waiting(attempt=attempt, reason=reason)))
    for taker in sides.takers:
        guard(taker.side.engine, min(taker.shards), journal.leases.epoch)
    try:
        yield
    finally:
        if not journal.is_open:
            give_back()


def _stuck(step: str, error: BaseException, second: ShardidsError) -> AdoptionFailed:
    return AdoptionFailed(
        f"step {step!r} failed ({error}); which side takes writes is unknown: {second.message}",
        hint="When all servers answer again: shardids adopt run --resume, or shardids adopt abort.",
    )
