"""The frame of all measures: schemes, their servers and clocks, the order of rounds, and the sizes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import psycopg

from shardids.compare.multimaster.postgresql import PostgreSqlSession
from shardids.compare.results import SPREAD
from shardids.compare.schemes import Scheme, Servers
from shardids.compare.testbed.clients import Clients, client_processes
from shardids.compare.testbed.stage import FakedClock, faked_clock, stage_for
from shardids.errors import ShardidsError, UnsupportedServer

CLIENTS: Final = 16
"""How many clients draw or insert at once, half of them on each node."""

PACED_CLIENTS: Final = (0, 0, 0, 1)
"""The nodes of the clients that draw at an even pace: the first node takes three times the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        rounds: interleaved rounds of draws and of inserts.
        draws: single draws per round.
        many: how many keys are drawn at once.
        insert_s: how long clients insert in each round.
        spread_rounds, spread_s: the same of inserts over many shards.
        spread_each: how many of the shards each client inserts into.
        rows, fills: how many rows the filled table has, and how often one is filled.
        fill_s: filling a table ends after this time, however many rows it has.
        paced_s: how long clients draw at an even pace.
        skews_ms, answers_s: how far clocks differ while clients answer each other, and how long they do.
        rush_s, rush_keys: how long clients draw as fast as they can, and how many keys each draws at most.
        steps, clock_keys: how often the clocks step back, and how many keys each client draws meanwhile.
        drawn: how many keys each client draws between faults.
        losses: how often the first servers are lost and replaced, in each of the two cases.
        settle_s: how long a server runs at least before a loss.
        lead_s: how long a client draws one key after the other before a loss.
        lead_keys, lead_many: how many keys a client sets aside before a loss in bulk, and how many it draws
            at once where its scheme can't do that.
        disk_mb: how much free disk space the run needs.
    """

    rounds: int
    draws: int
    many: int
    insert_s: float
    spread_rounds: int
    spread_s: float
    spread_each: int
    rows: int
    fills: int
    fill_s: float
    paced_s: float
    skews_ms: tuple[float, ...]
    answers_s: float
    rush_s: float
    rush_keys: int
    steps: int
    clock_keys: int
    drawn: int
    losses: int
    settle_s: float
    lead_s: float
    lead_keys: int
    lead_many: int
    disk_mb: int

    def in_words(self) -> Mapping[str, str]:
        """Return the description of each measure for a report, by its name."""
        first, second = (PACED_CLIENTS.count(node) for node in (0, 1))
        rounds, fills, spreads = (_times(count) for count in (self.rounds, self.fills, self.spread_rounds))
        losses = f"{self.losses} times" if self.losses > 1 else "once"
        words = {
            name: text.format(
                sizes=self,
                skews=", ".join(f"{skew_ms:g}" for skew_ms in self.skews_ms),
                clients=CLIENTS,
                first=first,
                second=second,
                rounds=rounds,
                fills=fills,
                spread=SPREAD,
                spreads=spreads,
                losses=losses,
            )
            for name, text in _WORDS.items()
        }
        return {name: " ".join(text.split()) for name, text in words.items()}


def _times(count: int) -> str:
    return "once" if count == 1 else f"in {count} interleaved rounds"


_WORDS: Final = {
    "all": """Servers and clients share the machine, its one clock and its disk, and talk over loopback.""",
    "draws": """One client draws {sizes.draws:,} keys one by one, and {sizes.many:,} at once, {rounds}.""",
    "inserts": """1 client, then {clients} on two nodes (on one for schemes of one server): draw, INSERT …
        RETURNING and COMMIT, for {sizes.insert_s:g} s, {rounds}; the median. Where a draw is a row
        of MariaDB, nothing else is inserted.""",
    "spread": """1 client, then {clients}, all on the first node, which has {spread} shards with a table each:
        draw, INSERT … RETURNING and COMMIT, each row in another of {sizes.spread_each} shards, with prepared
        statements, for {sizes.spread_s:g} s, {spreads}; the median. Where shards make keys, each makes its
        own; an identity column gives the same keys to every table.""",
    "storage": """One client fills a table (key, integer) by COPY up to {sizes.rows:,} rows, or for
        {sizes.fill_s:g} s, {fills}, with a checkpoint before each quarter. It brings the keys, drawn many at
        once, unless the server makes them. PostgreSQL copies row by row, with more WAL, where a function
        other than nextval makes the key.""",
    "order": """{first} clients of the first node and {second} of the second each draw a key every ms, or as
        fast as they can, for {sizes.paced_s:g} s; times are taken before and after each draw. Rows appear
        later still, when they are committed. The share is that of all pairs: where keys are late by a
        bounded time, it is lower in a longer run.""",
    "causality": """A client of each node draws a key for a row that answers the other's, as fast as it can,
        for
        {sizes.answers_s:g} s. The clock of the first node, its server's and its client's, is ahead by
        {skews} ms, simulated by libfaketime. Then again where the generator can be told the key that is
        answered.""",
    "full speed": """{clients} clients, half of them on each node, draw many at once for {sizes.rush_s:g} s,
        up to {sizes.rush_keys:,} keys each.""",
    "clock back": """4 clients on two nodes draw up to {sizes.clock_keys:,} keys each while their clocks,
        simulated by libfaketime, step back {sizes.steps} times by 0.1 s; so do those of PostgreSQL and
        MariaDB, but not that of Redis, which can't run under it.""",
    "faults": """The first server of each kind is stopped in order, copied and started. In each of
        two cases it is lost {losses}: clients of two nodes draw {sizes.drawn} keys each; then one of them
        draws one key after the other for {sizes.lead_s:g} s or, in bulk, sets {sizes.lead_keys:,}
        keys aside ({sizes.lead_many:,} drawn at once where its scheme can't do that); then the
        server is killed and replaced by the copy, which simulates a standby that lagged or a
        restored backup. Where the scheme has a replica, that is cut off, clients try to draw on,
        the primary is killed and the replica takes its place. After that, and counted by itself,
        the first server of each kind is killed and stays down while clients try to draw {sizes.drawn}
        keys each, and as many more as their scheme lets them hold in memory: for seconds, less than
        leases last. A PostgreSQL server is added.""",
}


