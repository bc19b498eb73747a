"""Measurement of a scheme whose server is killed, stopped, lost for good, or added."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from shardids.compare.measures.measuring import FAILURES, Measuring
from shardids.compare.measures.uniqueness import Tally
from shardids.compare.results import Duplicates, Outage
from shardids.compare.schemes import Key, Scheme, Servers, Source
from shardids.compare.schemes.scheme import MOST_KEYS
from shardids.compare.testbed.servers import PrivateServer, RedisPair
from shardids.compare.testbed.stage import POSTGRESQL_SETTINGS, Stage
from shardids.errors import ServerStartFailed, ShardidsError
from shardids.pg.embedded import EmbeddedServer, temporary_server

Result = TypeVar("Result")

ONE_SERVER: Final = "all keys come from one server, or a fixed pair: there is nothing to add"
"""The reason why no server is added for central schemes."""

FAULTS: Final = ("crash", "restart", "lost server", "lost in bulk", "added server")
"""The cases that are counted here."""

_AT_ONCE: Final = 100
_MOST_ONE_BY_ONE: Final = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The results of one scheme; ``outage`` is None if it needs no server."""

    cases: Mapping[str, Duplicates] = field(default_factory=dict)
    outage: Outage | None = None


class _Victim(Protocol):
    """The target of all faults: the first server of a kind, or the primary of a pair."""

    def stop(self) -> None:
        """Shut it down."""

    def start(self) -> None:
        """Start it again."""

    def kill(self) -> None:
        """Kill it, as in a crash."""

    def keep_copy(self) -> None:
        """Keep the data that will be there after a loss; it does not run."""

    def hold_up(self) -> None:
        """Keep keys that are issued from now on out of the data that will be there after a loss."""

    def lose(self) -> None:
        """Kill it for good, and start its replacement."""


