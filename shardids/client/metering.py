"""Counts and times what sessions do, by a meter of OpenTelemetry; a cluster without one has nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, Result, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids.catalog.topology import Node
from shardids.client.routing import RoutedSession, ShardSession
from shardids.errors import (
    BadArgument,
    ConnectionFailed,
    ReferenceRefused,
    ShardFenced,
    ShardidsError,
    ShardMoved,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

_BEGUN: Final = "shardids_begun"


class Meters:
    """The instruments; their attributes name nodes, look-ups and classes of errors, no values or shards.

    Args:
        meter: what makes them, as ``opentelemetry.metrics.get_meter(…)`` returns it.
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

    def note_retry(self, error: ShardidsError | DBAPIError) -> None:
        """Counts a transaction that is run again after an error."""
        reason = "gone"
        for kind, name in ((ShardMoved, "moved"), (ShardFenced, "fenced"), (ConnectionFailed, "lost")):
            if isinstance(error, kind):
                reason = name
                break
        self.retries.add(1, {"shardids.reason": reason})

    def note_clash(self, lookup: object) -> None:
        """Counts a value that another shard has."""
        self.clashes.add(1, {"shardids.lookup": str(lookup)})

    def watch(self, node: Node, engine: Engine) -> None:
        """Times each statement that is executed on a node."""
        attributes = {"db.system.name": "postgresql", "shardids.node": node.name}

        def note(context: Any, attributes: dict[str, str]) -> None:
            # What SQLAlchemy itself asks a new connection does not begin here, but its failure is told.
            begun = None if context is None else vars(context).pop(_BEGUN, None)
            if begun is not None:
                self.statements.record(time.perf_counter() - begun, attributes)

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


class _Metered(Session):
    """What the two classes below add to theirs."""

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


class MeteredShardSession(_Metered, ShardSession):
    """A session on one shard that is counted."""

    _kind = "shard"


class MeteredRoutedSession(_Metered, RoutedSession):
    """A session over all shards that is counted."""

    _kind = "sharded"

    def _ask_several(self, context: Any, named: Any) -> Result[Any]:
        begun = time.perf_counter()
        attributes = {"shardids.shards": "all" if named.shards is None else "named"}
        try:
            return super()._ask_several(context, named)
        except BaseException as error:
            attributes["error.type"] = type(error).__name__
            raise
        finally:
            self.meters.fan_outs.record(time.perf_counter() - begun, attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKinds:
    """The classes of a cluster's sessions, what they are made with, and what else is counted."""

    # Any: mypy takes no type[Session] for hashable, as caches of classes need it.
    shard: Any = ShardSession
    routed: Any = RoutedSession
    options: dict[str, Any] = field(default_factory=dict)
    meters: Meters | None = None

    @classmethod
    def of(cls, meter: Meter | None) -> SessionKinds:
        """Returns those for a meter, or the plain ones."""
        if meter is None:
            return cls()
        meters = Meters(meter)
        return cls(
            shard=MeteredShardSession, routed=MeteredRoutedSession, options={"meters": meters}, meters=meters
        )

    @property
    def on_retry(self) -> Callable[[ShardidsError | DBAPIError], object] | None:
        """What is called for each transaction that is run again."""
        return None if self.meters is None else self.meters.note_retry

    @property
    def on_clash(self) -> Callable[[object], object] | None:
        """What is called for each value that another shard has."""
        return None if self.meters is None else self.meters.note_clash

    @property
    def on_engine(self) -> Callable[[Node, Engine], object] | None:
        """What is called for each engine of a node."""
        return None if self.meters is None else self.meters.watch
