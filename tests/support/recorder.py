"""Sessions that keep every ID they receive through whatever happens, and what must hold of all of them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import psycopg

from tests.support.faults import ALL_KINDS, LAYOUT, Ids, draw, ticks_of
from tests.support.waiting import PATIENCE_S, wait_for

CONNECTION_LOST = "connection lost"


class Moment(NamedTuple):
    """When something was sent or received: the test's phase, and the time of this process."""

    phase: int
    time_ns: int


class Batch(NamedTuple):
    """IDs of one statement, in the order of receipt."""

    kind: str
    asked: Moment
    received: Moment
    ids: Ids


class Refusal(NamedTuple):
    """A statement that failed."""

    asked: Moment
    received: Moment
    reason: str


class Session(threading.Thread):
    """One client: draws in turn in the given ways, and connects again whenever its connection is lost."""

    def __init__(
        self, recorder: Recorder, number: int, kinds: Sequence[str], most: int, options: str
    ) -> None:
        super().__init__(name=f"session {number}", daemon=True)
        self.recorder = recorder
        self.random = random.Random(number)
        self.kinds = kinds
        self.sizes = {"block": 1000, "many": most, "reserve": 20_000}
        self.options = options
        self.batches: list[Batch] = []
        self.refusals: list[Refusal] = []
        self.failure: BaseException | None = None
        self.is_waiting = False

    def run(self) -> None:
        try:
            while not self.recorder.stopping:
                self._wait_if_paused()
                self._live()
        except BaseException as failure:  # noqa: BLE001  -- raised again by Recorder.check
            self.failure = failure

    def step(self, connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any]) -> None:
        """One statement, or one transaction."""
        self.draw(cursor)

    def draw(self, cursor: psycopg.Cursor[Any]) -> None:
        kind = self.random.choice(self.kinds)
        size = self.random.randint(1, self.sizes.get(kind, 1))
        asked = self.recorder.now()
        self.keep(kind, asked, draw(cursor, kind, size))

    def keep(self, kind: str, asked: Moment, ids: Ids) -> None:
        self.batches.append(Batch(kind, asked, self.recorder.now(), ids))

    def ids(self) -> Ids:
        return np.concatenate([batch.ids for batch in self.batches] or [np.empty(0, np.int64)])

    def _live(self) -> None:
        asked = self.recorder.now()
        try:
            connection = psycopg.connect(
                self.recorder.url,
                autocommit=True,
                application_name="drawing",
                options=self.options,
                connect_timeout=10,
            )
        except psycopg.OperationalError:
            self._refused(asked, CONNECTION_LOST)
            time.sleep(0.02)
            return
        with closing(connection), connection.cursor(binary=True) as cursor:
            while not self.recorder.stopping and not connection.closed:
                self._wait_if_paused()
                asked = self.recorder.now()
                try:
                    self.step(connection, cursor)
                except psycopg.Error as error:
                    if not connection.closed and error.sqlstate not in self.recorder.expected:
                        raise
                    self._refused(asked, error.sqlstate or CONNECTION_LOST)
                    time.sleep(0.002)

    def _refused(self, asked: Moment, reason: str) -> None:
        self.refusals.append(Refusal(asked, self.recorder.now(), reason))

    def _wait_if_paused(self) -> None:
        while self.recorder.pausing and not self.recorder.stopping:
            self.is_waiting = True
            time.sleep(0.002)
        self.is_waiting = False


