"""The loggers, one a package below ``shardids``, and what may be logged of an error.

Records hold no passwords, no values of parameters and no rows. An application that sets up no logging hears
nothing: ``shardids`` has a ``NullHandler``.
"""

from __future__ import annotations

import logging

from shardids.errors import ShardidsError, StatementFailed

_root = logging.getLogger("shardids")
_root.addHandler(logging.NullHandler())


def logger(package: str) -> logging.Logger:
    """Returns the logger of a package: ``mover`` is ``shardids.mover``."""
    return _root.getChild(package)


def shown_error(error: BaseException) -> str:
    """Returns what may be logged of an error: what a server or a driver says of it may quote values."""
    if isinstance(error, ShardidsError) and not isinstance(error, StatementFailed):
        # The message of an error that another caused may repeat what that one says.
        if isinstance(error.__cause__, StatementFailed):
            return f"{type(error).__name__}: {shown_error(error.__cause__)}"
        return error.message
    code = getattr(error, "sqlstate", None) or getattr(getattr(error, "orig", None), "sqlstate", None)
    return f"{type(error).__name__} {code}" if code else type(error).__name__
