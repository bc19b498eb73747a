"""Logging of the command line: to stderr, as text or JSON, what ``--verbose`` asks for."""

from __future__ import annotations

import logging
import sys

from shardids.logs import logger

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TOLD = ("adopt", "migrate", "mover", "tenants")
"""Packages whose errors the commands print."""


class _Stderr(logging.Handler):
    """Writes to what stderr is now: bars on a terminal take its place while they are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 -- as logging's own handlers
            self.handleError(record)


_handler = _Stderr()


def set_up(verbosity: int, *, as_json: bool) -> None:
    """Log warnings; with a ``verbosity`` of 1 also steps and change of state, with 2 statements."""
    _handler.setFormatter(_formatter(as_json=as_json))
    above = logging.getLogger("shardids")
    above.addHandler(_handler)
    above.setLevel(logging.DEBUG if verbosity else logging.WARNING)
    logger("sql").setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
    is_asked_for = verbosity > 0 or as_json
    for package in _TOLD:
        logger(package).setLevel(logging.NOTSET if is_asked_for else logging.ERROR)


def _formatter(*, as_json: bool) -> logging.Formatter:
    if not as_json:
        return logging.Formatter(_TEXT)
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        rename_fields={"levelname": "level", "name": "logger"},
        timestamp="time",
    )
