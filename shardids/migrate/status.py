"""Where a cluster stands: each shard's revision, which shards lag, and whether shards are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine

from shardids.catalog.nodes import Nodes
from shardids.catalog.objects import SchemaObject, by_shard, differences, odd_shards, read_objects
from shardids.catalog.revisions import revisions_on
from shardids.catalog.topology import Placement
from shardids.errors import (
    ConnectionFailed,
    MissingPrivilege,
    ShardidsError,
    StatementFailed,
    UnknownShard,
)
from shardids.migrate.environment import Environment, Recorded
from shardids.migrate.plan import Heads, Position, Start
from shardids.pg.reader import HINT, Refused

_DROPPED: Final = ("42P01", "3F000")
"""SQLSTATEs of a table or schema that was dropped meanwhile, as the old copy of a moved shard is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The shards that could be asked, by number, and the nodes and shards that could not, with the reason."""

    positions: Mapping[int, Position]
    down: Mapping[str, ShardidsError]
    unread: Mapping[int, ShardidsError]

    def check(self) -> None:
        """Raise the first reason why a shard could not be asked, if there is one."""
        for error in (*self.down.values(), *self.unread.values()):
            raise error


def read_state(nodes: Nodes, placement: Placement, shards: Collection[int], version_table: str) -> State:
    """Ask every node that owns one of the shards for their revisions.

    Raises:
        StatementFailed: a node's engine is older than migrations.
    """
    wanted = placement.by_node(shards)
    answers = nodes.each(lambda name, engine: read_node(name, engine, version_table), wanted)
    for error in answers.failures.values():
        if not isinstance(error, ConnectionFailed):
            raise error
    positions: dict[int, Position] = {}
    unread: dict[int, ShardidsError] = {}
    for name, there in answers.results.items():
        for shard in wanted[name]:
            found = there.get(shard, _missing(shard, name))
            if isinstance(found, Position):
                positions[shard] = found
            else:
                unread[shard] = found
    return State(positions=positions, down=answers.failures, unread=unread)


def read_node(name: str, engine: Engine, version_table: str) -> dict[int, Position | ShardidsError]:
    """Ask a node for the revisions of all its shards; of one whose version table can't be read, why.

    Raises:
        ConnectionFailed: the node is down.
        StatementFailed: its engine is older than migrations.
    """
    try:
        there = revisions_on(engine, f'node "{name}"', version_table)
    except StatementFailed as error:
        if error.sqlstate == "42883":
            raise StatementFailed(
                f'node "{name}" has an engine that is too old for migrations',
                hint="To bring shardids' own objects up to date: shardids upgrade",
            ) from error
        raise
    found: dict[int, Position | ShardidsError] = {}
    for shard, (revisions, unfinished) in there.items():
        if not isinstance(revisions, Refused):
            found[shard] = Position(shard=shard, node=name, heads=revisions, unfinished=unfinished)
        elif revisions.sqlstate not in _DROPPED:
            found[shard] = MissingPrivilege(
                f'the revisions of shard {shard} can\'t be read: {revisions.reason} [node "{name}"]',
                hint=HINT if revisions.is_skipped else "",
            )
    return found


@contextmanager
def in_transactions(engine: Engine) -> Iterator[Connection]:
    """Yield a connection to a node for queries that set what holds in their transaction."""
    with engine.connect() as connection:
        # The option stays on the connection, and is reset when it goes back to the pool.
        yield connection.execution_options(isolation_level="READ COMMITTED")


def _missing(shard: int, node: str) -> UnknownShard:
    return UnknownShard(
        f'the catalog places shard {shard} on node "{node}", which does not have it',
        hint="Restore its schema there from a backup, or see what else can be done: shardids doctor",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """A revision whose source differs from the one that shards ran, with the hashes of both."""

    revision: str
    message: str
    ran: str
    now: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A cluster's revisions, compared with those of the code.

    ``counts`` is the number of shards of a node at a revision, ``stragglers`` the shards behind the most
    advanced one, ``unfinished`` those half way through a revision, and ``pending`` the revisions that some
    shard has still to run, as (revision, message). ``edited`` are those that are not what shards ran.
    """

    counts: dict[tuple[str, Heads], int]
    stragglers: tuple[Position, ...]
    unfinished: tuple[Position, ...]
    pending: tuple[tuple[str, str], ...]
    edited: tuple[Edited, ...]
    state: State


