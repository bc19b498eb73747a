"""How a shard is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_PAUSE_S: Final = 2.0
"""How long writes to a shard may be stopped, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a shard is moved.

    Attributes:
        offline: copy the shard by pg_dump, with writes stopped from start to end.
        verify: compare all rows of both copies afterwards.
        max_pause_s: how long writes may be stopped; ``offline`` moves ignore it.
        trusted: roles whose code may run as the role that moves: see :mod:`shardids.catalog.trust`.
    """

    offline: bool = False
    verify: bool = False
    max_pause_s: float = MAX_PAUSE_S
    trusted: tuple[str, ...] = ()


DEFAULTS: Final = Options()