class Recorder:
    """Runs sessions, and holds all that they received.

    ``phase`` is a number that a test counts up after each thing it does; every batch says in which it was
    asked for and in which it arrived. ``expected`` are the SQLSTATEs that a statement may fail with;
    whatever may happen to a connection, a session just connects again.
    """

    def __init__(self, url: str, *, expected: Sequence[str] = ()) -> None:
        self.url = url
        self.expected = frozenset(expected)
        self.phase = 0
        self.pausing = False
        self.stopping = False
        self.sessions: list[Session] = []

    def start(
        self,
        count: int,
        *,
        kinds: Sequence[str] = ALL_KINDS,
        most: int = 2000,
        options: str = "",
        session: type[Session] = Session,
    ) -> None:
        """Adds so many sessions to those that run; ``most`` draws are in a statement of many."""
        for _ in range(count):
            self.sessions.append(session(self, len(self.sessions), kinds, most, options))
            self.sessions[-1].start()

    def now(self) -> Moment:
        return Moment(self.phase, time.perf_counter_ns())

    def next_phase(self) -> int:
        self.phase += 1
        return self.phase

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No statement is under way in the block; the sessions stay connected."""
        self.pausing = True
        wait_for(lambda: all(one.is_waiting or not one.is_alive() for one in self.sessions), "sessions pause")
        yield
        self.pausing = False

    def stop(self) -> None:
        self.stopping = True
        for session in self.sessions:
            session.join(PATIENCE_S)
            assert not session.is_alive(), f"{session.name} hangs"

    def batches(self) -> Iterator[Batch]:
        for session in self.sessions:
            yield from session.batches

    def refusals(self) -> Counter[str]:
        return Counter(refusal.reason for one in self.sessions for refusal in list(one.refusals))

    def ticks_until(self, phase: int) -> Ids:
        """The ticks that had arrived before the phase began."""
        return self._ticks(lambda batch: batch.received.phase < phase)

    def ticks_since(self, phase: int) -> Ids:
        """The ticks that were asked for after the phase began."""
        return self._ticks(lambda batch: batch.asked.phase >= phase)

    def _ticks(self, choose: Callable[[Batch], bool]) -> Ids:
        chosen = [batch.ids for batch in self.batches() if choose(batch)]
        return ticks_of(np.concatenate([*chosen, np.empty(0, np.int64)]))

    def await_ids(self, sessions: int | None = None) -> None:
        """Returns when each session, or so many, received IDs that it asked for from now on."""
        phase = self.next_phase()
        wanted = len(self.sessions) if sessions is None else sessions

        def have_some() -> bool:
            self.raise_failures()
            return (
                sum(bool(s.batches) and s.batches[-1].asked.phase >= phase for s in self.sessions) >= wanted
            )

        wait_for(have_some, "the sessions receive IDs")

    def raise_failures(self) -> None:
        for session in self.sessions:
            if session.failure is not None:
                raise session.failure

    def check(self) -> Counter[str]:
        """Ends the sessions; checks what must always hold; the number of IDs received in each way."""
        self.stop()
        self.raise_failures()
        received = [session.ids() for session in self.sessions]
        for session, ids in zip(self.sessions, received, strict=True):
            falls = np.flatnonzero(np.diff(ticks_of(ids)) <= 0)
            assert not len(falls), f"{session.name} got {ids[falls[0] + 1]} after {ids[falls[0]]}"
        everything = np.concatenate(received)
        everything.sort()
        twice = everything[1:][np.diff(everything) == 0]
        assert not len(twice), f"{len(twice)} of {len(everything)} IDs came twice, {twice[:3]} among them"
        assert everything[0] >= 0, f"{everything[0]} is negative"
        assert np.all((everything >> LAYOUT.sequence_bits) & ((1 << LAYOUT.shard_bits) - 1) == 0)
        batches = [batch for batch in self.batches() if len(batch.ids)]
        check_order(batches)
        return sum((Counter({batch.kind: len(batch.ids)}) for batch in batches), Counter())


def check_order(batches: Sequence[Batch]) -> None:
    """What was asked for after other IDs had arrived, in whatever session, is above them."""
    asked = np.array([batch.asked.time_ns for batch in batches])
    received = np.array([batch.received.time_ns for batch in batches])
    lowest = ticks_of(np.array([batch.ids[0] for batch in batches]))
    highest = ticks_of(np.array([batch.ids[-1] for batch in batches]))
    order = np.argsort(received)
    highest_so_far = np.concatenate([[-1], np.maximum.accumulate(highest[order])])
    floor = highest_so_far[np.searchsorted(received[order], asked, side="left")]
    below = np.flatnonzero(lowest <= floor)
    assert not len(below), (
        f"{len(below)} times IDs are not above those that had arrived before they were asked for: "
        f"{batches[below[0]].ids[0]}, {(floor[below[0]] - lowest[below[0]]) / 1024:.3f} ms too low"
    )
