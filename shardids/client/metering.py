"""Counters and timers of sessions, in an OpenTelemetry meter; a cluster without a meter loads none of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from sqlalchemy import Engine, Result, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids.catalog.topology import Node
from shardids.client.blocks import DRAWS
from shardids.client.breaker import Breakers
from shardids.client.placement import Attempts, FollowedPlacement
from shardids.client.routing.one_shard import ShardSession
from shardids.client.routing.sessions import RoutedSession
from shardids.client.tracing import Traced, TracedFanOut, Traces
from shardids.errors import (
    BadArgument,
    ConnectionFailed,
    KeyMoved,
    ReferenceRefused,
    ShardFenced,
    ShardidsError,
    ShardMoved,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

_BEGUN: Final = "shardids_begun"


class Meters:
    """The instruments; their attributes name nodes, look-ups and classes of errors, no values or shards.

    Args:
        meter: the OpenTelemetry meter that creates them, from ``opentelemetry.metrics.get_meter(…)``.
    """

    def __init__(self, meter: Meter) -> None:
        self.sessions = meter.create_counter(
            "shardids.client.sessions", unit="{session}", description="Sessions that were opened"
        )
        self.refused = meter.create_counter(
            "shardids.client.refused_statements",
            unit="{statement}",
            description="Statements and flushes that were refused before anything was sent",
        )
        self.retries = meter.create_counter(
            "shardids.client.retries",
            unit="{transaction}",
            description="Transactions that were run again since their shard has moved, or may have",
        )
        self.clashes = meter.create_counter(
            "shardids.client.lookup_clashes",
            unit="{value}",
            description="Values of look-up keys that another shard has already",
        )
        self.fan_outs = meter.create_histogram(
            "shardids.client.fan_out.duration", unit="s", description="Statements that asked several shards"
        )
        self.statements = meter.create_histogram(
            "db.client.operation.duration", unit="s", description="Statements on a node"
        )

        self.draws = meter.create_histogram(
            "shardids.client.draw.duration",
            unit="s",
            description="INSERTs, which draw IDs, and blocks of IDs that were set aside",
        )
        self.commits = meter.create_histogram(
            "shardids.client.commit.duration", unit="s", description="COMMITs on a node"
        )
        self._meter = meter
        self.refused_calls = meter.create_counter(
            "shardids.client.refused_calls",
            unit="{call}",
            description="Calls to a node that were refused as it is down",
        )

    def show_breakers(self, breakers: Breakers, followed: FollowedPlacement) -> None:
        """Show for each node of the placement whether calls to it are refused."""
        from opentelemetry.metrics import Observation  # noqa: PLC0415 -- there, where there is a meter

        known, placement = ref(breakers), ref(followed)

        def observe(_options: CallbackOptions) -> Iterator[Observation]:
            there, at = known(), placement()
            if there is not None and at is not None:
                for name, is_open in there.are_open(at.last_read.nodes).items():
                    yield Observation(int(is_open), {"shardids.node": name})

        self._meter.create_observable_gauge(
            "shardids.client.open_breakers",
            callbacks=[observe],
            description="1 while calls to the node are refused as it is down",
        )

    def note_refused_call(self, node: Node) -> None:
        """Count a call to a node that was refused."""
        self.refused_calls.add(1, {"shardids.node": node.name})

    def note_retry(self, error: ShardidsError | DBAPIError) -> None:
        """Count a transaction that is run again after an error."""
        reason = "gone"
        kinds = ((ShardMoved | KeyMoved, "moved"), (ShardFenced, "fenced"), (ConnectionFailed, "lost"))
        for kind, name in kinds:
            if isinstance(error, kind):
                reason = name
                break
        self.retries.add(1, {"shardids.reason": reason})

    def note_clash(self, lookup: object) -> None:
        """Count a value that another shard has."""
        self.clashes.add(1, {"shardids.lookup": str(lookup)})

    def watch(self, node: Node, engine: Engine) -> None:
        """Time each statement that is executed on a node."""
        attributes = {"db.system.name": "postgresql", "shardids.node": node.name}

        def note(context: Any, attributes: dict[str, str]) -> None:
            # What SQLAlchemy itself asks a new connection does not begin here, but its failure is told.
            begun = None if context is None else vars(context).pop(_BEGUN, None)
            if begun is not None:
                seconds = time.perf_counter() - begun
                self.statements.record(seconds, attributes)
                if context.isinsert or DRAWS in context.execution_options:
                    self.draws.record(seconds, attributes)

        # SQLAlchemy has no event after a COMMIT.
        dialect: Any = engine.dialect
        commit = dialect.do_commit

        def timed(connection: Any) -> None:
            begun = time.perf_counter()
            try:
                commit(connection)
            except BaseException as error:
                failed = {"error.type": type(error).__name__}
                self.commits.record(time.perf_counter() - begun, attributes | failed)
                raise
            self.commits.record(time.perf_counter() - begun, attributes)

        dialect.do_commit = timed

        @event.listens_for(engine, "before_cursor_execute")
        def _begin(_1: Any, _2: Any, _3: Any, _4: Any, context: Any, _5: Any) -> None:
            vars(context)[_BEGUN] = time.perf_counter()

        @event.listens_for(engine, "after_cursor_execute")
        def _end(_1: Any, _2: Any, _3: Any, _4: Any, context: Any, _5: Any) -> None:
            note(context, attributes)

        @event.listens_for(engine, "handle_error")
        def _fail(context: ExceptionContext) -> None:
            failed = {"error.type": type(context.original_exception).__name__}
            note(context.execution_context, attributes | failed)


class Metered(Session):
    """A session that is counted."""

    _kind: str

    def __init__(self, *arguments: Any, meters: Meters, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.meters = meters
        self._refused: BaseException | None = None
        meters.sessions.add(1, {"shardids.session": self._kind})

    def _execute_internal(self, statement: Any, params: Any = None, **options: Any) -> Any:
        with self._counting():
            return super()._execute_internal(statement, params, **options)

    def flush(self, *arguments: Any, **options: Any) -> None:
        """Flush, and count a refusal."""
        with self._counting():
            super().flush(*arguments, **options)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except (BadArgument, ReferenceRefused) as error:
            # A flush may be a part of a statement.
            if error is not self._refused:
                self._refused = error
                self.meters.refused.add(1, {"error.type": type(error).__name__})
            raise


class MeteredFanOut(Metered):
    """A session over all shards, whose statements over several shards are timed."""

    def _ask_several(self, context: Any, named: Any) -> Result[Any]:
        begun = time.perf_counter()
        attributes = {"shardids.shards": "all" if named.shards is None else "named"}
        try:
            ask: Any = super()
            found: Result[Any] = ask._ask_several(context, named)
            return found
        except BaseException as error:
            attributes["error.type"] = type(error).__name__
            raise
        finally:
            self.meters.fan_outs.record(time.perf_counter() - begun, attributes)


@cache
def _made_of(base: Any, *mixins: Any) -> Any:
    """Return the class of sessions with what watches them; the same one each time, as caches need it."""
    if not mixins:
        return base
    kind = "shard" if base is ShardSession else "sharded"
    return type(base.__name__, (*mixins, base), {"_kind": kind, "__doc__": base.__doc__})


class SessionKinds:
    """The classes of a cluster's sessions, their keywords, and its observers.

    Attributes:
        shard: the class of sessions on one shard, and ``routed`` of those over all shards.
        options: the keywords of both classes.
    """

    def __init__(self, meter: Meter | None = None, traces: Traces | None = None) -> None:
        self.meters = None if meter is None else Meters(meter)
        self.traces = traces
        self.options: dict[str, Any] = {}
        of_shard: list[Any] = []
        of_all: list[Any] = []
        if traces is not None:
            of_shard.append(Traced)
            of_all.append(TracedFanOut)
            self.options["traces"] = traces
        if self.meters is not None:
            of_shard.append(Metered)
            of_all.append(MeteredFanOut)
            self.options["meters"] = self.meters
        # Any: mypy takes no type[Session] for hashable, as caches of classes need it.
        self.shard: Any = _made_of(ShardSession, *of_shard)
        self.routed: Any = _made_of(RoutedSession, *of_all)

    @property
    def on_retry(self) -> Callable[[ShardidsError | DBAPIError], object] | None:
        """The callback for each transaction that is run again."""
        return _all_of([one.note_retry for one in (self.meters, self.traces) if one is not None])

    @property
    def on_refused_call(self) -> Callable[[Node], object] | None:
        """The callback for each call that a breaker refuses."""
        return None if self.meters is None else self.meters.note_refused_call

    @property
    def on_clash(self) -> Callable[[object], object] | None:
        """The callback for each value that another shard has."""
        return None if self.meters is None else self.meters.note_clash

    @property
    def on_engine(self) -> Callable[[Node, Engine], object] | None:
        """The callback for each engine of a node."""
        return _all_of([one.watch for one in (self.meters, self.traces) if one is not None])

    def running(self, shard: int, attempts: Attempts) -> AbstractContextManager[None]:
        """Return a context for the attempts to run a transaction on a shard."""
        return nullcontext() if self.traces is None else self.traces.running(shard, attempts)


def _all_of(callbacks: Sequence[Callable[..., object]]) -> Callable[..., object] | None:
    if len(callbacks) < 2:
        return callbacks[0] if callbacks else None

    def call(*arguments: Any) -> None:
        for one in callbacks:
            one(*arguments)

    return call
