"""Spans of sessions, in an OpenTelemetry tracer; a cluster without a tracer loads none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, Result, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids.catalog.topology import Node, Placement
from shardids.client.placement import Attempts
from shardids.errors import ShardidsError
from shardids.logs import error_code

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_SPAN: Final = "shardids_span"


class Traces:
    """The spans of a cluster's sessions: attributes name shards, nodes and classes of errors, no values.

    Args:
        tracer: as ``opentelemetry.trace.get_tracer(…)`` returns it.
        schema_prefix: the beginning of the names of shards' schemas.
        placement: returns the placement as last read.
    """

    def __init__(self, tracer: Tracer, schema_prefix: str, placement: Callable[[], Placement]) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415 -- there, where there is a tracer

        self._tracer = tracer
        self._prefix = schema_prefix
        self._placement = placement
        self._context, self._trace = context, trace

    def started(self, name: str, **attributes: Any) -> Span:
        """Return a new span below the one that is open, which does not become the open one."""
        named = {f"shardids.{key}": value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, attributes=named)

    def node_of(self, shard: int) -> str | None:
        """Return the name of the node that holds a shard, as far as is known."""
        return self._placement().node_of.get(shard)

    def open(self, span: Span) -> Callable[[], None]:
        """Make a span the open one, and return the function that ends that."""
        token = self._context.attach(self._trace.set_span_in_context(span))
        return lambda: self._context.detach(token)

    @contextmanager
    def around(self, name: str, **attributes: Any) -> Iterator[Span]:
        """Open a span for a block. An error that leaves it is recorded by its class and code."""
        span = self.started(name, **attributes)
        close = self.open(span)
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            close()
            span.end()

    @contextmanager
    def running(self, shard: int, attempts: Attempts) -> Iterator[None]:
        """Open a span for the attempts to run a transaction on a shard."""
        with self.around("shardids.run", shard=shard) as span:
            try:
                yield
            finally:
                span.set_attribute("shardids.attempts", attempts.made)
                if (node := self.node_of(shard)) is not None:
                    span.set_attribute("shardids.node", node)

    def note_retry(self, error: ShardidsError | DBAPIError) -> None:
        """Add to the open span that a transaction is run again."""
        self._trace.get_current_span().add_event("shardids.retry", {"error.type": error_code(error)})

    def watch(self, node: Node, engine: Engine) -> None:
        """Trace each statement that is executed on a node."""

        @event.listens_for(engine, "before_cursor_execute")
        def _begin(connection: Any, _2: Any, _3: Any, _4: Any, context: Any, _5: Any) -> None:
            options = connection.get_execution_options()
            schema = (options.get("schema_translate_map") or {}).get(None) or ""
            number = schema.removeprefix(self._prefix)
            vars(context)[_SPAN] = self._tracer.start_span(
                "shardids.statement",
                kind=self._trace.SpanKind.CLIENT,
                attributes={"db.system.name": "postgresql", "shardids.node": node.name}
                | ({"shardids.shard": int(number)} if number.isdigit() else {}),
            )

        @event.listens_for(engine, "after_cursor_execute")
        def _end(_1: Any, _2: Any, _3: Any, _4: Any, context: Any, _5: Any) -> None:
            if (span := vars(context).pop(_SPAN, None)) is not None:
                span.end()

        @event.listens_for(engine, "handle_error")
        def _fail(failed: ExceptionContext) -> None:
            context = failed.execution_context
            span = None if context is None else vars(context).pop(_SPAN, None)
            if span is not None:
                fail(span, failed.original_exception)
                span.end()


def fail(span: Span, error: BaseException) -> None:
    """Record an error in a span. Its text stays out: a server may quote values of rows in it."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 -- there, where there is a span

    span.set_attribute("error.type", error_code(error))
    span.set_status(Status(StatusCode.ERROR))


class Traced(Session):
    """A session with a span from its making to its end; in a ``with`` block, statements are below it."""

    _kind: str

    def __init__(self, *arguments: Any, traces: Traces, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.traces = traces
        shard: int | None = getattr(self, "shard", None)
        node = None if shard is None else traces.node_of(shard)
        self._span: Span | None = traces.started("shardids.session", kind=self._kind, shard=shard, node=node)
        self._leave: Callable[[], None] | None = None

    def __enter__(self) -> Any:
        if self._span is not None:
            self._leave = self.traces.open(self._span)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._span is not None and error is not None:
            fail(self._span, error)
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._leave is not None:
                self._leave()
                self._leave = None

    def close(self) -> None:
        """End the session and its span."""
        super().close()
        if self._span is not None:
            self._span.end()
            self._span = None


class TracedFanOut(Traced):
    """A session over all shards, with spans also of statements over several of them."""

    def _ask_several(self, context: Any, named: Any) -> Result[Any]:
        shards = "all" if named.shards is None else sorted(named.shards)
        ask: Any = super()
        with self.traces.around("shardids.fan_out", shards=shards):
            found: Result[Any] = ask._ask_several(context, named)
        return found
