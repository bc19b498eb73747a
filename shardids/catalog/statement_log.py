"""Logs the statements of an engine, with how long they took and without the values in them."""

from __future__ import annotations

import logging
import re
import time
from typing import Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext

from shardids.logs import logger, shown_error

log = logger("sql")

_BEGUN: Final = "shardids_log_begun"
_LONGEST: Final = 1000
"""How many characters of a statement are shown."""
_NODE = re.compile(r'node "(.*)"')
# Where it is not certain that a literal or a comment ends, the rest of the statement goes with it.
_HIDDEN = re.compile(
    r"""(?P<name>"(?:[^"]|"")*")
      | --[^\n]*
      | '(?:[^'\\]|'')*'(?!')
      | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
      | (?:['"]|/\*|\$\w*\$).*""",
    re.DOTALL | re.VERBOSE,
)


def shown_statement(statement: str) -> str:
    """Returns a statement in one line, with ``…`` for comments and literals other than numbers."""
    shown = _HIDDEN.sub(lambda found: found["name"] or " … ", statement[:_LONGEST])
    return " ".join(shown.split())


def log_statements(engine: Engine, what: str) -> None:
    """Logs each statement at DEBUG, if that is on now; else nothing listens to the engine.

    ``what`` names the server, as errors do.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    found = _NODE.fullmatch(what)
    server: dict[str, object] = {"server": what, **({"node": found[1]} if found else {})}

    # A connection executes one statement at a time.
    @event.listens_for(engine, "before_cursor_execute")
    def _begin(connection: Connection, *_: object) -> None:
        connection.info[_BEGUN] = time.perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def _end(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        _tell(connection, statement, "took")

    @event.listens_for(engine, "handle_error")
    def _fail(context: ExceptionContext) -> None:
        if context.connection is not None and context.statement is not None:
            _tell(context.connection, context.statement, f"{shown_error(context.original_exception)} after")

    def _tell(connection: Connection, statement: str, how: str) -> None:
        begun = connection.info.pop(_BEGUN, None)
        if begun is None or not log.isEnabledFor(logging.DEBUG):
            return
        seconds, shown = time.perf_counter() - begun, shown_statement(statement)
        log.debug(
            "%s: %s %.1f ms: %s",
            what,
            how,
            seconds * 1000,
            shown,
            extra=server | {"statement": shown, "seconds": round(seconds, 6)},
        )