FULL: Final = Sizes(
    rounds=5,
    draws=500,
    many=10_000,
    insert_s=0.3,
    spread_rounds=3,
    spread_s=0.3,
    spread_each=SPREAD,
    rows=1_000_000,
    fills=2,
    fill_s=10,
    paced_s=2.5,
    skews_ms=(0, 5, 50),
    answers_s=0.15,
    rush_s=1.5,
    rush_keys=50_000,
    steps=20,
    clock_keys=200_000,
    drawn=300,
    losses=2,
    settle_s=11,
    lead_s=0.5,
    lead_keys=8_000_000,
    lead_many=20_000,
    disk_mb=5500,
)
"""The whole run, which takes some minutes."""

QUICK: Final = Sizes(
    rounds=1,
    draws=100,
    many=1000,
    insert_s=0.06,
    spread_rounds=1,
    spread_s=0.03,
    spread_each=SPREAD // 8,
    rows=10_000,
    fills=1,
    fill_s=1,
    paced_s=0.1,
    skews_ms=(50,),
    answers_s=0.03,
    rush_s=0.08,
    rush_keys=2_000,
    steps=4,
    clock_keys=16_000,
    drawn=60,
    losses=1,
    settle_s=0,
    lead_s=0.05,
    lead_keys=100_000,
    lead_many=2_000,
    disk_mb=2500,
)
"""The quick run, which takes less than a minute and whose figures are rough."""

Found = TypeVar("Found")

NODES: Final = 2
"""How many nodes clients draw from and insert into."""

FAILURES: Final = (ShardidsError, psycopg.Error, OSError, subprocess.SubprocessError)
"""The errors that a measure may meet: a dead server, a full disk, a killed client."""


def in_words(error: Exception) -> str:
    """Return the text of a failure for a report, with the hint if it has one."""
    if isinstance(error, ShardidsError):
        return error.in_a_line()
    return str(error).strip() or type(error).__name__


