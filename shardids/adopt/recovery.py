"""The recovery of a source after a crash, which commands wait for."""

from __future__ import annotations

import re
import time
from typing import Final

from sqlalchemy import Engine

from shardids.errors import ConnectionFailed, ShardidsError

_RECOVERY: Final = re.compile(
    r"the database system is (starting up|in recovery mode|not (yet )?accepting connections)"
)
_RECOVERY_S: Final = 120.0
"""How long to wait for a server that replays its log after a crash."""
_POLL_S: Final = 0.2


def await_recovered(engine: Engine) -> None:
    """Wait while a server recovers; whatever else is wrong with it is left to the next that connects."""
    deadline = time.monotonic() + _RECOVERY_S
    while True:
        try:
            with engine.connect():
                return
        except ConnectionFailed as error:
            if _RECOVERY.search(error.message) is None or time.monotonic() > deadline:
                return
        except ShardidsError:
            return
        time.sleep(_POLL_S)
