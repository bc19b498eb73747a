"""What all measures share: the schemes, where they run, and the order of the rounds."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import psycopg

from shardids.compare.measures.sizes import Sizes
from shardids.compare.schemes import Scheme, Servers
from shardids.compare.testbed.clients import Clients
from shardids.errors import ShardidsError
from shardids.multimaster.postgresql_session import PostgreSqlSession

Found = TypeVar("Found")

NODES: Final = 2
"""How many nodes clients draw from and insert into."""

FAILURES: Final = (ShardidsError, psycopg.Error, OSError, subprocess.SubprocessError)
"""The errors that a measure may meet: a dead server, a full disk, a killed client."""


def in_words(error: Exception) -> str:
    """Returns what a report says of a failure, with the hint if there is one."""
    if isinstance(error, ShardidsError):
        return error.in_a_line()
    return str(error).strip() or type(error).__name__


@dataclass(slots=True, kw_only=True)
class Measuring:
    """A run under way.

    Attributes:
        schemes: the installed schemes, by their names.
        say: called with what the run is doing.
        left_out: why a measure of a scheme is missing; by the scheme's name, then the measure's.
    """

    schemes: Mapping[str, Scheme]
    servers: Servers
    clients: Clients
    sizes: Sizes
    say: Callable[[str], None]
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, name: str, what: str, why: Exception | str) -> None:
        """Notes why a measure of a scheme is missing, unless a reason is noted already."""
        self.left_out.setdefault(name, {}).setdefault(what, why if isinstance(why, str) else in_words(why))

    def rounds(self, what: str, count: int, measure: Callable[[str], Found]) -> dict[str, list[Found]]:
        """Takes a measure of each scheme ``count`` times, and returns the results.

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
        """Takes a measure of each scheme once, and returns the results."""
        return {name: only for name, (only,) in self.rounds(what, 1, measure).items()}


@contextlib.contextmanager
def connected(servers: Servers, node: int) -> Iterator[psycopg.Connection]:
    """Opens an autocommit connection to a node."""
    session = PostgreSqlSession(servers.postgresql[node], what=f"node {node}")
    try:
        yield session.connection
    finally:
        session.close()