@dataclass(slots=True, kw_only=True)
class Measuring:
    """A run under way.

    Attributes:
        schemes: the installed schemes, by their names.
        say: called with the run's present step.
        left_out: why a measure of a scheme is missing; by the scheme's name, then the measure's.
    """

    schemes: Mapping[str, Scheme]
    servers: Servers
    clients: Clients
    sizes: Sizes
    say: Callable[[str], None]
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, name: str, what: str, why: Exception | str) -> None:
        """Note why a measure of a scheme is missing, unless a reason is noted already."""
        self.left_out.setdefault(name, {}).setdefault(what, why if isinstance(why, str) else in_words(why))

    def rounds(self, what: str, count: int, measure: Callable[[str], Found]) -> dict[str, list[Found]]:
        """Take a measure of each scheme ``count`` times, and return the results.

        Rounds are interleaved, and each begins with another scheme, so that a slow moment of the machine
        affects all schemes alike. A scheme whose measure fails is left out of it from then on.
        """
        found: dict[str, list[Found]] = {name: [] for name in self.schemes}
        names = list(self.schemes)
        for round_ in range(count):
            turn = round_ * len(names) // count
            for name in (*names[turn:], *names[:turn]):
                if what in self.left_out.get(name, {}):
                    continue
                which = f", round {round_ + 1} of {count}" if count > 1 else ""
                self.say(f"{what}{which}: {self.schemes[name].about.title}")
                try:
                    found[name].append(measure(name))
                except FAILURES as error:
                    self.leave_out(name, what, error)
        return {name: all_ for name, all_ in found.items() if len(all_) == count}

    def each(self, what: str, measure: Callable[[str], Found]) -> dict[str, Found]:
        """Take a measure of each scheme once, and return the results."""
        return {name: only for name, (only,) in self.rounds(what, 1, measure).items()}


@contextlib.contextmanager
def connected(servers: Servers, node: int) -> Iterator[psycopg.Connection]:
    """Open an autocommit connection to a node."""
    session = PostgreSqlSession(servers.postgresql[node], what=f"node {node}")
    try:
        yield session.connection
    finally:
        session.close()


CLOCK_CLIENTS: Final = 4
"""How many clients there are under each clock in turn."""
_PROOF_S: Final = 10.0


@contextlib.contextmanager
def faked_clocks(run: Measuring) -> Iterator[tuple[Measuring, Sequence[FakedClock]]]:
    """Start other servers and clients, under a clock for each node, and install the schemes there.

    Raises:
        MissingLibrary: libfaketime is not installed.
        UnsupportedServer: libfaketime has no effect here.
        ServerStartFailed: a server does not start under it.
    """
    run.say("clocks: starting servers")
    with contextlib.ExitStack() as stack:
        clocks = [stack.enter_context(faked_clock()) for _ in range(NODES)]
        envs = [clock.env for clock in clocks]
        stage = stack.enter_context(stage_for(list(run.schemes.values()), envs=envs))
        clients = stack.enter_context(client_processes(CLOCK_CLIENTS, envs))
        faked = replace(run, servers=stage.servers, clients=clients)
        _prove(clocks, faked)
        for name, scheme in run.schemes.items():
            try:
                scheme.install(stage.servers)
            except FAILURES as error:
                for what in ("causality", "clock back"):
                    run.leave_out(name, what, error)
        yield faked, clocks


def _prove(clocks: Sequence[FakedClock], run: Measuring) -> None:
    """Step the clocks, then asks all servers and a client of each for the time.

    Raises:
        UnsupportedServer: one of them does not see the step.
    """
    for clock in clocks:
        clock.step(-_PROOF_S)
    times = run.clients.run(_telling_the_time, [()] * NODES)
    for node in range(NODES):
        with connected(run.servers, node) as connection:
            query = "select date_part('epoch', clock_timestamp())"
            times += [float(row[0]) for row in connection.execute(query)]
    if max(times) > time.time() - _PROOF_S / 2:
        raise UnsupportedServer("libfaketime is installed, but has no effect on all servers and clients")


@contextlib.contextmanager
def _telling_the_time() -> Iterator[Callable[[], float]]:
    yield time.time