@dataclass(frozen=True, slots=True)
class _Single:
    """A server whose place a copy of its files takes: a standby that lagged, or a restored backup."""

    kind: str
    data: Path
    start: Callable[[], None]
    stop: Callable[[], None]
    kill: Callable[[], None]

    @property
    def _copy(self) -> Path:
        return self.data.with_name(f"{self.data.name}.copy")

    def keep_copy(self) -> None:
        self._copy_files(self.data, self._copy)

    def hold_up(self) -> None:
        return  # the copy lacks all since the beginning

    def lose(self) -> None:
        self.kill()
        shutil.rmtree(self.data)
        self._copy_files(self._copy, self.data)
        self.start()

    def _copy_files(self, source: Path, target: Path) -> None:
        # cp -a keeps the owner, which is not always this process's.
        copied = subprocess.run(  # noqa: S603  -- two paths of ours
            ["/bin/cp", "-a", source, target], capture_output=True, text=True, check=False
        )
        if copied.returncode:
            raise ServerStartFailed(f"{self.kind}'s files can't be copied: {copied.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class _Primary:
    """A primary whose place its replica takes."""

    pair: RedisPair

    def stop(self) -> None:
        self.pair.primary.stop()

    def start(self) -> None:
        self.pair.start()

    def kill(self) -> None:
        self.pair.primary.kill()

    def keep_copy(self) -> None:
        return  # the replica has it

    def hold_up(self) -> None:
        self.pair.hold_up()

    def lose(self) -> None:
        self.pair.fail_over()


class _Player:
    """One scheme, its clients on the nodes, and its keys so far."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.tally = scheme, Tally(scheme.place)
        self._clients: dict[int, Source] = {}

    def connect(self, servers: Servers) -> None:
        """Replace the clients by a new one on each node."""
        self.close()
        for node in range(len(servers.postgresql)):
            self._clients[node] = self.scheme.open(servers, node)

    def tried(self, drawn: int) -> int:
        """Return how many keys each client has to draw to draw so many beyond those it may hold."""
        return drawn + max(source.holds for source in self._clients.values())

    def draw(self, case: str, most: int) -> dict[int, int]:
        """Let all clients draw until they have enough or are refused; return how many keys each drew."""
        return {node: self._draw(source, case, most) for node, source in self._clients.items()}

    def _draw(self, source: Source, case: str, most: int) -> int:
        keys: list[Key] = []
        refusal = ""
        try:
            # One by one: clients use up blocks as an application does.
            while len(keys) < most:
                keys.append(source.draw())
        except ShardidsError as error:
            refusal = error.message
        self.tally.add(case, keys, refusal, refused=bool(refusal))
        return len(keys)

    def draw_for(self, case: str, seconds: float) -> None:
        """Let the first node's client draw one key after the other for so long, or until it has many."""
        source, end, drawn = self._clients[0], time.monotonic() + seconds, 0
        while drawn < _MOST_ONE_BY_ONE and time.monotonic() < end:
            if self._draw(source, case, _AT_ONCE) < _AT_ONCE:
                return  # refused
            drawn += _AT_ONCE

    def lead(self, case: str, aside: int, many: int) -> None:
        """Let the first node's client set keys aside; draw many at once where its scheme can't do that."""
        source = self._clients[0]
        if source.sets_aside:
            for left in range(aside, 0, -MOST_KEYS):
                self.tally.set_aside(case, source.set_aside(min(left, MOST_KEYS)))
        else:
            self.tally.add(case, source.draw_many(many))

    def close(self) -> None:
        """End the clients."""
        for source in self._clients.values():
            with contextlib.suppress(ShardidsError):
                source.close()
        self._clients.clear()


class _Play:
    """All schemes that have not failed, on the stage."""

    def __init__(self, run: Measuring, stage: Stage, stack: contextlib.ExitStack) -> None:
        self.run, self.stage, self._stack = run, stage, stack
        self.players: dict[str, _Player] = {}
        self._connected_at = time.monotonic()
        for name, scheme in run.schemes.items():
            player = self.players[name] = _Player(scheme)
            stack.callback(player.close)
        self.again("before")

    def begin_anew(self) -> None:
        """Begin another scenario; keys of the one before don't count there."""
        for player in self.players.values():
            player.tally.forget()
        self.again("before")

    def again(self, case: str) -> None:
        """Let clients connect again, and draw."""

        def go_on(player: _Player) -> None:
            player.connect(self.stage.servers)
            player.draw(case, self.run.sizes.drawn)

        self.each(case, go_on)
        self._connected_at = time.monotonic()

    def lose(self, victims: Sequence[_Victim], case: str) -> None:
        """Issue keys that the copies lack, then loses the servers."""
        sizes = self.run.sizes
        # After a server's start, shardids leads the clock by its margin: first let the clock catch up.
        time.sleep(max(0.0, self._connected_at + sizes.settle_s - time.monotonic()))
        if case == "lost in bulk":
            self.each(case, lambda player: player.lead(case, sizes.lead_keys, sizes.lead_many))
        else:
            self.each(case, lambda player: player.draw_for(case, sizes.lead_s))
        _each(victims, lambda server: server.hold_up())
        self.each(case, lambda player: player.draw(case, sizes.drawn // 3))
        _each(victims, lambda server: server.lose())
        # Clients survive it, with the keys they hold in memory.
        self.each(case, lambda player: player.draw(case, sizes.drawn // 3))
        self.again(case)

    def each(self, case: str, action: Callable[[_Player], Result]) -> dict[str, Result]:
        """Do something for each scheme; leave out a scheme that fails from then on."""
        results = {}
        for name, player in list(self.players.items()):
            try:
                results[name] = action(player)
            except FAILURES as error:
                self.run.leave_out(name, case, error)
                del self.players[name]
        return results

    def add_server(self) -> None:
        """Let the schemes that can use another server use it; the others add nothing."""
        added = self._stack.enter_context(temporary_server(settings=POSTGRESQL_SETTINGS))
        servers = replace(self.stage.servers, postgresql=(*self.stage.servers.postgresql, added.url()))

        def grow(player: _Player) -> None:
            if not player.scheme.about.central:
                player.scheme.install(servers)
                player.draw("added server", self.run.sizes.drawn)
                player.connect(servers)
                player.draw("added server", self.run.sizes.drawn)

        self.each("added server", grow)


def measure_faults(run: Measuring, stage: Stage) -> dict[str, Faults]:
    """Stop, loses and kill the first server of each kind while clients of all schemes draw; add one.

    Afterwards the stage's servers run, but hold the data of the copy.

    Raises:
        ServerStartFailed: a server does not come back.
    """
    victims = _victims(stage)
    with contextlib.ExitStack() as stack:
        play = _Play(run, stage, stack)
        run.say("faults: a server of each kind is stopped in order, and started")
        _each(victims, lambda server: server.stop())
        _each(victims, lambda server: server.keep_copy())
        _each(victims, lambda server: server.start())
        play.again("restart")
        for case in ("lost server", "lost in bulk"):
            for number in range(1, run.sizes.losses + 1):
                run.say(f"faults, {case}: a server of each kind is replaced, {number} of {run.sizes.losses}")
                play.lose(victims, case)

        play.begin_anew()
        run.say("faults: a server of each kind is killed")
        _each(victims, lambda server: server.kill())
        outages = play.each("crash", lambda player: _outage(player, run.sizes.drawn))
        _each(victims, lambda server: server.start())
        play.again("crash")
        run.say("faults: a server is added")
        play.add_server()
        return {name: _faults(player, outages[name]) for name, player in play.players.items()}


def _outage(player: _Player, drawn: int) -> Outage | None:
    """Let clients draw while the first servers are down."""
    tried = player.tried(drawn)
    keys = player.draw("crash", tried)
    needs = player.scheme.about.needs
    if not needs.any:
        return None
    server = "MariaDB" if needs.mariadb else "Redis" if needs.redis else "PostgreSQL"
    victim = "the Redis primary" if needs.redis_pair else f"the first {server} server"
    return Outage(server=victim, keys=keys, tried=tried)


def _faults(player: _Player, outage: Outage | None) -> Faults:
    cases = {case: found for case, found in player.tally.cases.items() if case != "before"}
    return Faults(cases=cases, outage=outage)


def _victims(stage: Stage) -> list[_Victim]:
    first: EmbeddedServer = stage.postgresql[0]
    others: list[tuple[str, PrivateServer]] = [("MariaDB", server) for server in stage.mariadb[:1]]
    others += [("Redis", server) for server in stage.redis[:1]]
    return [
        _Single(
            "PostgreSQL", first.data_directory, lambda: first.start(attached=True), first.stop, first.kill
        ),
        *(_Single(kind, each.folder, each.start, each.stop, each.kill) for kind, each in others),
        *map(_Primary, stage.redis_pairs),
    ]


def _each(victims: Sequence[_Victim], action: Callable[[_Victim], object]) -> None:
    """Do something to all servers at once. Raises the first error, after all have ended."""
    with ThreadPoolExecutor(len(victims)) as pool:
        list(pool.map(action, victims))
