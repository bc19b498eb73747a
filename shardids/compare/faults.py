"""What a scheme does when a server is killed, stopped, lost for good, or added."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardids.baselines import Key, Scheme, Servers, Source
from shardids.baselines.servers import PrivateServer
from shardids.compare.duplicates import Tally
from shardids.compare.inserts import NODES
from shardids.compare.results import Duplicates, Outage
from shardids.compare.stage import POSTGRESQL_SETTINGS, Stage
from shardids.embedded import temporary_server
from shardids.errors import ShardidsError

ONE_SERVER: Final = "all keys come from one server, or a fixed pair: there is nothing to add"

CENTRAL: Final = frozenset({"sequence", "identity", "tickets", "ranges", "redis", "redis-blocks"})
"""Schemes whose keys all come from one server, or a fixed pair."""
_IN_HAND: Final = 100
_DRAWN: Final = 300
_TRIED: Final = 2100
"""Draws while a server is down: more than what a client can have in hand, two ranges of 1,000."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What was found about one scheme; ``outage`` is None for those that need no server."""

    cases: Mapping[str, Duplicates] = field(default_factory=dict)
    outage: Outage | None = None


@dataclass(frozen=True, slots=True)
class _Server:
    """The first server of a kind, which is what everything happens to."""

    kind: str
    data: Path
    start: Callable[[], None]
    stop: Callable[[], None]
    kill: Callable[[], None]

    @property
    def copy(self) -> Path:
        return self.data.with_name(f"{self.data.name}.copy")


class _Player:
    """A scheme, its clients on the nodes, and its keys so far."""

    def __init__(self, scheme: Scheme, servers: Servers) -> None:
        self.scheme, self.tally = scheme, Tally()
        self._clients: dict[int, Source] = {}
        self.connect(servers)

    def connect(self, servers: Servers, nodes: int = NODES) -> None:
        """New clients, in place of those that there are."""
        self.close()
        for node in range(nodes):
            self._clients[node] = self.scheme.open(servers, node)

    def draw(self, case: str, most: int = _DRAWN) -> dict[int, int]:
        """All clients draw, until they have enough or are refused; gives how many each drew."""
        return {node: self._draw(source, case, most) for node, source in self._clients.items()}

    def _draw(self, source: Source, case: str, most: int) -> int:
        keys: list[Key] = []
        refusal = ""
        try:
            # One by one: blocks are drawn from as they are by an application.
            while len(keys) < most:
                keys.append(source.draw())
        except ShardidsError as error:
            refusal = error.message
        self.tally.add(case, keys, refusal)
        return len(keys)

    def close(self) -> None:
        """Ends the clients."""
        for source in self._clients.values():
            with contextlib.suppress(ShardidsError):
                source.close()
        self._clients.clear()


def measure_faults(
    schemes: Mapping[str, Scheme], stage: Stage, say: Callable[[str], None]
) -> dict[str, Faults]:
    """Kills, stops and loses the first server of each kind, with clients of all schemes at work; adds one.

    Afterwards the stage's servers run, but hold what the copy held.
    """
    victims = _victims(stage)
    with contextlib.ExitStack() as stack:
        players = {name: _Player(scheme, stage.servers) for name, scheme in schemes.items()}
        for player in players.values():
            stack.callback(player.close)
            player.draw("before")

        say("faults: a server of each kind is killed")
        _each(victims, lambda server: server.kill())
        outages = {name: player.draw("crash", _TRIED) for name, player in players.items()}
        _each(victims, lambda server: server.start())
        _again(players, stage.servers, "crash")

        say("faults: a server of each kind is stopped in order, and started")
        _each(victims, lambda server: server.stop())
        _each(victims, _copy)
        _each(victims, lambda server: server.start())
        _again(players, stage.servers, "restart")

        say("faults: a server of each kind is lost, and replaced by the copy from before the last keys")
        _each(victims, _replace_by_copy)
        # Clients live on through it, with what they have in hand.
        for player in players.values():
            player.draw("lost server", _IN_HAND)
        _again(players, stage.servers, "lost server")

        say("faults: a server is added")
        _add_server({name: player for name, player in players.items() if name not in CENTRAL}, stage)
        return {name: _faults(player, outages[name]) for name, player in players.items()}


def _again(players: Mapping[str, _Player], servers: Servers, case: str) -> None:
    for player in players.values():
        player.connect(servers)
        player.draw(case)


def _add_server(players: Mapping[str, _Player], stage: Stage) -> None:
    with temporary_server(settings=POSTGRESQL_SETTINGS) as added:
        urls = (*stage.servers.postgresql, added.url())
        servers = Servers(postgresql=urls, mariadb=stage.servers.mariadb, redis=stage.servers.redis)
        for player in players.values():
            # What a lost server led to is over: only keys from here on count.
            player.tally.seen.clear()
            player.draw("added server")
            player.scheme.install(servers)
            player.draw("added server")
            player.connect(servers, nodes=NODES + 1)
            player.draw("added server")
            player.close()


def _faults(player: _Player, drawn: Mapping[int, int]) -> Faults:
    needs = player.scheme.about.needs
    server = "MariaDB" if needs.mariadb else "Redis" if needs.redis else "PostgreSQL"
    cases = {case: found for case, found in player.tally.cases.items() if case != "before"}
    if not (needs.postgresql or needs.mariadb or needs.redis):
        return Faults(cases=cases)
    return Faults(cases=cases, outage=Outage(server=f"the first {server} server", keys=drawn, tried=_TRIED))


def _victims(stage: Stage) -> list[_Server]:
    first = stage.postgresql[0]
    victims = [
        _Server(
            "PostgreSQL", first.data_directory, lambda: first.start(attached=True), first.stop, first.kill
        )
    ]
    others: list[tuple[str, PrivateServer]] = [("MariaDB", server) for server in stage.mariadb[:1]]
    others += [("Redis", server) for server in stage.redis[:1]]
    return victims + [_Server(kind, each.folder, each.start, each.stop, each.kill) for kind, each in others]


def _each(victims: list[_Server], action: Callable[[_Server], object]) -> None:
    for server in victims:
        action(server)


def _copy(server: _Server) -> None:
    # cp -a keeps the owner, which is not always this process's.
    subprocess.run(["cp", "-a", server.data, server.copy], check=True)  # noqa: S603, S607


def _replace_by_copy(server: _Server) -> None:
    server.kill()
    shutil.rmtree(server.data)
    server.copy.rename(server.data)
    server.start()
