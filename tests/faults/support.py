"""Sessions that keep every ID they receive through whatever happens, and what must hold of all of them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import psycopg

from shardids import Layout

LAYOUT = Layout.preset("default")
LONG = os.environ.get("SHARDIDS_FAULTS", "short") == "long"
PATIENCE_S = 60.0
CONNECTION_LOST = "connection lost"
ALL_KINDS = ("one", "many", "many", "many", "block", "reserve")

Ids = npt.NDArray[np.int64]
Scale = TypeVar("Scale")


def scaled(short: Scale, long: Scale) -> Scale:
    """The figure for this run: ``SHARDIDS_FAULTS=long`` asks for the long one."""
    return long if LONG else short


class Batch(NamedTuple):
    """IDs in the order of receipt, with the phases before they were asked for and after they arrived."""

    before: int
    after: int
    ids: Ids


class Refusal(NamedTuple):
    """A statement that failed."""

    before: int
    after: int
    reason: str


def ticks_of(ids: Ids) -> Ids:
    low = (1 << LAYOUT.sequence_bits) - 1
    above = LAYOUT.shard_bits + LAYOUT.sequence_bits
    return ((ids >> above) << LAYOUT.sequence_bits) | (ids & low)


def ids_of(first_tick: int, last_tick: int, shard: int) -> Ids:
    ticks = np.arange(first_tick, last_tick + 1, dtype=np.int64)
    low = (1 << LAYOUT.sequence_bits) - 1
    ms_and_shard = ((ticks >> LAYOUT.sequence_bits) << LAYOUT.shard_bits) | shard
    return (ms_and_shard << LAYOUT.sequence_bits) | (ticks & low)


def draw(cursor: psycopg.Cursor[Any], kind: str, size: int, shard: int = 0) -> Ids:
    """IDs by one statement, in the order in which the server drew them."""
    schema = f"shard_{shard:04}"
    if kind == "reserve":
        first, last = cursor.execute(
            "select first_tick, last_tick from shardids.reserve(%s, %s)", (shard, size)
        ).fetchone()
        return ids_of(first, last, shard)
    if kind == "one":
        return _integers(cursor.execute(f"select int8send({schema}.next_id())").fetchone())
    source = {
        "many": f"(select {schema}.next_id() from generate_series(1, %s::integer))",
        "block": f"{schema}.next_ids(%s::integer)",
    }[kind]
    query = f"select string_agg(int8send(id), '') from {source} drawn (id)"
    return _integers(cursor.execute(query, (size,)).fetchone())


def _integers(row: tuple[bytes]) -> Ids:
    return np.frombuffer(row[0], dtype=">i8").astype(np.int64)


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
        before = self.recorder.phase
        self.keep(before, draw(cursor, kind, size))

    def keep(self, before: int, ids: Ids) -> None:
        self.batches.append(Batch(before, self.recorder.phase, ids))

    def ids(self) -> Ids:
        return np.concatenate([batch.ids for batch in self.batches] or [np.empty(0, np.int64)])

    def _live(self) -> None:
        before = self.recorder.phase
        try:
            connection = psycopg.connect(
                self.recorder.url,
                autocommit=True,
                application_name="drawing",
                options=self.options,
                connect_timeout=10,
            )
        except psycopg.OperationalError:
            self._refused(before, CONNECTION_LOST)
            time.sleep(0.02)
            return
        with closing(connection), connection.cursor(binary=True) as cursor:
            while not self.recorder.stopping and not connection.closed:
                self._wait_if_paused()
                before = self.recorder.phase
                try:
                    self.step(connection, cursor)
                except psycopg.Error as error:
                    if not connection.closed and error.sqlstate not in self.recorder.expected:
                        raise
                    self._refused(before, error.sqlstate or CONNECTION_LOST)
                    time.sleep(0.002)

    def _refused(self, before: int, reason: str) -> None:
        self.refusals.append(Refusal(before, self.recorder.phase, reason))

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

    def next_phase(self) -> int:
        self.phase += 1
        return self.phase

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No statement is under way in the block; the sessions stay connected."""
        self.pausing = True
        until(lambda: all(one.is_waiting or not one.is_alive() for one in self.sessions), "sessions pause")
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

    def ticks(self, choose: Callable[[Batch], bool]) -> Ids:
        """The ticks of the batches that are chosen."""
        chosen = [batch.ids for batch in self.batches() if choose(batch)]
        return ticks_of(np.concatenate([*chosen, np.empty(0, np.int64)]))

    def await_ids(self, sessions: int | None = None) -> None:
        """Returns when each session, or so many, received IDs that it asked for from now on."""
        phase = self.next_phase()
        wanted = len(self.sessions) if sessions is None else sessions

        def have_some() -> bool:
            self.raise_failures()
            return sum(bool(s.batches) and s.batches[-1].before >= phase for s in self.sessions) >= wanted

        until(have_some, "the sessions receive IDs")

    def raise_failures(self) -> None:
        for session in self.sessions:
            if session.failure is not None:
                raise session.failure

    def check(self) -> int:
        """Ends the sessions; checks what must always hold; the number of IDs received."""
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
        return len(everything)


def until(true: Callable[[], object], what: str) -> None:
    """Asks again and again until the answer is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"it did not come about that {what}"
        time.sleep(0.005)


class Clock:
    """The clock of a server that is started with ``env``: the machine's, plus what :meth:`set` says."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: float) -> None:
        """Steps the clock, for all processes at once."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+.3f}s\n")
        new.chmod(0o644)
        new.replace(self._file)


def faketime_library() -> Path:
    places = [Path(root).glob("**/faketime/libfaketimeMT*") for root in ("/usr/lib", "/usr/local/lib")]
    found = [path for place in places for path in place]
    assert found, "libfaketimeMT is not there; install it: apt-get install libfaketime"
    return found[0]


def connect(url: str) -> psycopg.Connection[Any]:
    """An autocommit connection."""
    return psycopg.connect(url, autocommit=True, connect_timeout=10)


def scalar(connection: psycopg.Connection[Any], query: str, *parameters: object) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    assert row is not None
    return row[0]
