"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from psycopg import sql

from shardids.pg.notation import shown_shards
from shardids.watch.facts.cluster import ClusterFacts


class Severity(StrEnum):
    """The severity of a finding; at ``info`` nothing is wrong."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Where(StrEnum):
    """Where a command of a remedy is to be run; SQL for a node is with the node's name."""

    SHELL = "shell"
    CATALOG = "catalog"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A remedy that can be pasted: a ``shardids`` command, or SQL for the catalog or for a node.

    ``step`` is its purpose where commands are steps: each is to be run if the one before went well.
    """

    where: Where
    text: str
    node: str = ""
    step: str = ""

    @property
    def place(self) -> str:
        """Returns the place in words."""
        return {
            Where.SHELL: "in a shell",
            Where.CATALOG: "on the catalog",
            Where.NODE: f'on node "{self.node}"',
        }[self.where]


def in_shell(*lines: str) -> tuple[Command, ...]:
    """Return commands for a shell."""
    return tuple(Command(where=Where.SHELL, text=line) for line in lines)


def step(says: str, line: str) -> Command:
    """Return a command for a shell that is one of several steps."""
    return Command(where=Where.SHELL, text=line, step=says)


def on_catalog(*statements: str) -> tuple[Command, ...]:
    """Return statements for the database with the catalog."""
    return tuple(Command(where=Where.CATALOG, text=statement) for statement in statements)


def on_node(node: str, *statements: str) -> tuple[Command, ...]:
    """Return statements for a node."""
    return tuple(Command(where=Where.NODE, node=node, text=statement) for statement in statements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a check. ``severity`` is the check's own unless it is given here.

    ``what`` is a sentence with the figures. ``to_do`` is the next step in words, ``commands`` are its
    commands, to paste. ``nodes``, ``shards`` and ``thing`` give the place: ``thing`` is an object's name,
    without the schema if it is the same in several shards.
    """

    what: str
    to_do: str = ""
    commands: tuple[Command, ...] = ()
    nodes: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    thing: str = ""
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding, with the check's name: see :class:`Found`."""

    check: str
    severity: Severity
    what: str
    to_do: str
    commands: tuple[Command, ...]
    nodes: tuple[str, ...]
    shards: tuple[int, ...]
    thing: str


Key = TypeVar("Key", bound=Hashable)
Judge = Callable[[ClusterFacts], Iterable[Found]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A question with a stable name. ``judge`` is pure: facts in, findings out.

    ``finds`` describes its findings, ``remedy`` the general remedy for them.
    """

    name: str
    severity: Severity
    finds: str
    remedy: str
    judge: Judge

    def findings(self, facts: ClusterFacts) -> Iterator[Finding]:
        """Yield the findings in a cluster."""
        for found in self.judge(facts):
            yield Finding(
                check=self.name,
                severity=found.severity or self.severity,
                what=found.what,
                to_do=found.to_do,
                commands=found.commands,
                nodes=found.nodes,
                shards=found.shards,
                thing=found.thing,
            )


def check(name: str, severity: Severity, *, remedy: str) -> Callable[[Judge], Check]:
    """Turn a function into a :class:`Check`; its docstring describes the findings."""

    def named(judge: Judge) -> Check:
        finds = " ".join((judge.__doc__ or "").split())
        return Check(name=name, severity=severity, finds=finds, remedy=remedy, judge=judge)

    return named


def grouped(pairs: Iterable[tuple[Key, int]]) -> dict[Key, tuple[int, ...]]:
    """Group shards by key; the shards of each are sorted."""
    groups: dict[Key, set[int]] = {}
    for key, shard in pairs:
        groups.setdefault(key, set()).add(shard)
    return {key: tuple(sorted(shards)) for key, shards in groups.items()}


def literal(text: str) -> str:
    """Return a string as SQL writes it."""
    return sql.Literal(text).as_string()


def call(function: str, shards: Collection[int]) -> str:
    """Return SQL that calls a function of schema ``shardids`` for shards."""
    if len(shards) == 1:
        return f"select shardids.{function}({shown_shards(shards)});"
    array = ",".join(map(str, sorted(shards)))
    return f"select shardids.{function}(shard) from unnest('{{{array}}}'::integer[]) shard;"
