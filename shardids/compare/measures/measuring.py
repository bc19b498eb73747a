"""What all measures share: the schemes, where they run, and how the rounds go."""

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
"""Nodes that clients draw from and insert into."""

FAILURES: Final = (ShardidsError, psycopg.Error, OSError, subprocess.SubprocessError)
"""What may befall a measure: a server that died, a full disk, a client that was killed."""


def in_words(error: Exception) -> str:
    """What a report says of a failure, with the hint if there is one."""
    if isinstance(error, ShardidsError):
        return f"{error.message}. {error.hint}".strip() if error.hint else error.message
    return str(error).strip() or type(error).__name__


@dataclass(slots=True, kw_only=True)
class Measuring:
    """A run under way.

    Attributes:
        schemes: those that are installed, by their names.
        say: is told what is under way.
        left_out: why a measure of a scheme is missing; by the scheme's name, then the measure's.
    """

    schemes: Mapping[str, Scheme]
    servers: Servers
    clients: Clients
    sizes: Sizes
    say: Callable[[str], None]
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, name: str, what: str, why: Exception | str) -> None:
        """Notes why a measure of a scheme is missing, unless that is known."""
        self.left_out.setdefault(name, {}).setdefault(what, why if isinstance(why, str) else in_words(why))

    def rounds(self, what: str, count: int, measure: Callable[[str], Found]) -> dict[str, list[Found]]:
        """What a measure finds for each scheme, ``count`` times.

        Rounds are interleaved, and begin with another scheme each, so that a slow moment of the machine
        hits all alike. A scheme whose measure fails is left out of it from then on.
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
        """What a measure finds for each scheme, once."""
        return {name: only for name, (only,) in self.rounds(what, 1, measure).items()}


@contextlib.contextmanager
def connected(servers: Servers, node: int) -> Iterator[psycopg.Connection]:
    """An autocommit connection to a node."""
    session = PostgreSqlSession(servers.postgresql[node], what=f"node {node}")
    try:
        yield session.connection
    finally:
        session.close()
