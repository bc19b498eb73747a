"""The loggers, one per package below ``shardids``, and the loggable part of an error.

Records hold no passwords, no values of parameters and no rows. An application that sets up no logging hears
nothing: ``shardids`` has a ``NullHandler``.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from shardids.errors import ShardidsError, StatementFailed

_root = logging.getLogger("shardids")
_root.addHandler(logging.NullHandler())


def logger(package: str) -> logging.Logger:
    """Return the logger of a package: ``mover`` is ``shardids.mover``."""
    return _root.getChild(package)


def shown_error(error: BaseException) -> str:
    """Return the loggable part of an error: messages of servers and drivers may quote values."""
    if isinstance(error, ShardidsError) and not isinstance(error, StatementFailed):
        # The message of an error that another caused may repeat what that one says.
        if isinstance(error.__cause__, StatementFailed):
            return f"{type(error).__name__}: {shown_error(error.__cause__)}"
        return error.message
    return error_code(error)


def error_code(error: BaseException) -> str:
    """Return the class of an error, and its SQLSTATE if it has one."""
    code = getattr(error, "sqlstate", None) or getattr(getattr(error, "orig", None), "sqlstate", None)
    return f"{type(error).__name__} {code}" if code else type(error).__name__


def log_program(package: str, command: Sequence[str | Path], began: float, code: int | None) -> None:
    """Log a program that has ended, at DEBUG; the arguments in ``command`` must hold no secret.

    ``began`` is of :func:`time.perf_counter`; ``code`` is the exit code, the negative number of a signal, or
    ``None`` if an interrupt did not wait for the end.
    """
    log = logger(package)
    if code is None or not log.isEnabledFor(logging.DEBUG):
        return
    program, arguments = Path(command[0]).name, shlex.join(map(str, command[1:]))
    seconds = round(time.perf_counter() - began, 6)
    log.debug(
        "%s ended with exit code %d after %.3f s: %s",
        program,
        code,
        seconds,
        arguments,
        extra={"program": program, "arguments": arguments, "seconds": seconds, "exit_code": code},
    )