def compare_with_code(
    environment: Environment, state: State, recorded: Mapping[str, Sequence[Recorded]]
) -> Standing:
    """Compare the shards' revisions with each other and with those of the code.

    ``recorded`` are the hashes that the shards of each node recorded.
    """
    positions = list(state.positions.values())
    behind = {heads: _known_ancestors(environment, heads) for heads in {p.heads for p in positions}}
    best = max(map(len, behind.values()), default=0)
    common = set.intersection(*behind.values()) if behind else set()
    counts = Counter((p.node, p.heads or ()) for p in positions)
    return Standing(
        counts=dict(sorted(counts.items(), key=lambda entry: entry[0])),
        stragglers=tuple(p for p in positions if len(behind[p.heads]) < best),
        unfinished=tuple(p for p in positions if p.unfinished is not None),
        pending=tuple(
            (script.revision, script.doc)
            for script in reversed(list(environment.script.walk_revisions()))
            if script.revision not in common
        ),
        edited=_edited(environment, state, recorded),
        state=state,
    )


def _known_ancestors(environment: Environment, heads: Start) -> set[str]:
    return environment.ancestors([revision for revision in heads or () if environment.knows(revision)])


def _edited(
    environment: Environment, state: State, recorded: Mapping[str, Sequence[Recorded]]
) -> tuple[Edited, ...]:
    """Return the revisions that shards ran and whose source is another now, once for each hash."""
    found: dict[tuple[str, str], set[int]] = {}
    for node, there in recorded.items():
        for one in there:
            heads: dict[Start, list[int]] = {}
            for shard in one.shards:
                position = state.positions.get(shard)
                if position is not None and position.node == node:
                    heads.setdefault(position.heads, []).append(shard)
            for start, shards in heads.items():
                for revision in _changed(environment, start, one.hashes):
                    found.setdefault((revision, one.hashes[revision]), set()).update(shards)
    return tuple(
        Edited(
            revision=revision,
            message=environment.revision(revision).doc,
            ran=ran,
            now=environment.hash_of(revision) or "",
            shards=tuple(sorted(shards)),
        )
        for (revision, ran), shards in sorted(found.items())
    )


def edited_for_node(environment: Environment, heads: Heads, recorded: Sequence[Recorded]) -> list[str]:
    """Return the node revisions that a node at ``heads`` ran and whose source is another now."""
    return [
        revision
        for one in recorded
        if not one.shards
        for revision in sorted(_changed(environment, heads, one.hashes))
    ]


def _changed(environment: Environment, start: Start, hashes: Mapping[str, str]) -> list[str]:
    """Return those of the revisions that ``start`` implies which were recorded with another hash."""
    return [
        revision
        for revision in _known_ancestors(environment, start)
        if environment.hash_of(revision) not in (None, hashes.get(revision)) and revision in hashes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDifference:
    """The lines that a shard has and the reference lacks (``+``), and the reverse (``-``)."""

    shard: int
    node: str
    lines: tuple[str, ...]


def unlike(
    nodes: Nodes, placement: Placement, reference: int, shards: Sequence[int]
) -> list[ShardDifference]:
    """Return the shards whose objects differ from a reference shard's. Asks all nodes at once.

    Raises:
        ConnectionFailed: a node is down.
    """
    wanted = placement.by_node((reference, *shards))
    answers = nodes.each(lambda name, engine: _objects(engine, wanted[name]), wanted).all()
    objects = [one for there in answers.values() for one in there]
    odd = odd_shards(objects, reference, shards)
    definitions = by_shard(objects, {reference, *odd})
    expected = definitions.get(reference, {})
    return [
        ShardDifference(
            shard=shard,
            node=placement.node_of[shard],
            lines=tuple(differences(expected, definitions.get(shard, {}))),
        )
        for shard in sorted(odd)
    ]


def _objects(engine: Engine, shards: Sequence[int]) -> list[SchemaObject]:
    with in_transactions(engine) as connection:
        return read_objects(connection, shards)
