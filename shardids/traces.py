"""Spans of OpenTelemetry around long work, such as moves: by the tracer of the process, if it has one.

A process that has not imported OpenTelemetry has none of it. Attributes are numbers of shards, names of nodes
and of steps, no values of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shardids.logs import error_code


class Span(Protocol):
    """The part of a span that callers use."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute."""


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Do nothing."""


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Span]:
    """Open a span for a block, below the open one; ``shard=5`` is its attribute ``shardids.shard``."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield _NoSpan()
        return
    tracer = trace.get_tracer("shardids")
    named = {f"shardids.{key}": value for key, value in attributes.items() if value is not None}
    # The text of an error may quote values of rows.
    quiet = {"record_exception": False, "set_status_on_exception": False}
    with tracer.start_as_current_span(name, attributes=named, **quiet) as opened:
        try:
            yield opened
        except BaseException as error:
            opened.set_attribute("error.type", error_code(error))
            opened.set_status(trace.StatusCode.ERROR)
            raise
