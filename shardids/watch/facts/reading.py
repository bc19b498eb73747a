"""A reading: the answers of the catalog and all nodes within a bounded time; and rates between two."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.engine import URL

from shardids.catalog.shards import Shard, read_shards
from shardids.errors import ClusterConflict, ConnectionFailed, MissingPrivilege, ShardidsError
from shardids.ids.layout import Layout
from shardids.pg.clock import ClockSample, LocalClock
from shardids.pg.notation import named_shards
from shardids.pg.queries import prepare, read, rows
from shardids.pg.sqlfiles import read_sql
from shardids.watch.facts.asking import Question, Server, Servers, T, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's own state: the row of ``facts/node.v1.sql``.

    Attributes:
        name: the node's name, as it has it.
        cluster: the identity of its cluster, as the node has it.
        on_copy: whether its shards refuse to draw on another server, or warn.
        read_only_source: the source of the setting ``default_transaction_read_only``.
        database: the database's name, and ``role`` the session's role.
        max_ahead_s: ``next_id()`` fails at a larger lead.
        safety_margin_s: how far a new incarnation jumps ahead.
        is_standby: whether it is in recovery; then its sequences can't be read.
        is_writable: whether it takes writes of roles without settings for that.
        connections: sessions in all databases of its server.
        most_connections: ``max_connections`` of its server.
        prepared: by kind, how many transactions are prepared, and for how long the oldest has been, in s.
        slots: by kind, how many replication slots there are, how many bytes of the log the one farthest
            behind has not confirmed, how many are kept for one, and how many slots are not sure of their log.
        subscriptions: by kind, how many there are, how many of them no worker serves, and how long ago one
            last heard of its publisher, in s.
    """

    name: str
    cluster: UUID
    on_copy: str
    read_only_source: str
    database: str
    role: str
    max_ahead_s: float
    safety_margin_s: float
    is_standby: bool
    is_writable: bool
    connections: int
    most_connections: int
    prepared: Mapping[str, tuple[int, float]]
    slots: Mapping[str, tuple[int, int | None, int | None, int]]
    subscriptions: Mapping[str, tuple[int, int, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A shard that has moved away, or whose sequences are gone: a row of ``facts/stopped.v1.sql``."""

    shard: int
    moved_to: str | None
    has_schema: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """A node's answer, as far as it came.

    Attributes:
        seconds: the time until it was complete.
        read_at: when its shards were read, by this machine's monotonic clock, in s.
        error: why not all of it could be read.
        clock: how far its clock is ahead of this machine's.
        state: its own state.
        shards: its shards, old copies among them, as far as they could be read; ``None`` if none could.
        has_all_shards: whether these are all of them.
        stopped: more of those that have moved away or are broken.
    """

    seconds: float
    read_at: float = 0.0
    error: ShardidsError | None = None
    clock: ClockSample | None = None
    state: NodeState | None = None
    shards: Sequence[Shard] | None = None
    has_all_shards: bool = False
    stopped: Sequence[Stopped] = ()

    @property
    def is_up(self) -> bool:
        """Returns whether the node answered, and is that node."""
        return self.state is not None and not isinstance(self.error, ConnectionFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMove:
    """A move that is not over; ``age_s``: since it was begun; ``is_running``: a process works at it."""

    shard: int
    source: str
    target: str
    step: str
    is_running: bool
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenKeyMove:
    """A move of a key's rows between two shards that is not over.

    ``is_unsettled``: statements over several shards with one of these are refused.
    """

    key: str
    kind: str
    source: int
    target: int
    step: str
    is_unsettled: bool
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoss:
    """A shard that was lost with ``node`` and placed on ``home``, which is not activated yet."""

    shard: int
    node: str
    home: str
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogState:
    """The catalog's state: the row of ``facts/catalog.v1.sql``.

    Attributes:
        nodes: the nodes' URLs, by name.
        schema_prefix: the prefix of the names of shards' schemas.
        placed: the shards of a node, by node and by the state of their placement.
        adoption: the state of the open adoption: ``running``, ``paused`` or ``waiting``.
        node_regions: the regions of the nodes that have one.
        regions: the shards of each region, also those that are not placed.
        is_migrating: whether a run of the application's migrations is under way.
        references_change: whether a process changes which reference tables there are, or who follows.
        rebalance: the session of the rebalance that is under way.
        automatic_moves: how many moves of ``rebalance --watch`` there were, by outcome.
    """

    cluster: UUID
    version: int
    layout: Layout
    shard_count: int
    schema_prefix: str
    nodes: Mapping[str, str]
    placed: Mapping[tuple[str, str], frozenset[int]]
    moves: Sequence[OpenMove]
    key_moves: Sequence[OpenKeyMove] = ()
    losses: Sequence[OpenLoss] = ()
    adoption: str | None
    node_regions: Mapping[str, str]
    regions: Mapping[str, frozenset[int]]
    is_migrating: bool = False
    references_change: bool = False
    rebalance: str | None = None
    automatic_moves: Mapping[str, int] = field(default_factory=dict)

    @property
    def shard_total(self) -> int:
        """Returns the number of shards, also of those after the ones that keys are hashed over."""
        return max(self.shard_count, 1 + max(chain.from_iterable(self.placed.values()), default=0))

    @classmethod
    def from_row(cls, **row: Any) -> CatalogState:
        """Make it of the row's columns."""
        bits = {name: row[name] for name in ("epoch_ms", "time_bits", "shard_bits", "sequence_bits")}
        return cls(
            cluster=row["cluster"],
            version=row["version"],
            layout=Layout(name=row["layout_name"], **bits),
            shard_count=row["shard_count"],
            schema_prefix=row["schema_prefix"],
            nodes=row["nodes"],
            placed={(node, state): frozenset(shards) for node, state, shards in row["placements"]},
            moves=[OpenMove(**move) for move in row["moves"]],
            key_moves=[OpenKeyMove(**move) for move in row["key_moves"]],
            losses=[OpenLoss(**loss) for loss in row["losses"]],
            adoption=row["adoption"],
            node_regions=row["node_regions"],
            regions={name: frozenset(range(first, last + 1)) for name, first, last in row["regions"]},
            is_migrating=row["is_migrating"],
            references_change=row["references_change"],
            rebalance=row["rebalance"],
            automatic_moves=row["automatic_moves"],
        )

    def outside(self, node: str) -> frozenset[int]:
        """Return the shards that are placed on a node and not of its region."""
        placed = self.placed.get((node, "active"), frozenset())
        region = self.node_regions.get(node)
        if region is not None:
            return placed - self.regions[region]
        return placed & frozenset().union(*self.regions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The answers of a whole cluster at one time.

    Attributes:
        known: the catalog's last answer; ``None`` if it has never answered.
        catalog_error: why it did not answer this time.
        nodes: the answers of the nodes in the catalog's last answer.
        seconds: the time of the whole reading.
    """

    known: CatalogState | None
    catalog_error: ShardidsError | None
    nodes: Mapping[str, NodeAnswer] = field(default_factory=dict)
    seconds: float


INTERVAL_S: Final = 0.5
"""The shortest time between two looks whose difference is a rate."""
_STEP_MS: Final = 16
"""A shard that follows the clock is ahead of it by less: the increment of its ``id_offset``."""


def drawn(before: Shard, after: Shard) -> int:
    """Return how many ticks were drawn one by one between two looks; 0 if the sequences are others now.

    A draw takes one for its ID, and another before it if the shard lags. Blocks raise the offset, and so do
    ``after=`` and a new incarnation: the sequences can't tell them apart, so none of them counts here.
    """
    return after.drawn - before.drawn if _is_later(before, after) else 0


def advanced_ms(before: Shard, after: Shard, layout: Layout) -> int:
    """Return how far blocks and reservations took a shard ahead of the clock between two looks, in ms.

    If a shard leads at both looks, this is the rise of its offset. If it leads only at the second one, part
    of that rise may have followed the clock: then this is the lead without the single draws. A lead that the
    clock has caught up with before the second look is not seen.
    """
    rise_ms = (after.offset_ms or 0) - (before.offset_ms or 0)
    if rise_ms <= 0 or not _is_later(before, after):
        return 0
    leads = before.lead_ms(layout), after.lead_ms(layout)
    if leads[0] is None or leads[1] is None or leads[1] <= _STEP_MS:
        return 0
    if leads[0] <= _STEP_MS:
        own_ms = leads[1] - (drawn(before, after) >> layout.sequence_bits)
        rise_ms = min(rise_ms, own_ms) if own_ms > _STEP_MS else 0
    return max(0, rise_ms)


def _is_later(before: Shard, after: Shard) -> bool:
    return before.counter == after.counter and after.drawn >= before.drawn


class NodeRates:
    """The rates of a node's shards, from look to look.

    Attributes:
        drawn: the number of ticks that were drawn since the first look.
        advanced_ms: how far the shards were taken ahead since then, all together, in ms.
        per_second: the ticks drawn per second from each shard, without idle ones; ``None`` before the second
            look.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.advanced_ms = 0
        self.per_second: Mapping[int, float] | None = None
        self._looked_at: float | None = None
        self._before: dict[int, tuple[float, Shard]] = {}

    def look(self, shards: Sequence[Shard], at: float, layout: Layout) -> None:
        """Take a look at ``at``, in seconds of a clock that never steps. One too soon changes nothing.

        A shard that is not seen this time counts from its last look on when it is seen again.
        """
        seconds = None if self._looked_at is None else at - self._looked_at
        if seconds is not None and seconds < INTERVAL_S:
            return
        per_second: dict[int, float] = {}
        for shard in shards:
            if shard.offset_ms is None:
                continue
            if shard.shard in self._before:
                then, before = self._before[shard.shard]
                self.advanced_ms += advanced_ms(before, shard, layout)
                if count := drawn(before, shard):
                    self.drawn += count
                    per_second[shard.shard] = count / (at - then)
            self._before[shard.shard] = at, shard
        if seconds is not None:
            self.per_second = per_second
        self._looked_at = at


TIMEOUT_S: Final = 5.0
"""The most time of a reading; Prometheus waits 10 s by default."""


class Asker:
    """A reader of a cluster for repeated readings, by one thread at a time.

    It logs in to the nodes as the user of the catalog's URL. Its transactions are read-only. It does not ask
    a late server again before its answer has come, or the connection was given up.

    Args:
        catalog_url: the catalog.
        timeout_s: the most time of a reading, in seconds; half of it is for the catalog.
    """

    def __init__(self, catalog_url: str | URL, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._servers = Servers(
            catalog_url, name="shardids metrics", connect_timeout_s=max(2, math.ceil(timeout_s))
        )
        self._standing: dict[Server, Future[Any]] = {}
        self._known: CatalogState | None = None

    def read(self) -> Reading:
        """Return the present answers of the catalog and the nodes, also for servers that do not answer."""
        begun = time.monotonic()
        error = self._ask_catalog()
        answers = {} if self._known is None else self._ask_nodes(self._known, begun)
        return Reading(
            known=self._known, catalog_error=error, nodes=answers, seconds=time.monotonic() - begun
        )

    def rest(self) -> None:
        """Close the connections; the next reading opens others. Call it while nothing is read."""
        if all(question.done() for question in self._standing.values()):
            self._servers.rest()

    def close(self) -> None:
        """Close the connections."""
        self._servers.close()

    def _asked(self, server: Server, question: Question[T]) -> Future[T | ShardidsError]:
        """While a server has not answered, the same question stands."""
        if server not in self._standing or self._standing[server].done():
            self._standing[server] = server.asked(question)
        return self._standing[server]

    def _ask_catalog(self) -> ShardidsError | None:
        question = self._asked(self._servers.catalog, read_catalog)
        wait([question], self._timeout_s / 2)
        answer = question.result() if question.done() else _silent("the catalog", self._timeout_s / 2)
        if isinstance(answer, ShardidsError):
            return answer
        self._known = answer
        return None

    def _ask_nodes(self, known: CatalogState, begun: float) -> Mapping[str, NodeAnswer]:
        self._servers.keep(known.nodes.items())
        clock = LocalClock()
        servers = {name: self._servers.node(name, url) for name, url in sorted(known.nodes.items())}
        there = {self._servers.catalog, *servers.values()}
        self._standing = {server: question for server, question in self._standing.items() if server in there}
        questions = {
            name: self._asked(server, partial(_ask_node, name, known.cluster, clock))
            for name, server in servers.items()
        }
        wait(questions.values(), max(0.0, begun + self._timeout_s - time.monotonic()))
        waited_s = time.monotonic() - begun
        answers: dict[str, NodeAnswer] = {}
        for name, question in questions.items():
            answer = question.result() if question.done() else _silent(f'node "{name}"', waited_s)
            if isinstance(answer, ShardidsError):
                answer = NodeAnswer(seconds=waited_s, error=answer)
            answers[name] = answer
        return answers


def _silent(what: str, seconds: float) -> ConnectionFailed:
    return ConnectionFailed(f"{what} has not answered within {seconds:.1f} s")


def read_catalog(connection: Connection) -> CatalogState:
    """Return the catalog's state, in a new transaction.

    Raises:
        ClusterConflict: it has no cluster.
    """
    with connection.begin():
        prepare(connection)
        found = rows(connection, read_sql("facts/catalog.v1"), CatalogState.from_row)
    if not found:
        raise ClusterConflict("the catalog has no cluster", hint="Restore it from a backup.")
    return found[0]


def _ask_node(name: str, cluster: UUID, clock: LocalClock, connection: Connection) -> NodeAnswer:
    begun = time.monotonic()

    def fields(_is_repeated: bool) -> Iterator[dict[str, Any]]:
        yield {"clock": clock.compare(connection)}
        state = _read_state(connection, name, cluster)
        yield {"state": state}
        if state.is_standby:
            return
        shards: list[Shard] = []
        for batch in read_shards(connection):
            shards += batch
            yield {"shards": shards, "read_at": time.monotonic()}
        if any(shard.state in ("moved", "broken") for shard in shards):
            yield {"stopped": read(connection, "facts/stopped.v1", Stopped)}
        yield {"has_all_shards": True}
        _require_readable(name, shards)

    known = collect(fields)
    return NodeAnswer(seconds=time.monotonic() - begun, **known)


def _read_state(connection: Connection, name: str, cluster: UUID) -> NodeState:
    found = read(connection, "facts/node.v1", NodeState)
    if len(found) != 1 or (found[0].name, found[0].cluster) != (name, cluster):
        there = f'node "{found[0].name}" of cluster {found[0].cluster}' if found else "no node"
        raise ClusterConflict(
            f'the database at the URL of node "{name}" is {there}',
            hint="Correct the node's URL, or restore the right database there.",
        )
    return found[0]


def _require_readable(name: str, shards: Sequence[Shard]) -> None:
    hidden = [shard.shard for shard in shards if shard.state == "unreadable"]
    if hidden:
        raise MissingPrivilege(
            f'node "{name}": the role may not read the sequences of {named_shards(hidden)}',
            hint="It needs SELECT on them, as members of pg_read_all_data have it.",
        )
